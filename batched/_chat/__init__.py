"""Requests to a chat service: their content, their moment, and the checks of the answers."""
