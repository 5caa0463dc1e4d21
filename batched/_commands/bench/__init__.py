"""`python -m batched bench`: the speed of a batch function by size of the batch and under load, and
the `batch_size` that it should have.
"""
