"""The settings a scheduler obeys, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from typing import Literal, get_args

Flush = Literal["auto", "eager", "window"]


@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """Valid settings, or an error whose one sentence names the setting, the value and what is allowed.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of its range.
    """

    batch_size: int = 32
    """Most items in one batch; at least 1."""
    timeout_ms: float = 5.0
    """Longest an item is held to wait for others, in milliseconds; finite, at least 0."""
    small_batch_threshold: int = 8
    """Calls of at most this many items are small and go first; at least 0."""
    flush: Flush = "auto"
    """The rule that says when a batch that is not full may leave."""
    max_batch_tokens: int | None = None
    """Most items times the longest of them in one batch; at least 1. None: no such limit."""
    max_concurrent_batches: int = 1
    """Batches running at once; at least 1."""
    prefetch: int = 0
    """Batches that are formed and collated while others run, to be ready when a worker is free; at least 0."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("small_batch_threshold", 0), ("max_concurrent_batches", 1), ("prefetch", 0)):
            object.__setattr__(self, name, _whole(name, getattr(self, name), least))
        if self.max_batch_tokens is not None:
            object.__setattr__(self, "max_batch_tokens", _whole("max_batch_tokens", self.max_batch_tokens, 1))
        object.__setattr__(self, "timeout_ms", _duration("timeout_ms", self.timeout_ms))
        if self.flush not in get_args(Flush):
            raise ValueError(f"flush must be one of {', '.join(map(repr, get_args(Flush)))}, got {self.flush!r}")

    @property
    def timeout(self) -> float:
        """`timeout_ms` in seconds, the unit of every `now`."""
        return self.timeout_ms / 1e3


def _whole(name: str, value: object, least: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return int(value)


def _duration(name: str, value: object) -> float:
    if not isinstance(value, (Real, Decimal)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of milliseconds, at least 0 and finite, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")
    return number
