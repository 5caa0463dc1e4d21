"""Progress: the SQLite file that holds all that is committed."""
