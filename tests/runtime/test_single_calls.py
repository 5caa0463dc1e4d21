"""The warning of one thread that calls a function item by item."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

import batched
from batched._runtime.recorder import LONG, MANY_CALLS, MOST_UNREAD, Recorder


def record(recorder: Recorder, moment: float, size: int, gap: float, duration: float) -> float:
    """Count `MOST_UNREAD` batches, one after another, and return the moment of their end."""
    for _ in range(MOST_UNREAD):
        started = moment + gap
        moment = started + duration
        batch: Any = SimpleNamespace(
            size=size,
            reason="eager",
            started=started,
            ended=moment,
            waits=[0.0] * size,
            cells=0,
            padding=0,
            too_big=(),
        )
        recorder.ended(batch, 0)
    return moment


def told(*, size: int = 1, gap: float = 5e-5, duration: float = 2e-3, threads: int = 1) -> bool:
    """Return whether a caller of many batches is taken for a loop."""
    recorder, moment, found = Recorder(""), 0.0, False

    def note() -> None:
        nonlocal found
        found = recorder.note_caller() or found

    for number in range(2 + 2 * MANY_CALLS // MOST_UNREAD):
        moment = record(recorder, moment, size, gap, duration)
        if recorder.asks:
            if number % threads:
                other = threading.Thread(target=note)
                other.start()
                other.join()
            else:
                note()
    return found


def test_a_loop_of_one_thread_is_told() -> None:
    assert told()


@pytest.mark.parametrize(
    "load", [{"size": 2}, {"gap": 1e-3}, {"duration": LONG / MANY_CALLS / 10}, {"threads": 2}]
)
def test_other_callers_are_not_told(load: dict[str, Any]) -> None:
    assert not told(**load)


def test_callers_that_do_not_wait_are_not_told() -> None:
    recorder, moment = Recorder(""), 0.0
    for _ in range(10):
        moment = record(recorder, moment, 1, 5e-5, 2e-3)
    assert recorder.asks  # no call has come that waits
    assert not recorder.note_caller()


def test_the_warning_names_the_function_and_comes_once() -> None:
    @batched.dynamically(name="embed")
    def fn(items: list[int]) -> list[int]:
        return items

    recorder: Any = fn._batcher.recorder
    recorder._is_loop, recorder._caller = True, threading.get_ident()
    with fn:
        recorder.asks = True
        with pytest.warns(
            RuntimeWarning, match=r"one thread calls embed item by item.*embed\(list"
        ):
            fn(1)
        recorder.asks = True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fn(1)
