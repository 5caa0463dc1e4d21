"""Who waits, who works, and on what: threads and event loops around the same scheduler."""
