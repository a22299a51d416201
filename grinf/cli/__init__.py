"""Interface: the commands; parse, call a job, render its report."""
