"""Functions that work in steps: rows join and leave between steps."""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import trio

import batched
from batched import BatchFunctionError, Row, Rows


class Gate:
    """Steps of a function, each begun by the test. An open gate lets all further steps begin."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False
        self.sizes: list[int] = []

    def step(self, size: int) -> None:
        if not self._open:
            assert self._steps.acquire(timeout=30)
        self.sizes.append(size)

    def allow(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._steps.release()

    def open(self) -> None:
        self._open = True
        self.allow(100)


def countdown(gate: Gate | None = None, **settings: Any) -> Any:
    """Return a function whose items are numbers of steps; a row emits the steps that it has left.

    A negative item fails alone after as many steps.
    """

    decorate: Any = batched.continuously(**settings)

    @decorate  # type: ignore[untyped-decorator]
    def count(rows: Rows[int, str, int], scale: int = 1) -> None:
        left: list[int] = []
        while rows:
            left += [abs(row.item) for row in rows.join()]
            if gate is not None:
                gate.step(len(rows))
            for place, row in enumerate(rows):
                left[place] -= 1
                row.emit(left[place] * scale)
                if left[place] < 1 and row.item < 0:
                    row.fail(ValueError(f"row {row.item}"))
                elif left[place] < 1:
                    row.finish(f"{row.item} x {scale}")
            for place in reversed(rows.leave()):
                del left[place]

    return count


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_each_caller_is_answered_once_its_own_row_is_done() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=4)
    long = count.submit(50)
    wait_until(lambda: count.stats.in_flight == 1)
    short = count.submit(1)
    gate.allow(2)
    assert short.result(30) == "1 x 1"
    assert not long.done()
    gate.open()
    assert long.result(30) == "50 x 1"


def test_a_call_joins_at_the_next_step_while_another_row_runs() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=4)
    first = count.submit(3)
    wait_until(lambda: count.stats.in_flight == 1)
    gate.allow()
    wait_until(lambda: len(gate.sizes) == 1)
    second = count.submit(2)
    wait_until(lambda: count.stats.queue_size + count.stats.in_flight == 2)
    gate.open()
    assert [first.result(30), second.result(30)] == ["3 x 1", "2 x 1"]
    assert gate.sizes[0] == 1
    assert max(gate.sizes) == 2


def test_no_more_rows_than_places_are_live_and_places_are_filled_again() -> None:
    gate = Gate()
    gate.open()
    count = countdown(gate, batch_size=4)
    items = [5, 1, 3, 2] * 10
    assert count(items) == [f"{item} x 1" for item in items]
    assert max(gate.sizes) == 4
    assert count.stats.places_filled > 0.9
    wait_until(lambda: count.stats.steps == len(gate.sizes))  # the last step ends after its rows
    assert count.stats.row_endings == {"finished": 40}
    assert count.stats.total_processed == 40


def test_rows_of_one_run_have_equal_arguments_and_no_group_waits_for_ever() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=4)
    live = count.submit(3)
    wait_until(lambda: count.stats.in_flight == 1)
    other = count.submit(1, scale=10)
    same = count.submit(1)
    gate.open()
    assert live.result(30) == "3 x 1"
    assert other.result(30) == "1 x 10"
    assert same.result(30) == "1 x 1"
    assert max(gate.sizes) == 1, "a call joined although another group had waited longer"


def test_a_failed_row_fails_alone() -> None:
    count = countdown(batch_size=4)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(count, item) for item in [3, -2, 5, -1, 1, 4]]
        outcomes = [future.exception() or future.result() for future in futures]
    assert [str(outcome) for outcome in outcomes] == [
        "3 x 1",
        "row -2",
        "5 x 1",
        "row -1",
        "1 x 1",
        "4 x 1",
    ]
    assert count.stats.errors == 2
    assert count.stats.row_endings == {"finished": 4, "failed": 2}


def test_a_list_call_fails_with_its_failed_item_and_its_other_rows_leave() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=4)
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(count, [1000, -1])
        gate.allow(2)
        with pytest.raises(ValueError, match="row -1"):
            failing.result(30)
        gate.open()
        assert count(2) == "2 x 1"
    assert count.stats.row_endings["given up"] == 1


def test_an_error_of_the_function_ends_the_live_rows_and_later_calls_run() -> None:
    gate = Gate()

    @batched.continuously(batch_size=2)
    def fragile(rows: Rows[int, int]) -> None:
        while rows:
            for row in rows.join():
                gate.step(len(rows))
                if row.item < 0:
                    raise ZeroDivisionError(str(row.item))
            for row in rows:
                row.finish(row.item)
            rows.leave()

    held = fragile.submit(1)
    wait_until(lambda: fragile.stats.in_flight == 1)
    pair = [fragile.submit(-1), fragile.submit(-2)]
    gate.open()
    assert held.result(30) == 1
    errors = [future.exception(30) for future in pair]
    assert [type(error) for error in errors] == [ZeroDivisionError] * 2
    assert errors[0] is not errors[1], "two callers got the same exception object"
    assert fragile(3) == 3


@pytest.mark.parametrize(
    "body", ["return", "rows.join(); return", "while rows: rows.join(); return"], ids=repr
)
def test_a_function_that_returns_without_outcomes_is_told(body: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def leaves(rows):\n  {body}", scope)
    leaves = batched.continuously(scope["leaves"])
    with pytest.raises(BatchFunctionError, match="left 1 rows without an outcome"):
        leaves(1)
    assert leaves.stats.in_flight == 0


def test_a_row_has_one_outcome() -> None:
    told: list[str] = []

    @batched.continuously
    def twice(rows: Rows[int, int]) -> None:
        while rows:
            rows.join()
            for row in rows:
                row.finish(1)
                late: list[tuple[Any, Any]] = [
                    (row.finish, 2),
                    (row.fail, ValueError("late")),
                    (row.emit, 3),
                ]
                for method, value in late:
                    with pytest.raises(RuntimeError, match="has ended") as error:
                        method(value)
                    told.append(str(error.value))
            rows.leave()

    assert twice(0) == 1
    assert len(told) == 3


def test_rows_are_of_no_use_after_the_function_has_returned() -> None:
    kept: list[Rows[int, int]] = []

    @batched.continuously
    def keeps(rows: Rows[int, int]) -> None:
        kept.append(rows)
        while rows:
            for row in rows.join():
                row.finish(row.item)
            rows.leave()

    assert keeps(4) == 4
    with pytest.raises(RuntimeError, match="has returned"):
        kept[0].join()


def test_a_stream_has_all_pieces_in_order_for_threads_and_coroutines() -> None:
    count = countdown(batch_size=4)
    assert list(count.stream(5)) == [4, 3, 2, 1, 0]

    async def read(item: int) -> list[int]:
        return [piece async for piece in count.stream(item, scale=2)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(read, range(1, 20)))

    assert asyncio.run(main()) == [
        [2 * left for left in reversed(range(item))] for item in range(1, 20)
    ]


def test_a_stream_raises_the_error_after_the_pieces_before_it() -> None:
    count = countdown()
    stream = count.stream(-3)
    assert [next(stream) for _ in range(3)] == [2, 1, 0]
    with pytest.raises(ValueError, match="row -3"):
        next(stream)
    with pytest.raises(ValueError, match="row -3"):
        stream.result(30)


def test_pieces_arrive_while_the_row_runs() -> None:
    gate = Gate()
    count = countdown(gate)
    stream = count.stream(3)
    for left in (2, 1, 0):
        gate.allow()
        assert next(stream) == left
    assert stream.result(30) == "3 x 1"


@pytest.mark.parametrize("way", ["close", "drop", "with", "cancel"])
def test_a_stream_that_is_given_up_frees_its_place(way: str) -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)
    gate.allow(2)
    stream = count.stream(10**9)
    assert next(stream) == 10**9 - 1
    if way == "close":
        stream.close()
    elif way == "with":
        with stream:
            pass
    elif way == "cancel":
        stream.close()
    del stream
    gc.collect()
    gate.open()
    assert count(2) == "2 x 1"
    assert count.stats.row_endings == {"given up": 1, "finished": 1}
    assert count.stats.cancelled == 1


def test_a_task_that_is_cancelled_frees_its_place() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)

    async def main() -> None:
        reading = asyncio.ensure_future(count.stream(10**9).__anext__())
        calling = asyncio.ensure_future(count.acall(10**9))
        await asyncio.sleep(0.01)
        for task in (reading, calling):
            task.cancel()
        for task in (reading, calling):
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.open()
        assert await count.acall(1) == "1 x 1"

    asyncio.run(main())


def test_a_future_of_a_running_row_can_be_cancelled() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)
    future = count.submit(10**9)
    wait_until(lambda: count.stats.in_flight == 1)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    gate.open()
    assert count(1) == "1 x 1"


def test_text_that_is_not_read_is_joined_and_bounded() -> None:
    behind: list[bool] = []

    @batched.continuously(max_pieces=3)
    def write(rows: Rows[int, str, str]) -> None:
        while rows:
            for row in rows.join():
                for number in range(row.item):
                    row.emit(f"{number} ")
                    behind.append(row.behind)
                row.finish("end")
            rows.leave()

    stream = write.stream(100)
    assert stream.result(30) == "end"
    pieces = list(stream)
    assert len(pieces) == 3
    assert "".join(pieces) == "".join(f"{number} " for number in range(100))
    assert behind[:3] == [False, False, True]


def test_a_stream_of_a_closed_batcher_raises() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)
    first, second = count.stream(1), count.stream(1)
    wait_until(lambda: count.stats.in_flight == 1)
    count.shutdown(wait=False, cancel_futures=True)
    gate.open()
    assert list(first) == [0]
    with pytest.raises(batched.BatcherClosed):
        next(second)
    with pytest.raises(batched.BatcherClosed):
        count.stream(1)


def test_live_rows_run_again_in_parts_if_memory_runs_out() -> None:
    sizes: list[int] = []

    @batched.continuously(batch_size=8)
    def heavy(rows: Rows[int, int]) -> None:
        while rows:
            rows.join()
            sizes.append(len(rows))
            if len(rows) > 3:
                raise MemoryError
            for row in rows:
                row.finish(row.item)
            rows.leave()

    assert heavy(list(range(40))) == list(range(40))
    assert heavy.stats.memory_errors == 2  # 8 rows, then 4; the ceiling is 2 or 3 from then on
    assert max(sizes[2:]) <= 3


def test_a_lone_row_for_which_memory_runs_out_gets_the_error() -> None:
    @batched.continuously
    def heavy(rows: Rows[int, int]) -> None:
        while rows:
            rows.join()
            raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        heavy(1)


def test_a_row_whose_reader_has_pieces_never_runs_twice() -> None:
    starts: list[int] = []
    gate = Gate()

    @batched.continuously(batch_size=2)
    def heavy(rows: Rows[int, int, str]) -> None:
        seen = 0
        while rows:
            for row in rows.join():
                starts.append(row.item)
                row.emit(f"{row.item}")
            gate.step(len(rows))
            seen = max(seen, len(rows))
            if len(rows) > 1:
                raise MemoryError("two rows")
            if seen == 1 and rows[0].item == 1:
                continue
            for row in rows:
                row.finish(row.item)
            rows.leave()

    stream = heavy.stream(1)
    wait_until(lambda: starts == [1])
    other = heavy.submit(2)
    gate.open()
    assert next(stream) == "1"
    with pytest.raises(MemoryError, match="two rows"):
        next(stream)
    assert other.result(30) == 2
    assert starts == [1, 2, 2]


def test_budget_counts_live_rows_by_the_longest() -> None:
    gate = Gate()
    gate.open()
    widths: list[int] = []

    @batched.continuously(batch_size=100, length=lambda item: item, max_batch_tokens=40)
    def within(rows: Rows[int, int]) -> None:
        while rows:
            rows.join()
            widths.append(len(rows) * max([row.item for row in rows]))
            for row in rows:
                row.finish(row.item)
            rows.leave()

    items = [10, 1, 40, 3, 20, 20, 5, 7, 50, 2] * 5
    assert within(items) == items
    assert max(width for width in widths if width != 50) <= 40


def test_limit_of_join_bounds_the_rows_that_join_at_once() -> None:
    joined: list[int] = []

    @batched.continuously(batch_size=8)
    def slowly(rows: Rows[int, int]) -> None:
        while rows:
            joined.append(len(rows.join(limit=2)))
            for row in rows:
                row.finish(row.item)
            rows.leave()

    assert slowly(list(range(20))) == list(range(20))
    assert max(joined) == 2


def test_coroutine_functions_work_the_same_on_asyncio() -> None:
    @batched.aio.continuously(batch_size=4)
    async def count(rows: Rows[int, str, int]) -> None:
        left: list[int] = []
        while rows:
            left += [row.item for row in rows.join()]
            await asyncio.sleep(0)
            for place, row in enumerate(rows):
                left[place] -= 1
                row.emit(left[place])
                if left[place] < 1:
                    row.finish(str(row.item))
            for place in reversed(rows.leave()):
                del left[place]

    async def main() -> None:
        items = [5, 1, 7, 3, 9, 2, 4]
        assert await asyncio.gather(*map(count, items)) == list(map(str, items))
        assert [piece async for piece in count.stream(3)] == [2, 1, 0]
        assert await count(items) == list(map(str, items))
        task = asyncio.ensure_future(count(10**9))
        await asyncio.sleep(0.01)
        task.cancel()
        assert await count(2) == "2"
        assert count.stats.row_endings["given up"] == 1

    asyncio.run(main())


def test_coroutine_functions_and_streams_work_on_trio() -> None:
    @batched.aio.continuously(batch_size=4)
    async def count(rows: Rows[int, str, int]) -> None:
        left: list[int] = []
        while rows:
            left += [row.item for row in rows.join()]
            await trio.lowlevel.checkpoint()
            for place, row in enumerate(rows):
                left[place] -= 1
                row.emit(left[place])
                if left[place] < 1:
                    row.finish(str(row.item))
            for place in reversed(rows.leave()):
                del left[place]

    found: dict[int, list[int]] = {}

    async def read(item: int) -> None:
        found[item] = [piece async for piece in count.stream(item)]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for item in range(1, 12):
                nursery.start_soon(read, item)
            with trio.move_on_after(0.01):
                await count(10**9)
        assert await count([3, 1]) == ["3", "1"]

    trio.run(main)
    assert found == {item: list(reversed(range(item))) for item in range(1, 12)}


def test_methods_have_a_run_for_each_instance() -> None:
    class Counter:
        def __init__(self, scale: int) -> None:
            self.scale = scale

        @batched.continuously(batch_size=4)
        def count(self, rows: Rows[int, int], offset: int = 0) -> None:
            while rows:
                for row in rows.join():
                    row.finish(row.item * self.scale + offset)
                rows.leave()

    two, ten = Counter(2), Counter(10)
    assert two.count([1, 2, 3]) == [2, 4, 6]
    assert ten.count(1, offset=5) == 15
    assert list(two.count.map(range(5))) == [0, 2, 4, 6, 8]


def test_arrays_are_copied_because_the_state_is_used_again() -> None:
    @batched.continuously
    def drift(rows: Rows[float, Any, Any]) -> None:
        state = np.zeros((0, 2))
        steps = 0
        while rows:
            new = [np.full((1, 2), row.item) for row in rows.join()]
            state = np.concatenate([state, *new])
            for row, values in zip(rows, state, strict=True):
                row.emit(values)
            steps += 1
            if steps == 3:
                for row, values in zip(rows, state, strict=True):
                    row.finish(values)
            state += 1
            state = np.delete(state, rows.leave(), axis=0)

    stream = drift.stream(0.0)
    assert [piece[0] for piece in stream] == [0.0, 1.0, 2.0]
    assert stream.result()[0] == 2.0


def test_several_runs_at_once() -> None:
    barrier = threading.Barrier(2)

    @batched.continuously(batch_size=1, max_concurrent_batches=2)
    def meet(rows: Rows[int, int]) -> None:
        while rows:
            for row in rows.join():
                barrier.wait(30)
                row.finish(row.item)
            rows.leave()

    futures = [meet.submit(number) for number in range(2)]
    assert [future.result(30) for future in futures] == [0, 1]


def test_wrong_settings_and_functions_are_told_at_decoration() -> None:
    def fine(rows: Rows[int, int]) -> None: ...

    decorate: Any = batched.continuously
    for name, value in (
        ("timeout_ms", 1.0),
        ("flush", "eager"),
        ("prefetch", 1),
        ("isolate_errors", True),
    ):
        with pytest.raises(TypeError, match=f"no setting '{name}' of a function that works in st"):
            decorate(**{name: value})(fine)
    with pytest.raises(TypeError, match="there is no setting 'batch_sise'"):
        decorate(batch_sise=3)(fine)
    with pytest.raises(ValueError, match="max_pieces must be at least 1"):
        batched.continuously(max_pieces=0)(fine)

    def yields(rows: Rows[int, int]) -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"row\.emit"):
        decorate(yields)

    async def awaits(rows: Rows[int, int]) -> None: ...

    with pytest.raises(TypeError, match=r"batched\.aio\.continuously"):
        decorate(awaits)


def test_options_rebuild_the_function() -> None:
    count = countdown(batch_size=3, max_pieces=2)
    again = count.with_options(**count.options)
    assert again.options == count.options
    assert again(4) == "4 x 1"
    assert count.with_options(batch_size=7).options["batch_size"] == 7


@batched.continuously
def module_level(rows: Rows[int, int]) -> None:
    while rows:
        for row in rows.join():
            row.finish(row.item + 1)
        rows.leave()


def test_the_function_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(module_level)) is module_level


def test_observers_get_a_record_of_rows_that_joined_together() -> None:
    records: list[batched.BatchRecord] = []
    count = countdown(batch_size=2, on_batch=records.append)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count.submit(3).result, [30]))
        with pytest.raises(ValueError, match="row"):
            count(-2)
    wait_until(lambda: len(records) == 2)
    assert [(record.size, record.outcome) for record in records] == [(1, "ok"), (1, "failed")]
    assert records[1].error == "ValueError"


def test_a_call_of_itself_is_refused() -> None:
    @batched.continuously
    def inner(rows: Rows[int, int]) -> None:
        while rows:
            for row in rows.join():
                row.finish(inner(row.item))
            rows.leave()

    with pytest.raises(RuntimeError, match="would wait for itself"):
        inner(1)


def test_endless_load_keeps_no_memory() -> None:
    count = countdown(batch_size=4)
    futures: list[Any] = [count.submit(3) for _ in range(4)]

    def load(calls: int) -> None:
        for number in range(calls):
            place = number % 4
            futures[place].result(30)
            futures[place] = count.submit(3)

    load(2000)
    gc.collect()
    tracemalloc.start()
    load(500)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    load(4000)
    gc.collect()
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert growth < 100_000


def test_a_solver_whose_items_need_different_numbers_of_steps() -> None:
    """Newton's method for square roots: each item ends at its own precision."""

    @batched.continuously(batch_size=16)
    def root(rows: Rows[float, float, float]) -> None:
        values, guesses = np.empty(0), np.empty(0)
        while rows:
            new = np.array([row.item for row in rows.join()], dtype=float)
            values, guesses = np.append(values, new), np.append(guesses, new)
            better = (guesses + values / guesses) / 2
            for row, old, now in zip(rows, guesses, better, strict=True):
                row.emit(float(now))
                if abs(old - now) <= 1e-12 * now:
                    row.finish(float(now))
            places = rows.leave()
            values, guesses = np.delete(values, places), np.delete(better, places)

    numbers = [10.0**power for power in range(-6, 12)]
    for number, found in zip(numbers, root.map(numbers), strict=True):
        assert math.isclose(found, math.sqrt(number), rel_tol=1e-9)
    assert isinstance(root.stats.rows_per_step, float)


def test_a_row_knows_its_item_and_whether_it_was_given_up() -> None:
    seen: list[Row[int, int]] = []
    gate = Gate()

    @batched.continuously
    def watch(rows: Rows[int, int]) -> None:
        while rows:
            seen.extend(rows.join())
            gate.step(len(rows))
            rows.leave()
            for row in rows:
                row.finish(row.item)
            rows.leave()

    future = watch.submit(7)
    wait_until(lambda: len(seen) == 1)
    assert seen[0].item == 7
    assert not seen[0].given_up
    future.cancel()
    assert seen[0].given_up
    gate.open()
    watch.shutdown()
    assert not seen[0].given_up, "a row that has left is not given up any more"
