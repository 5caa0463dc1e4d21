"""Features: parsing, padding, batches, outputs and devices."""
