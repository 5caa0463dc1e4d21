"""Decorated functions: their settings, parsers of calls, and ways of calling."""
