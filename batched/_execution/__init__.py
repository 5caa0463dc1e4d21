"""Execution of one batch: attempts at it, and drivers that call or await the function."""
