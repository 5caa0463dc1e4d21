"""Runtimes around a scheduler: the callers that wait, and the threads and event loops that work."""
