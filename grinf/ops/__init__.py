"""Operators: the contract of each op and its reference in torch."""
