"""Checks of settings, and of the names that callers give."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Final

PEERS: Final = {
    "batch_size": "max_inputs",
    "collate_fn": "prepare",
    "concurrency": "max_workers",
    "key": "dedupe",
    "max_batch_size": "batch_size",
    "max_latency": "timeout_ms",
    "max_latency_ms": "timeout_ms",
    "max_length": "max_new_tokens",
    "max_retries": "attempts",
    "max_wait_ms": "timeout_ms",
    "max_wait_time": "timeout_ms",
    "max_workers": "max_concurrent_batches",
    "num_workers": "max_concurrent_batches",
    "resume": "resume_from_last",
    "retries": "attempts",
    "rpm": "requests_per_minute",
    "stop": "stop_strings",
    "tpm": "tokens_per_minute",
    "wait_ms": "timeout_ms",
}
"""Settings of other libraries, with their names here."""


def check_whole(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: the value is no integer.
        ValueError: the value is below `least`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return int(value)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the question whether the most similar known name was meant, or an empty text."""
    from difflib import get_close_matches  # only errors need it

    known = [*known]
    alike = [PEERS[name]] if PEERS.get(name) in known else get_close_matches(name, known, 1)
    return f"; did you mean {alike[0]!r}?" if alike else ""
