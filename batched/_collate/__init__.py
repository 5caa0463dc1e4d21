"""Collators: slices of a batch to arguments of the batch function, and its output to results."""
