"""The same batch function over a dataset."""
