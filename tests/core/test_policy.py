"""Every setting is checked once, and a refusal is one sentence that names the setting, the value
and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from batched._core.policy import BatchPolicy

WHOLE = {
    "batch_size": 1,
    "small_batch_threshold": 0,
    "max_batch_tokens": 1,
    "max_concurrent_batches": 1,
    "prefetch": 0,
}
"""The settings that are whole numbers, each with the least that is allowed."""


def test_the_defaults_are_those_of_the_settings_table() -> None:
    assert dataclasses.asdict(BatchPolicy()) == {
        "batch_size": 32,
        "timeout_ms": 5.0,
        "small_batch_threshold": 8,
        "flush": "auto",
        "max_batch_tokens": None,
        "max_concurrent_batches": 1,
        "prefetch": 0,
        "max_queue_size": None,
        "on_full": "wait",
        "queue_timeout_ms": None,
    }


def test_settings_are_kept_as_given() -> None:
    given: dict[str, Any] = {
        "batch_size": 7,
        "timeout_ms": 2.5,
        "small_batch_threshold": 3,
        "flush": "window",
        "max_batch_tokens": 4096,
        "max_concurrent_batches": 2,
        "prefetch": 1,
        "max_queue_size": 100,
        "on_full": "raise",
        "queue_timeout_ms": 1.5,
    }
    assert dataclasses.asdict(BatchPolicy(**given)) == given


def test_settings_go_by_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        BatchPolicy(4)  # type: ignore[call-arg]


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="batchsize"):
        BatchPolicy(batchsize=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BatchPolicy)])
def test_a_policy_is_frozen(name: str) -> None:
    policy = BatchPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, getattr(policy, name))


def test_policies_with_the_same_settings_are_equal_however_they_were_written() -> None:
    assert BatchPolicy(timeout_ms=5) == BatchPolicy(timeout_ms=5.0)
    assert hash(BatchPolicy(timeout_ms=5)) == hash(BatchPolicy(timeout_ms=5.0))
    assert BatchPolicy(batch_size=4) != BatchPolicy(batch_size=5)


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(0, 0.0), (5, 0.005), (0.25, 0.00025), (1e6, 1e3)]
)
def test_the_timeout_is_told_in_seconds(milliseconds: float, seconds: float) -> None:
    assert BatchPolicy(timeout_ms=milliseconds).timeout == seconds


@pytest.mark.parametrize(("name", "least"), WHOLE.items())
@pytest.mark.parametrize("more", [0, 1, 10**9])
def test_a_whole_number_from_its_least_value_on_is_accepted(
    name: str, least: int, more: int
) -> None:
    assert getattr(BatchPolicy(**{name: least + more}), name) == least + more  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "least"), WHOLE.items())
@pytest.mark.parametrize("less", [1, 2, 10**9])
def test_a_whole_number_below_its_least_value_is_a_value_error(
    name: str, least: int, less: int
) -> None:
    with pytest.raises(ValueError) as caught:
        BatchPolicy(**{name: least - less})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be at least {least}, got {least - less}"


@pytest.mark.parametrize(("name", "least"), WHOLE.items())
@pytest.mark.parametrize(
    "value", [4.0, 1.5, math.inf, "4", b"4", 4 + 0j, Fraction(4), [4], True, False]
)
def test_what_is_no_whole_number_is_a_type_error(name: str, least: int, value: object) -> None:
    with pytest.raises(TypeError) as caught:
        BatchPolicy(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be an integer of at least {least}, got {value!r}"


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "max_batch_tokens"])
def test_none_is_a_whole_number_only_where_it_means_no_limit(name: str) -> None:
    assert BatchPolicy(max_batch_tokens=None).max_batch_tokens is None
    with pytest.raises(TypeError) as caught:
        BatchPolicy(**{name: None})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be an integer of at least {WHOLE[name]}, got None"


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["int8", "int64", "uint8", "uint64"])
def test_a_whole_number_of_numpy_becomes_an_int(name: str, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    kept = getattr(BatchPolicy(**{name: numpy.dtype(kind).type(4)}), name)
    assert type(kept) is int
    assert kept == 4


def test_a_number_of_numpy_below_the_least_value_is_shown_as_it_was_given() -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.int64(0)
    with pytest.raises(ValueError) as caught:
        BatchPolicy(batch_size=value)
    assert str(caught.value) == f"batch_size must be at least 1, got {value!r}"


@pytest.mark.parametrize("name", WHOLE)
def test_a_float_or_bool_of_numpy_is_no_whole_number(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float64(4), numpy.bool_(True)):
        with pytest.raises(TypeError, match=f"^{name} must be an integer of at least"):
            BatchPolicy(**{name: value})


@pytest.mark.parametrize("value", [0, -0.0, 0.001, 5, 1e9, 10**300, Fraction(1, 2), Decimal("2.5")])
def test_a_duration_of_at_least_nothing_becomes_a_float(value: Any) -> None:
    kept = BatchPolicy(timeout_ms=value).timeout_ms
    assert type(kept) is float
    assert kept == float(value)


@pytest.mark.parametrize("kind", ["int32", "float32", "float64"])
def test_a_duration_of_numpy_becomes_a_float(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    kept = BatchPolicy(timeout_ms=numpy.dtype(kind).type(4)).timeout_ms
    assert type(kept) is float
    assert kept == 4.0


@pytest.mark.parametrize(
    "value", [-1, -1e-9, math.nan, math.inf, -math.inf, Decimal("nan"), Fraction(-1, 3)]
)
def test_a_duration_below_nothing_or_without_end_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        BatchPolicy(timeout_ms=value)
    assert str(caught.value) == f"timeout_ms must be at least 0 and finite, got {value!r}"


@pytest.mark.parametrize("value", [None, "5", "soon", b"5", 5 + 0j, [5], True, False])
def test_what_is_no_duration_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        BatchPolicy(timeout_ms=value)
    assert (
        str(caught.value)
        == f"timeout_ms must be a number of milliseconds, at least 0 and finite, got {value!r}"
    )


def test_a_duration_too_large_for_a_float_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"^timeout_ms must be at least 0 and finite, got 1000"):
        BatchPolicy(timeout_ms=10**400)


def test_a_bool_of_numpy_is_no_duration() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=r"^timeout_ms must be a number of milliseconds"):
        BatchPolicy(timeout_ms=numpy.bool_(True))


@pytest.mark.parametrize("value", [bytearray(b"5"), memoryview(b"5")])
def test_a_buffer_is_no_duration(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^timeout_ms must be a number of milliseconds"):
        BatchPolicy(timeout_ms=value)


@pytest.mark.parametrize("rule", ["auto", "eager", "window"])
def test_each_flush_rule_is_accepted(rule: Any) -> None:
    assert BatchPolicy(flush=rule).flush == rule


@pytest.mark.parametrize("value", ["", "Eager", "windows", None, 0, True, ["eager"]])
def test_what_is_no_flush_rule_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        BatchPolicy(flush=value)
    assert str(caught.value) == f"flush must be one of 'auto', 'eager', 'window', got {value!r}"


def test_the_first_wrong_setting_of_several_is_named() -> None:
    with pytest.raises(ValueError, match=r"^batch_size must be at least 1, got 0$"):
        BatchPolicy(batch_size=0, timeout_ms=-1, flush="soon")  # type: ignore[arg-type]
