"""How a batch function, and what it calls or starts, can tell that it is being run, and by which runtime."""

from __future__ import annotations

from contextvars import ContextVar


class Shift:
    """One run of a batch function by the runtime with that badge, begun here, and over once `on` is False."""

    __slots__ = ("badge", "on")

    def __init__(self, badge: object) -> None:
        self.badge = badge
        self.on = True  # a task that the function started may outlive the run
        _shift.set(self)


_shift: ContextVar[Shift | None] = ContextVar("shift", default=None)


def is_on_shift(badge: object) -> bool:
    """Whether this code is part of a run, that goes on, by the runtime with that badge."""
    shift = _shift.get()
    return shift is not None and shift.on and shift.badge is badge
