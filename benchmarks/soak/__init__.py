"""Calls and faults of all kinds at once, for as long as it is told to."""
