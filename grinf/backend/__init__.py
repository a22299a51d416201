"""Execution: the steps, how a step is run, and which kernel serves each op."""
