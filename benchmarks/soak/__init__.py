"""Soak: every accepted call ends exactly once, with its own result, under faults of all kinds.

`tests/integrations/test_soak.py` runs it.
"""
