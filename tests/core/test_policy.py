"""Checks of settings. A refusal names the setting, the value and the allowed range."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest

from batched._core.checks import suggest
from batched._core.policy import BatchPolicy

INTEGERS = {
    "batch_size": 1,
    "small_batch_threshold": 0,
    "max_batch_tokens": 1,
    "max_concurrent_batches": 1,
    "max_queue_size": 1,
}
"""Integer settings, each with its least value."""


def test_the_defaults_equal_the_table_of_settings() -> None:
    assert dataclasses.asdict(BatchPolicy()) == {
        "batch_size": 32,
        "timeout_ms": None,
        "small_batch_threshold": 8,
        "flush": "auto",
        "max_batch_tokens": None,
        "max_concurrent_batches": 1,
        "max_queue_size": None,
        "on_full": "wait",
        "queue_timeout_ms": None,
    }


def test_policies_with_equal_settings_are_equal() -> None:
    assert BatchPolicy(timeout_ms=5) == BatchPolicy(timeout_ms=5.0)
    assert hash(BatchPolicy(timeout_ms=5)) == hash(BatchPolicy(timeout_ms=5.0))
    assert BatchPolicy(batch_size=4) != BatchPolicy(batch_size=5)


@pytest.mark.parametrize(("name", "least"), INTEGERS.items())
def test_an_integer_has_a_least_value(name: str, least: int) -> None:
    kept: Any = BatchPolicy(**{name: least})  # type: ignore[arg-type]
    assert getattr(kept, name) == least
    with pytest.raises(ValueError) as caught:
        BatchPolicy(**{name: least - 1})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be at least {least}, got {least - 1}"


@pytest.mark.parametrize(("name", "least"), INTEGERS.items())
@pytest.mark.parametrize("value", [4.0, math.inf, "4", Fraction(4), [4], True])
def test_a_value_of_another_type_is_no_integer(name: str, least: int, value: object) -> None:
    with pytest.raises(TypeError) as caught:
        BatchPolicy(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be an integer of at least {least}, got {value!r}"


def test_none_is_refused_for_a_setting_with_a_limit() -> None:
    assert BatchPolicy(max_batch_tokens=None).max_batch_tokens is None
    with pytest.raises(TypeError, match=r"^batch_size must be an integer of at least 1, got None$"):
        BatchPolicy(batch_size=None)  # type: ignore[arg-type]


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    numpy = pytest.importorskip("numpy")
    policy = BatchPolicy(batch_size=numpy.int64(4), timeout_ms=numpy.float32(2))
    assert (type(policy.batch_size), policy.batch_size) == (int, 4)
    assert (type(policy.timeout_ms), policy.timeout_ms) == (float, 2.0)
    with pytest.raises(TypeError, match=r"^timeout_ms must be a number of milliseconds"):
        BatchPolicy(timeout_ms=numpy.bool_(True))


@pytest.mark.parametrize("value", [0, 0.001, 5, 10**300, Fraction(1, 2)])
def test_a_duration_becomes_a_float(value: Any) -> None:
    kept = BatchPolicy(timeout_ms=value).timeout_ms
    assert (type(kept), kept) == (float, float(value))


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, Fraction(-1, 3)])
def test_a_negative_or_infinite_duration_is_refused(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        BatchPolicy(timeout_ms=value)
    assert str(caught.value) == f"timeout_ms must be at least 0 and finite, got {value!r}"


def test_the_timeout_of_the_queue_is_above_zero() -> None:
    assert BatchPolicy(queue_timeout_ms=1).queue_timeout_ms == 1.0
    with pytest.raises(ValueError, match=r"^queue_timeout_ms must be above 0 and finite, got 0$"):
        BatchPolicy(queue_timeout_ms=0)


@pytest.mark.parametrize("value", ["5", 5 + 0j, [5], True])
def test_a_value_of_another_type_is_no_duration(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        BatchPolicy(timeout_ms=value)
    assert (
        str(caught.value)
        == f"timeout_ms must be a number of milliseconds, at least 0 and finite, got {value!r}"
    )


@pytest.mark.parametrize("value", ["", "Eager", None, ["eager"]])
def test_an_unknown_flush_rule_is_refused(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        BatchPolicy(flush=value)
    assert str(caught.value) == f"flush must be one of 'auto', 'eager', 'window', got {value!r}"


def test_the_most_similar_name_is_suggested() -> None:
    assert suggest("batch_sise", ["timeout_ms", "batch_size"]) == "; did you mean 'batch_size'?"
    assert suggest("zebra", ["timeout_ms", "batch_size"]) == ""
