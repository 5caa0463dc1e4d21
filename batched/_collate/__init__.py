"""Collators: from the slices of a batch to the argument of the batch function, and from its output
to one result for each caller.
"""
