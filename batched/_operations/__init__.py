"""Counts, metrics and traces of all batched functions at once."""
