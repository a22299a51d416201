"""Interface: what each command does, as plain functions that print nothing."""
