"""The warning for one thread that calls a batched function item by item."""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import batched
from batched._core.scheduler import Batch, Request
from batched._runtime import recorder as module
from batched._runtime.recorder import LONG, MANY_CALLS, MOST_UNREAD, SHORT_GAP, Recorder
from stage import BOUND

AT_MOST = MANY_CALLS + 4 * MOST_UNREAD
"""Calls after which a loop is known."""


def elsewhere(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(BOUND)


class Traffic:
    """Calls one after another, in virtual time."""

    def __init__(self) -> None:
        self.recorder = Recorder("")
        self.warned_at = 0
        self._calls = 0
        self._now = 1000.0

    def call(
        self,
        times: int,
        *,
        seconds: float = 0.01,
        gap: float = 5e-5,
        size: int = 1,
        waits: bool = True,
        thread: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Make calls that take `seconds` each; `thread` says which of them this thread makes."""
        for number in range(times):
            self._calls += 1
            if waits and self.recorder.asks:
                self._note(thread(number))
            request = Request([0] * size, size, "g")
            request.arrived = self._now
            batch = Batch([(request, 0, size)], size, "eager", self._now)
            batch.ended = self._now + seconds
            self._now += seconds + gap
            self.recorder.ended(batch, 0)

    def _note(self, here: bool) -> None:
        warned: list[bool] = []

        def note() -> None:
            warned.append(self.recorder.note_caller())

        note() if here else elsewhere(note)
        if warned[0] and not self.warned_at:
            self.warned_at = self._calls


def test_a_loop_of_one_thread_is_known_after_a_thousand_calls() -> None:
    traffic = Traffic()
    traffic.call(AT_MOST)
    assert MANY_CALLS <= traffic.warned_at <= AT_MOST


def test_a_loop_over_a_quick_function_is_known_once_it_has_taken_long() -> None:
    traffic = Traffic()
    calls = math.ceil(LONG / 1e-4)
    traffic.call(calls, seconds=1e-4)
    assert traffic.warned_at == 0
    traffic.call(4 * MOST_UNREAD, seconds=1e-4)
    assert traffic.warned_at >= calls


@pytest.mark.parametrize(
    "circumstances",
    [
        pytest.param({"gap": 1.1 * SHORT_GAP}, id="callers that come now and then"),
        pytest.param({"size": 2}, id="batches of two items"),
        pytest.param({"waits": False}, id="coroutines, and futures"),
        pytest.param({"thread": lambda number: number % 2 == 0}, id="two threads in turns"),
        pytest.param({"thread": lambda number: number < 600}, id="another thread later"),
    ],
)
def test_other_calls_are_no_loop(circumstances: Any) -> None:
    traffic = Traffic()
    traffic.call(AT_MOST, **circumstances)
    assert traffic.warned_at == 0


def test_one_pause_or_one_larger_batch_begins_the_count_again() -> None:
    pauses: list[dict[str, Any]] = [{"gap": 1.0}, {"size": 2}]
    for pause in pauses:
        traffic = Traffic()
        for _ in range(5):
            traffic.call(MANY_CALLS - 1)
            traffic.call(1, **pause)
        assert traffic.warned_at == 0
        traffic.call(AT_MOST)
        assert traffic.warned_at


def test_statistics_may_be_read_meanwhile_and_their_reset_begins_the_count_again() -> None:
    traffic = Traffic()
    for _ in range(5):
        traffic.call(MOST_UNREAD + 100)
        traffic.recorder.reset()
    assert not traffic.recorder.asks
    for _ in range(10):
        traffic.call(MOST_UNREAD + 100)
        traffic.recorder.snapshot(0, 0, 0)
    assert traffic.warned_at > 5 * MOST_UNREAD


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take calls on a machine of any speed for a loop."""
    monkeypatch.setattr(module, "SHORT_GAP", math.inf)
    monkeypatch.setattr(module, "LONG", 0.0)


@pytest.mark.usefixtures("any_speed")
def test_the_warning_comes_once_and_names_the_remedy() -> None:
    def shout(texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]

    fn = batched.dynamically(name="shout")(shout)
    with fn, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [fn("a") for _ in range(2 * AT_MOST)] == ["A"] * (2 * AT_MOST)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    assert str(warning.message) == (
        "one thread calls shout item by item, so that each batch has one item; pass a list, "
        "`shout(list(items))`, or use `shout.map(items)`"
    )


@pytest.mark.usefixtures("any_speed")
def test_no_warning_for_futures_lists_maps_and_coroutines() -> None:
    with batched.dynamically(lambda items: items) as fn:
        for number in range(AT_MOST):
            assert fn.submit(number).result(BOUND) == number
        assert list(fn.map(range(AT_MOST))) == list(range(AT_MOST))
        for _ in range(100):
            assert len(fn(list(range(100)))) == 100

    async def call() -> None:
        for number in range(AT_MOST):
            assert await fn.acall(number) == number

    fn = fn.with_options()
    asyncio.run(call())
    fn.shutdown()
