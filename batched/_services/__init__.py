"""Prompts and errors of services, as their clients pass them."""
