"""Watch: status file and lines of a run."""
