"""Run: one source through all steps."""
