"""Finalizers, which Python runs anywhere, also in a thread that changes the queue just then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import batched
from batched._core.scheduler import Scheduler
from stage import BOUND, in_time, wait_until


def interrupt_submit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` once in the midst of the next submission, in the thread that submits."""
    submit, left = Scheduler.submit, [act]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        while left:
            left.pop()()
        return submit(*args, **kwargs)

    monkeypatch.setattr(Scheduler, "submit", interrupted)


def holding() -> Any:
    return batched.dynamically(flush="window", timeout_ms=1e9)(lambda items: items)


def test_a_finalizer_may_cancel_which_is_done_a_moment_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn, refused = holding(), []
    futures = [fn.submit(1), fn.submit(2)]
    interrupt_submit(monkeypatch, lambda: refused.append(not futures[1].cancel()))
    futures.append(in_time(lambda: fn.submit(3)))
    assert refused == [True], "not yet"
    wait_until(futures[1].cancelled)
    in_time(fn.shutdown)
    assert [futures[0].result(BOUND), futures[2].result(BOUND)] == [1, 3]


def test_a_finalizer_may_close_which_is_done_a_moment_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn = holding()
    interrupt_submit(monkeypatch, lambda: fn.shutdown(wait=False))
    assert in_time(lambda: fn(1)) == 1
    with pytest.raises(batched.BatcherClosed):
        in_time(lambda: fn(2))


@pytest.mark.parametrize("way", ["call", "submit", "map"])
def test_a_call_from_a_finalizer_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, refused = batched.dynamically(lambda items: items), []

    def call() -> None:
        with pytest.raises(RuntimeError, match="called by a finalizer or a signal handler"):
            list(fn.map([1])) if way == "map" else getattr(fn, way.replace("call", "__call__"))(1)
        refused.append(way)

    interrupt_submit(monkeypatch, call)
    assert in_time(lambda: fn(2)) == 2
    assert refused == [way]
    in_time(fn.shutdown)
