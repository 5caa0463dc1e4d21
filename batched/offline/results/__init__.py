"""Results: the files that a run writes."""
