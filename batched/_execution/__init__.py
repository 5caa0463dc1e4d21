"""Execution of one batch: attempts, and drivers that call or await the function."""
