"""Checks of settings. A refusal names the setting, the value and the allowed range."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy
import pytest

from batched._core.policy import BatchPolicy

INTEGERS = {
    "batch_size": 1,
    "small_batch_threshold": 0,
    "max_batch_tokens": 1,
    "max_concurrent_batches": 1,
    "max_queue_size": 1,
}
"""Integer settings, each with its least value."""


def test_any_number_in_the_range_is_taken() -> None:
    for name, least in INTEGERS.items():
        assert getattr(BatchPolicy(**{name: least}), name) == least  # type: ignore[arg-type]
    duration: Any
    for duration in (0, 0.001, 5, 10**300, Fraction(1, 2), numpy.float32(2)):
        kept = BatchPolicy(timeout_ms=duration).timeout_ms
        assert (type(kept), kept) == (float, float(duration))
    four: Any = numpy.int64(4)
    policy = BatchPolicy(queue_timeout_ms=1, max_batch_tokens=None, batch_size=four)
    assert (policy.queue_timeout_ms, type(policy.batch_size), policy.batch_size) == (1.0, int, 4)


FINITE = "must be at least 0 and finite"
NUMBER = "must be a number of milliseconds, at least 0 and finite"
WHOLE = "must be an integer of at least 1"
REFUSED: list[tuple[type[Exception], str, Any, str]] = [
    *((ValueError, n, least - 1, f"must be at least {least}") for n, least in INTEGERS.items()),
    *((TypeError, "batch_size", value, WHOLE) for value in (4.0, "4", True, None)),
    *((ValueError, "timeout_ms", value, FINITE) for value in (-1e-9, math.nan, math.inf)),
    *((TypeError, "timeout_ms", value, NUMBER) for value in ("5", 5 + 0j, True, numpy.True_)),
    (ValueError, "queue_timeout_ms", 0, "must be above 0 and finite"),
    (ValueError, "flush", "Eager", "must be one of 'auto', 'eager', 'window'"),
]


@pytest.mark.parametrize(("error", "name", "value", "said"), REFUSED)
def test_a_wrong_value_is_refused(error: type[Exception], name: str, value: Any, said: str) -> None:
    with pytest.raises(error) as caught:
        BatchPolicy(**{name: value})
    assert str(caught.value) == f"{name} {said}, got {value!r}"
