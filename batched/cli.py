"""Command line of the package, `batched` or `python -m batched`."""

from ._commands.parser import main

__all__ = ["main"]
