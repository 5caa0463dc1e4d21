"""Settings of a scheduler, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Final, Literal, get_args

from .checks import check_whole

Flush = Literal["auto", "eager", "window"]
OnFull = Literal["wait", "raise"]


_LEAST: Final = {
    "batch_size": 1,
    "small_batch_threshold": 0,
    "max_concurrent_batches": 1,
    "max_batch_tokens": 1,
    "max_queue_size": 1,
}
"""Least values of integer settings. A setting with the default None may be None."""


@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """Valid settings of a scheduler.

    The message of an error names the setting, the value and the allowed range.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of its range.
    """

    batch_size: int = 32
    """Most items in one batch; at least 1."""
    timeout_ms: float | None = None
    """Longest time for which an item is held so that more can join; finite, at least 0 (ms). None:
    5 ms or, with `flush="auto"`, half of the mean time of a batch if that is longer.
    """
    small_batch_threshold: int = 8
    """Most items of a small call; small calls go first. At least 0."""
    flush: Flush = "auto"
    """Rule for the moment when a batch that is not full may leave."""
    max_batch_tokens: int | None = None
    """Most items times the longest length in one batch; at least 1. None: no limit."""
    max_concurrent_batches: int = 1
    """Most batches that run at once; at least 1."""
    max_queue_size: int | None = None
    """Most items that wait in the queue; at least 1. A larger call enters an empty queue alone.
    None: no limit.
    """
    on_full: OnFull = "wait"
    """Treatment of a call for which the queue has no room: the call waits, or is refused."""
    queue_timeout_ms: float | None = None
    """Longest time that a call waits before any of its items runs; finite, above 0 (ms). None: no
    limit.
    """

    def __post_init__(self) -> None:
        checked = vars(self)  # changed in place, because the instance is frozen
        for name, least in _LEAST.items():
            if checked[name] is not None or getattr(BatchPolicy, name) is not None:
                checked[name] = check_whole(name, checked[name], least)
        for name, above in (("timeout_ms", False), ("queue_timeout_ms", True)):
            if checked[name] is not None:
                checked[name] = _duration(name, checked[name], above=above)
        for name, allowed in (("flush", get_args(Flush)), ("on_full", get_args(OnFull))):
            if checked[name] not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}, got {checked[name]!r}"
                )


def _duration(name: str, value: object, *, above: bool) -> float:
    allowed = "above 0 and finite" if above else "at least 0 and finite"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of milliseconds, {allowed}, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and (number > 0 if above else number >= 0)):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number
