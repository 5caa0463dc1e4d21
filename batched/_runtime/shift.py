"""How a batch function, and what it calls or starts, can tell that it is being run, and by which runtime."""

from __future__ import annotations

from contextvars import ContextVar


class Shift:
    """One run of a batch function by the runtime with that badge; what happens within the `with` block is part of it."""

    __slots__ = ("_on", "badge")

    def __init__(self, badge: object) -> None:
        self.badge = badge
        self._on = True

    @property
    def on(self) -> bool:
        """Whether the run goes on; a task that it started may outlive it."""
        return self._on

    def __enter__(self) -> None:
        _shift.set(self)

    def __exit__(self, *_: object) -> None:
        self._on = False


_shift: ContextVar[Shift | None] = ContextVar("shift", default=None)


def is_on_shift(badge: object) -> bool:
    """Whether this code is part of a run, that goes on, by the runtime with that badge."""
    shift = _shift.get()
    return shift is not None and shift.on and shift.badge is badge
