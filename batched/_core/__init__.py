"""Decisions on what runs next, and when: pure. Nothing here can tell the time, wait, or call user
code.
"""
