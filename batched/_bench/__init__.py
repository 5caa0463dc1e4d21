"""`python -m batched bench`: how fast a batch function is by size and under load, and which
`batch_size` it should have.
"""
