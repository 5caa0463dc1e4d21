"""dedupe: equal items that wait or run are computed once, for all of their callers."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

import batched

BOUND = 30.0
"""Seconds after which a wait counts as a hang."""


class Gated:
    """A deduplicating function that waits in its first batch until it may go on."""

    def __init__(self, **settings: Any) -> None:
        self.computed: list[Any] = []
        self.entered, self.go = threading.Event(), threading.Event()

        def compute(items: list[Any]) -> list[Any]:
            self.computed += items
            self.entered.set()
            assert self.go.wait(BOUND)
            return [KeyError(item) if item == "bad" else [item, "result"] for item in items]

        self.fn: Any = batched.dynamically(dedupe=True, **settings)(compute)

    def begin(self, item: Any = "first") -> Any:
        """Return the future of an item that runs."""
        future = self.fn.submit(item)
        assert self.entered.wait(BOUND)
        return future


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.go.set()
    made.fn.shutdown()


def test_32_equal_calls_in_flight_are_computed_once_and_share_no_result(gated: Gated) -> None:
    gated.begin()
    with ThreadPoolExecutor(32) as pool:
        calls = [pool.submit(gated.fn, "same") for _ in range(16)]
        futures = [gated.fn.submit("same") for _ in range(16)]
        until(lambda: len(gated.fn._batcher.runtime._members) == 33)
        gated.go.set()
        results = [each.result(BOUND) for each in [*calls, *futures]]
    assert results == [["same", "result"]] * 32
    assert len({id(each) for each in results}) == 32
    assert gated.computed == ["first", "same"]


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    pause = threading.Event()
    for _ in range(3000):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def test_arrays_are_not_shared() -> None:
    np = pytest.importorskip("numpy")
    entered, go = threading.Event(), threading.Event()

    @batched.dynamically(dedupe=True)
    def zeros(sizes: list[int]) -> list[Any]:
        entered.set()
        assert go.wait(BOUND)
        return [np.zeros(size) for size in sizes]

    futures = [zeros.submit(3)]
    assert entered.wait(BOUND)
    futures += [zeros.submit(3), zeros.submit(3)]
    go.set()
    first, second, third = [each.result(BOUND) for each in futures]
    first += 1
    second += 2
    assert (first.tolist(), second.tolist(), third.tolist()) == ([1] * 3, [2] * 3, [0] * 3)
    zeros.shutdown()


def test_an_item_that_runs_is_shared_and_an_item_that_has_ended_is_computed_again(
    gated: Gated,
) -> None:
    first = gated.begin()
    second = gated.fn.submit("first")
    gated.go.set()
    assert first.result(BOUND) == second.result(BOUND) == ["first", "result"]
    assert gated.fn("first") == ["first", "result"]
    assert gated.computed == ["first", "first"]


def test_a_failure_reaches_all_callers_as_an_error_of_their_own(gated: Gated) -> None:
    gated.begin()
    futures = [gated.fn.submit("bad") for _ in range(3)]
    gated.go.set()
    errors = [each.exception(BOUND) for each in futures]
    assert [type(each) for each in errors] == [KeyError] * 3
    assert len({id(each) for each in errors}) == 3
    assert gated.computed == ["first", "bad"]


def test_a_list_call_shares_its_items_and_keeps_its_order(gated: Gated) -> None:
    gated.begin()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(gated.fn, ["a", "first", "b", "a"])
        until(lambda: len(gated.fn._batcher.runtime._members) == 2)
        alone = gated.fn.submit("b")
        gated.go.set()
        results = call.result(BOUND)
    assert [each[0] for each in results] == ["a", "first", "b", "a"]
    assert results[0] is not results[3]
    assert alone.result(BOUND) == ["b", "result"]
    assert gated.computed == ["first", "a", "b"]
    assert gated.fn([]) == []


def test_a_list_call_with_a_failing_item_fails_and_harms_no_other_caller(gated: Gated) -> None:
    gated.begin()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(gated.fn, ["a", "bad", "b"])
        until(lambda: len(gated.fn._batcher.runtime._members) == 2)
        other = gated.fn.submit("a")
        gated.go.set()
        with pytest.raises(KeyError):
            call.result(BOUND)
    assert other.result(BOUND) == ["a", "result"]


def test_sorted_items_return_in_the_order_of_the_call() -> None:
    @batched.dynamically(dedupe=True, length=len)
    def upper(items: list[str]) -> list[str]:
        return [item.upper() for item in items]

    with upper:
        assert upper(["a", "ccc", "bb", "ccc", "a"]) == ["A", "CCC", "BB", "CCC", "A"]


def test_an_item_is_computed_unless_all_of_its_callers_give_up(gated: Gated) -> None:
    gated.begin()
    one, two, only = gated.fn.submit("shared"), gated.fn.submit("shared"), gated.fn.submit("only")
    assert one.cancel()
    assert only.cancel()
    assert not only.cancel() or only.cancelled()
    gated.go.set()
    assert two.result(BOUND) == ["shared", "result"]
    with pytest.raises(CancelledError):
        one.result(BOUND)
    gated.fn.shutdown()
    assert gated.computed == ["first", "shared"]


def test_a_future_of_an_item_that_runs_cannot_be_cancelled(gated: Gated) -> None:
    first = gated.begin()
    second = gated.fn.submit("first")
    assert not first.cancel()
    assert not second.cancel()
    gated.go.set()
    assert second.result(BOUND) == ["first", "result"]


def test_further_arguments_and_instances_tell_items_apart() -> None:
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @batched.dynamically(dedupe=True)
        def times(self, items: list[int], *, plus: int = 0) -> list[int]:
            return [self.factor * item + plus for item in items]

    one, two = Model(1), Model(2)
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(model.times, 5, plus=plus)
            for model in (one, two)
            for plus in (0, 1)
            for _ in range(2)
        ]
        assert [each.result(BOUND) for each in calls] == [5, 5, 6, 6, 10, 10, 11, 11]


def test_equal_items_of_different_types_are_different() -> None:
    @batched.dynamically(dedupe=True)
    def names(items: list[Any]) -> list[str]:
        return [type(item).__name__ for item in items]

    with names:
        assert names([1, 1.0, True]) == ["int", "float", "bool"]


def test_a_key_function_says_which_items_are_equal() -> None:
    computed: list[Any] = []

    @batched.dynamically(dedupe=lambda item: item["id"])
    def load(items: list[dict[str, Any]]) -> list[Any]:
        computed.extend(items)
        return [item["id"] for item in items]

    with load:
        assert load([{"id": 1}, {"id": 2, "x": []}, {"id": 1, "x": 3}]) == [1, 2, 1]
        assert len(computed) == 2
        with pytest.raises(KeyError, match="id"):
            load({})


def test_an_item_without_a_hash_is_refused_in_a_sentence() -> None:
    @batched.dynamically(dedupe=True, name="load")
    def load(items: list[Any]) -> list[Any]:
        return items

    with load:
        with pytest.raises(TypeError, match=r"load cannot compare \{'a': 1\} with .* no hash; let"):
            load({"a": 1})
        assert load("fine") == "fine"


@pytest.mark.parametrize("dedupe", ["yes", 1, None])
def test_another_setting_is_refused(dedupe: Any) -> None:
    with pytest.raises(TypeError, match="dedupe must be True, False or a plain function"):
        batched.dynamically(dedupe=dedupe)
    with pytest.raises(TypeError, match="dedupe is for functions of a list"):
        batched.inference.dynamically(dedupe=True)
    with pytest.raises(TypeError, match="no setting 'dedupe' of a function that works in steps"):
        batched.continuously(dedupe=True)  # type: ignore[call-overload]


def test_a_refused_call_leaves_nothing_behind() -> None:
    made = Gated(max_queue_size=1, on_full="raise")
    first = made.begin()
    waiting = made.fn.submit("waiting")
    with pytest.raises(batched.QueueFull):
        made.fn(["waiting", "too much"])
    also = made.fn.submit("waiting")  # needs no room
    made.go.set()
    assert [each.result(BOUND)[0] for each in (first, waiting, also)] == [
        *("first", "waiting", "waiting"),
    ]
    made.fn.shutdown()
    with pytest.raises(batched.BatcherClosed):
        made.fn("first")
    runtime = made.fn._batcher.runtime
    assert not runtime._members
    assert not runtime.shares


def test_all_callers_end_at_a_shutdown(gated: Gated) -> None:
    first = gated.begin()
    waiting = [gated.fn.submit("waiting") for _ in range(2)]
    gated.fn.shutdown(wait=False, cancel_futures=True)
    assert all(isinstance(each.exception(BOUND), batched.BatcherClosed) for each in waiting)
    gated.go.set()
    assert first.result(BOUND) == ["first", "result"]


def test_a_result_that_cannot_be_copied_is_an_error_of_the_further_callers(gated: Gated) -> None:
    entered, go = threading.Event(), threading.Event()

    @batched.dynamically(dedupe=True)
    def locks(items: list[int]) -> list[Any]:
        entered.set()
        assert go.wait(BOUND)
        return [threading.Lock() for _ in items]

    first = locks.submit(1)
    assert entered.wait(BOUND)
    second = locks.submit(1)
    go.set()
    assert first.result(BOUND)
    with pytest.raises(TypeError, match="pickle"):
        second.result(BOUND)
    locks.shutdown()


def test_a_call_from_within_a_run_waits_for_no_item_of_its_run() -> None:
    @batched.dynamically(dedupe=True, max_concurrent_batches=2, name="outer")
    def outer(items: list[int]) -> list[int]:
        return [inner(item) for item in items]

    @batched.dynamically
    def inner(items: list[int]) -> list[int]:
        return outer(items) if depth.pop() else items

    depth = [False, True]
    with outer, inner, pytest.raises(RuntimeError, match="would wait for itself"):
        outer(1)


@pytest.mark.parametrize("threads", [0, 4])
def test_prepared_items_are_shared_by_what_the_callers_passed(threads: int) -> None:
    computed: list[Any] = []

    @batched.dynamically(dedupe=True, prepare=str.upper)
    def work(items: Any) -> Any:
        computed.extend(items)
        return [item + "!" for item in items]

    async def many() -> list[Any]:
        return await asyncio.gather(*(work.acall("a") for _ in range(5)))

    with work:
        if threads:
            with ThreadPoolExecutor(threads) as pool:
                calls: Any = pool.map(work, "abab")
                assert list(calls) == ["A!", "B!", "A!", "B!"]
        assert work(list("aba")) == ["A!", "B!", "A!"]
        found: Any = asyncio.run(many())
        assert found == ["A!"] * 5
    assert set(computed) == {"A", "B"}


def test_different_items_are_prepared_at_once() -> None:
    both = threading.Barrier(2)

    def prepare(item: str) -> str:
        both.wait(BOUND)
        return item.upper()

    @batched.dynamically(dedupe=True, prepare=prepare)
    def work(items: list[str]) -> list[str]:
        return items

    with work, ThreadPoolExecutor(2) as pool:
        assert work(["a", "b"]) == ["A", "B"]
        assert list(pool.map(work, "cd")) == ["C", "D"]


def test_callbacks_of_expired_calls_delay_no_other_function() -> None:
    made = Gated(queue_timeout_ms=20, batch_size=1)
    while not made.entered.wait(0.05):  # it may expire before it runs
        made.fn.submit("first")
    names: list[str] = []
    ended = threading.Event()

    def end(_: object) -> None:
        names.append(threading.current_thread().name)
        ended.set()

    future = made.fn.submit("late")
    future.add_done_callback(end)
    assert ended.wait(BOUND)
    assert isinstance(future.exception(BOUND), batched.QueueTimeout)
    assert "timer" not in names[0]
    made.go.set()
    made.fn.shutdown()


def test_coroutine_functions_share_items_and_a_cancelled_task_gives_up_alone() -> None:
    computed: list[Any] = []

    async def main() -> None:
        started, go = asyncio.Event(), asyncio.Event()

        @batched.aio.dynamically(dedupe=True)
        async def work(items: list[str]) -> list[list[str]]:
            computed.extend(items)
            started.set()
            await go.wait()
            return [[item] for item in items]

        async with work:
            tasks = [asyncio.create_task(work("a"))]
            await asyncio.wait_for(started.wait(), BOUND)
            tasks += [asyncio.create_task(work("a")) for _ in range(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            go.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert [results[0], *results[2:]] == [["a"]] * 3
        assert len({id(each) for each in results}) == 4

    asyncio.run(main())
    assert computed == ["a"]


def test_map_gives_every_item_its_result_in_order() -> None:
    @batched.dynamically(dedupe=True, queue_timeout_ms=60_000)
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    numbers = [number % 7 for number in range(500)]
    with double:
        assert list(double.map(numbers)) == [2 * number for number in numbers]
        assert double.stats.total_processed < 500


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_calls_end_in_the_child_of_a_fork(gated: Gated) -> None:
    gated.begin()
    futures = [gated.fn.submit("waiting") for _ in range(2)]
    child = os.fork()
    if not child:
        gated.go.set()
        ended = [isinstance(each.exception(BOUND), batched.BatcherClosed) for each in futures]
        os._exit(0 if (ended, gated.fn("x")) == ([True, True], ["x", "result"]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    gated.go.set()
    assert [each.result(BOUND)[0] for each in futures] == ["waiting"] * 2


@pytest.mark.parametrize("seed", range(5))
def test_many_callers_get_their_own_answers_at_random_moments(seed: int) -> None:
    running: set[int] = set()
    lock = threading.Lock()

    @batched.dynamically(dedupe=True, batch_size=4, max_concurrent_batches=2)
    def work(items: list[int]) -> list[Any]:
        with lock:
            assert not running & set(items), "an item is computed twice at once"
            assert len(set(items)) == len(items)
            running.update(items)
        with lock:
            running.difference_update(items)
        return [ValueError(item) if item % 5 == 0 else [item] for item in items]

    def call(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        for _ in range(60):
            item = chance.randrange(1, 12)
            kind = chance.randrange(4)
            if kind == 0:
                future = work.submit(item)
                if not future.cancel():
                    check(item, future.exception(BOUND), lambda: future.result(BOUND))  # noqa: B023
                continue
            items = [item] if kind < 3 else chance.choices(range(1, 12), k=3)
            if any(each % 5 == 0 for each in items):
                with pytest.raises(ValueError, match="^(5|10)$"):
                    work(items) if kind > 1 else work(item)
            else:
                found = work(items) if kind > 1 else [work(item)]
                assert found == [[each] for each in items]

    def check(item: int, error: Any, result: Callable[[], Any]) -> None:
        if item % 5 == 0:
            assert error.args == (item,)
        else:
            assert result() == [item]

    with work, ThreadPoolExecutor(16) as pool:
        for each in [pool.submit(call, number) for number in range(16)]:
            each.result(60)
    assert not work._batcher.runtime._members
    assert not work._batcher.runtime.shares
