"""Command demo: two programs that show batches online and offline."""
