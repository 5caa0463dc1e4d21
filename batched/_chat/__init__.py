"""Requests to a chat service: what is asked, when, and what the answers are worth."""
