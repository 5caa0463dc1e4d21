"""Commands of `python -m batched`; each imports its packages when it runs."""
