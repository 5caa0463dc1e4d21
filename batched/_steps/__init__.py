"""Functions that work in steps: rows join and leave a run one by one."""
