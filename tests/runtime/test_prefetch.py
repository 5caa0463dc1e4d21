"""`prefetch`: the next batch is made ready while the function runs, and the function notices
nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import pytest

import batched
from batched._collate.items import ItemCollator
from stage import BOUND, Turnstile, wait_until


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result(BOUND) for future in futures]


def started(model: Turnstile, fn: Any, items: int) -> list[Future[Any]]:
    """Return the futures of so many items, the first of which runs already."""
    futures = [fn.submit(0)]
    wait_until(lambda: len(model.batches) == 1)
    return futures + [fn.submit(item) for item in range(1, items)]


@pytest.mark.parametrize("prefetch", [1, 2])
def test_as_many_batches_as_asked_for_are_collated_while_one_runs(
    monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    collated: list[int] = []
    collate = ItemCollator.collate

    def noted(self: ItemCollator, slices: Any, batch: Any) -> Any:
        collated.append(batch.size)
        return collate(self, slices, batch)

    monkeypatch.setattr(ItemCollator, "collate", noted)
    model = Turnstile()
    fn = batched.dynamically(batch_size=2, prefetch=prefetch)(model)
    futures = started(model, fn, 9)
    wait_until(lambda: len(collated) == 1 + prefetch)
    assert len(model.batches) == 1
    assert fn.stats.in_flight == 1 + 2 * prefetch
    assert fn.stats.queue_size == 8 - 2 * prefetch
    model.let_through(5)
    assert results(futures) == list(range(9))
    assert collated == [1, 2, 2, 2, 2]
    fn.shutdown()


def test_the_function_is_called_by_one_thread_and_in_order() -> None:
    model = Turnstile()
    fn = batched.dynamically(batch_size=3, prefetch=1)(model)
    futures = started(model, fn, 40)
    model.let_through(40)
    assert results(futures) == list(range(40))
    assert [item for items in model.batches for item in items] == list(range(40))
    assert len(set(model.threads)) == 1
    fn.shutdown()


def test_as_many_threads_call_it_as_batches_may_run_at_once() -> None:
    model = Turnstile()
    fn = batched.dynamically(batch_size=1, prefetch=1, max_concurrent_batches=2)(model)
    futures = [fn.submit(item) for item in range(12)]
    wait_until(lambda: len(model.batches) == 2 and fn.stats.in_flight == 3)
    model.let_through(12)
    assert results(futures) == list(range(12))
    assert len(set(model.threads)) == 2
    fn.shutdown()


def test_shutdown_finishes_prefetched_and_waiting_batches() -> None:
    model = Turnstile()
    fn = batched.dynamically(batch_size=1, prefetch=1)(model)
    futures = started(model, fn, 5)
    closing = threading.Thread(target=fn.shutdown, daemon=True)
    closing.start()
    model.let_through(5)
    closing.join(BOUND)
    assert all(future.done() for future in futures)
    assert results(futures) == list(range(5))


def test_shutdown_ends_all_its_threads() -> None:
    fn = batched.dynamically(prefetch=1, max_concurrent_batches=3, name="transient")(
        lambda items: items
    )
    assert fn(1) == 1
    assert len([thread for thread in threading.enumerate() if "transient" in thread.name]) == 4
    fn.shutdown()
    assert not [thread for thread in threading.enumerate() if "transient" in thread.name]


def test_a_failure_to_collate_stays_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    collate = ItemCollator.collate

    def failing(self: ItemCollator, slices: Any, batch: Any) -> Any:
        if slices[0][0].items == 1:
            raise ValueError("cannot be collated")
        return collate(self, slices, batch)

    monkeypatch.setattr(ItemCollator, "collate", failing)
    fn = batched.dynamically(batch_size=1, prefetch=1)(lambda items: items)
    futures = [fn.submit(item) for item in range(4)]
    wait(futures, BOUND)
    with pytest.raises(ValueError, match="cannot be collated"):
        futures[1].result(0)
    assert [futures[item].result(0) for item in (0, 2, 3)] == [0, 2, 3]
    fn.shutdown()


def test_a_collected_owner_ends_all_threads() -> None:
    fn = batched.dynamically(prefetch=1, name="orphan")(lambda items: items)
    assert fn(1) == 1
    gone = weakref.ref(fn)
    del fn
    gc.collect()
    assert gone() is None
    wait_until(lambda: not [thread for thread in threading.enumerate() if "orphan" in thread.name])


@pytest.mark.parametrize("broken", ["run", "wake_worker"])
def test_a_failure_of_the_thread_that_calls_it_ends_the_calls(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    from batched._runtime.thread import ThreadRuntime

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("of the runtime")

    model = Turnstile()
    fn = batched.dynamically(batch_size=1, prefetch=1)(model)
    futures = started(model, fn, 3)
    wait_until(lambda: fn.stats.in_flight == 2)
    monkeypatch.setattr(ThreadRuntime, broken, fail)
    model.let_through(3)
    wait(futures, BOUND)
    assert isinstance(futures[-1].exception(0), batched.BatcherClosed)
    model.let_through(1)
    assert fn.submit(7).result(BOUND) == 7
    fn.shutdown()


def test_where_a_thread_cannot_be_started_the_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(self: threading.Thread) -> None:
        if "-2" in self.name and not refused:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    fn = batched.dynamically(prefetch=1, name="starved")(lambda items: items)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(batched.BatcherClosed, match="no worker could be started"):
        fn(1)
    assert refused
    assert fn(2) == 2
    fn.shutdown()
    wait_until(lambda: not [thread for thread in threading.enumerate() if "starved" in thread.name])


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_shutdown_ends_when_waiting_items_go_without_having_run(end: str) -> None:
    gate, running = threading.Event(), threading.Event()

    def compute(items: list[int]) -> list[int]:
        running.set()
        assert gate.wait(BOUND)
        if end == "fail":
            raise ValueError("no")
        return items

    def call() -> None:
        with contextlib.suppress(ValueError):
            fn(list(range(10)))

    fn = batched.dynamically(batch_size=2, prefetch=1, name="drained")(compute)
    if end == "fail":
        threading.Thread(target=call, daemon=True).start()
    else:
        futures = [fn.submit(item) for item in range(8)]
    assert running.wait(BOUND)
    wait_until(lambda: fn.stats.in_flight >= 3)
    closing = threading.Thread(target=fn.shutdown, daemon=True)
    closing.start()
    wait_until(lambda: fn._batcher.runtime._closed)
    if end == "cancel":
        for future in futures:
            future.cancel()
    gate.set()
    closing.join(BOUND)
    assert not closing.is_alive()
    assert not [thread for thread in threading.enumerate() if "drained" in thread.name]


def test_the_calling_thread_takes_over_a_batch_that_another_thread_collated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int, Any]] = []
    here = threading.get_ident

    def hand_over(_: ItemCollator, call: Any) -> int:
        seen.append(("hand over", here(), call))
        return 7

    def take_over(_: ItemCollator, *what: Any) -> None:
        seen.append(("take over", here(), what))

    monkeypatch.setattr(
        ItemCollator, "enter_thread", lambda _: seen.append(("enter", here(), None))
    )
    monkeypatch.setattr(ItemCollator, "hand_over", hand_over)
    monkeypatch.setattr(ItemCollator, "take_over", take_over)
    fn = batched.dynamically(prefetch=1)(lambda items: [(item, here()) for item in items])
    result, caller = fn("x")
    fn.shutdown()
    [enter, given, taken] = seen
    assert result == "x"
    assert [enter[0], given[0], taken[0]] == ["enter", "hand over", "take over"]
    assert enter[1] == given[1] != taken[1] == caller
    assert taken[2] == (given[2], 7)
    assert batched.dynamically(lambda items: items)("y") == "y", "nothing to hand over without"
    assert len(seen) == 3


@pytest.mark.parametrize("step", ["hand_over", "take_over"])
def test_a_device_that_fails_between_two_threads_fails_that_batch_only(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    failing = [True]

    def hand_over(_: ItemCollator, call: Any) -> bool:
        if failing and step == "hand_over":
            raise SystemError(failing.pop())
        return True

    def take_over(_: ItemCollator, *what: Any) -> None:
        if failing and step == "take_over":
            raise SystemError(failing.pop())

    monkeypatch.setattr(ItemCollator, "hand_over", hand_over)
    monkeypatch.setattr(ItemCollator, "take_over", take_over)
    fn = batched.dynamically(prefetch=1)(lambda items: items)
    with pytest.raises(SystemError):
        fn("x")
    assert fn("x") == "x"
    fn.shutdown()
