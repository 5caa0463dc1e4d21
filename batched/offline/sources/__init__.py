"""Sources: rows in windows of bounded size, read in the same order each time."""
