"""Operators: the dense transformer and its weights. Knows no KV, phase or kernel."""
