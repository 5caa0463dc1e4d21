"""How long a group that does not fill a batch is held."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from batched._core.linger import AT_ONCE, NEVER, Eager, Window, linger
from batched._core.policy import BatchPolicy


def test_at_once_is_before_and_never_after_every_moment() -> None:
    assert AT_ONCE < -1e300
    assert NEVER > 1e300


@pytest.mark.parametrize("oldest", [-7.0, 0.0, 3.25, 1e9])
def test_eager_lets_a_group_leave_at_once_whenever_it_came(oldest: float) -> None:
    assert Eager().until(oldest) == AT_ONCE


@pytest.mark.parametrize("oldest", [-7.0, 0.0, 3.25, 1e9])
@pytest.mark.parametrize("timeout", [0.0, 0.5, 1000.0])
def test_a_window_lets_a_group_leave_when_its_oldest_item_is_as_old_as_the_timeout(oldest: float, timeout: float) -> None:
    assert Window(timeout).until(oldest) == oldest + timeout


def test_each_rule_names_the_reason_for_which_a_batch_leaves() -> None:
    assert Eager().reason == "eager"
    assert Window(1.0).reason == "timeout"


@pytest.mark.parametrize("flush", ["auto", "eager"])
def test_auto_and_eager_hold_nothing(flush: Literal["auto", "eager"]) -> None:
    assert isinstance(linger(BatchPolicy(flush=flush, timeout_ms=1000)), Eager)


def test_window_holds_for_the_timeout_of_the_policy_in_seconds() -> None:
    rule = linger(BatchPolicy(flush="window", timeout_ms=250))
    assert isinstance(rule, Window)
    assert rule.until(10.0) == 10.25


def test_a_window_without_a_timeout_is_due_on_arrival_and_not_before() -> None:
    rule = linger(BatchPolicy(flush="window", timeout_ms=0))
    assert rule.until(10.0) == 10.0
    assert not math.isinf(rule.until(10.0))
