"""Decisions on which items run next, and when.

All code here is pure: it cannot tell the time, wait, or call user code.
"""
