"""What to run next, and when: pure decisions. Nothing here can tell the time, wait, or call user
code.
"""
