"""Command bench: the speed of a batch function by size of the batch and under concurrent callers.

The command recommends settings, or no batching.
"""
