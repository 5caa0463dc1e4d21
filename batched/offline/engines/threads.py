"""Workers in this process: the function in the thread, or on the loop, that calls it."""

from __future__ import annotations

from typing import Any

from .engine import Worker
from .function import build


class LocalWorker(Worker):
    """The function where it is called."""

    def start(self) -> bool:
        """Build the function."""
        self._func = build(self.step)
        return True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function, or for a coroutine function an awaitable of it."""
        return self._func(*args, **kwargs)

    def close(self) -> None:
        """Drop the function, with its model."""
        vars(self).pop("_func", None)
