"""Soak: calls and faults of all kinds at once, for some minutes."""
