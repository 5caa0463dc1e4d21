"""Watch: status file and bars of a run."""
