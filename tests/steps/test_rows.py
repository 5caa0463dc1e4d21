"""Functions that work in steps: rows join and leave between steps."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import trio
from countdowns import Gate, countdown, countdown_on_a_loop, finish_all, stepwise

import batched
from batched import BatcherClosed, BatchFunctionError, Rows


def test_a_call_joins_at_the_next_step_and_each_caller_is_answered_once_its_row_is_done() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=4)
    long = count.submit(50)
    gate.wait_for_step()
    short = count.submit(1)
    gate.allow()
    gate.allow()
    assert short.result(30) == "1 x 1"
    assert not long.done()
    gate.open()
    assert long.result(30) == "50 x 1"
    assert gate.sizes == [1, 2] + [1] * 48


def test_no_more_rows_than_places_are_live_and_each_row_is_a_batch_in_the_statistics() -> None:
    gate = Gate(is_open=True)
    records: list[batched.BatchRecord] = []
    count = countdown(gate, batch_size=4, on_batch=records.append)
    items = [5, 1, 3, 2] * 10
    assert count(items) == [f"{item} x 1" for item in items]
    with pytest.raises(ValueError, match="row -2"):
        count(-2)
    count.shutdown()
    assert max(gate.sizes) == 4
    stats = count.stats
    assert (stats.steps, stats.total_processed, stats.total_batches) == (len(gate.sizes), 41, 41)
    assert stats.places_filled > 0.9
    assert stats.rows_per_step == pytest.approx(4 * stats.places_filled)
    assert stats.row_endings == {"finished": 40, "failed": 1}
    assert (stats.calls, stats.errors, stats.in_flight) == (2, 1, 0)
    assert [record.size for record in records] == [1] * 41
    assert [record.error for record in records] == [None] * 40 + ["ValueError"]


def test_rows_of_one_run_have_equal_arguments_and_no_group_waits_for_ever() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=4)
    live = count.submit(3)
    gate.wait_for_step()
    other, same = count.submit(1, scale=10), count.submit(1)
    gate.open()
    assert [each.result(30) for each in (live, other, same)] == ["3 x 1", "1 x 10", "1 x 1"]
    assert max(gate.sizes) == 1, "a call joined although another group had waited longer"


def test_a_list_call_ends_with_its_first_failed_item_and_frees_the_places_of_the_others() -> None:
    count = countdown(batch_size=2)
    with pytest.raises(ValueError, match="row -1"):
        count([10**9, -1])
    assert count([2, 3]) == ["2 x 1", "3 x 1"]
    assert count.stats.row_endings == {"finished": 2, "failed": 1, "given up": 1}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda rows: asyncio.sleep(0), "coroutine"),
        (lambda rows: bool(rows), "left 1 rows without an outcome"),
        (lambda rows: rows.join(), "left 1 rows without an outcome"),
    ],
)
def test_a_function_that_returns_without_outcomes_is_told(function: Any, said: str) -> None:
    leaves: Any = batched.continuously(function)
    with pytest.raises(BatchFunctionError, match=said):
        leaves(1)
    assert leaves.stats.in_flight == 0


def test_a_row_has_one_outcome_and_later_errors_are_told(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Rows[int, int]] = []

    @batched.continuously
    def twice(rows: Rows[int, int]) -> None:
        with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
            rows.join(0)
        assert rows.leave() == []  # none has joined
        (row,) = rows.join()
        with pytest.raises(TypeError, match="fail takes an exception"):
            row.fail("no")  # type: ignore[arg-type]
        row.finish(1)
        late: list[tuple[Any, Any]] = [(row.finish, 2), (row.fail, KeyError()), (row.emit, 3)]
        for method, value in late:
            with pytest.raises(RuntimeError, match="has ended"):
                method(value)
        kept.append(rows)
        raise KeyError("too late")

    assert twice(0) == 1
    twice.shutdown()
    assert "too late" in caplog.text
    with pytest.raises(RuntimeError, match="has returned"):
        kept[0].join()


def test_live_rows_run_again_fewer_at_once_if_memory_runs_out() -> None:
    sizes: list[int] = []

    def step(rows: Rows[int, int]) -> None:
        sizes.append(len(rows))
        if len(rows) > 3:
            raise MemoryError
        finish_all(rows)

    heavy = stepwise(step, batch_size=8)
    assert heavy(list(range(40))) == list(range(40))
    assert heavy.stats.memory_errors == 2  # 8 rows, then 4; at most 3 from then on
    assert max(sizes[2:]) <= 3
    with pytest.raises(MemoryError):
        heavy.with_options(on_oom="raise")(list(range(8)))


def test_a_row_that_has_emitted_pieces_gets_the_error_if_memory_runs_out() -> None:
    def step(rows: Rows[str, str, str]) -> None:
        for row in rows:
            row.emit("piece")
        if len(rows) == 2:
            raise MemoryError
        if rows[0].item == "plain":
            rows[0].finish("done")

    work = stepwise(step, batch_size=2)
    with work.stream("read") as stream:
        next(stream)
        assert work.submit("plain").result(30) == "done"
        with pytest.raises(MemoryError):
            stream.result(30)


@pytest.mark.parametrize("call", [1, [0, 1, 2, 3]])
def test_a_row_for_which_memory_runs_out_alone_gets_the_error(call: Any) -> None:
    vast = np.broadcast_to(np.float64(0), (10**7, 10**7))  # a copy would take 800 TB

    def step(rows: Rows[int, Any]) -> None:
        for row in rows:
            row.finish(vast if row.item == 1 else row.item)

    work = stepwise(step, batch_size=2)
    with pytest.raises(MemoryError):
        work(call)
    assert work([0, 2, 3]) == [0, 2, 3]
    work.shutdown()
    assert work.stats.in_flight == 0


@pytest.mark.parametrize("listed", [True, False])
def test_the_budget_counts_live_rows_by_the_longest(listed: bool) -> None:
    widths: list[int] = []

    def step(rows: Rows[int, int]) -> None:
        widths.append(len(rows) * max([row.item for row in rows]))
        rows[0].finish(rows[0].item)

    within = stepwise(step, batch_size=100, length=lambda item: item, max_batch_tokens=40)
    items = [10, 1, 40, 3, 20, 20, 5, 7, 50, 2] * 5
    found = within(items) if listed else [each.result(30) for each in map(within.submit, items)]
    assert found == items
    assert max(width for width in widths if width != 50) <= 40


def test_coroutine_functions_work_the_same_on_trio() -> None:
    count = countdown_on_a_loop(trio.lowlevel.checkpoint, batch_size=4)

    async def main() -> None:
        assert await count([5, 1, 7]) == ["5 x 1", "1 x 1", "7 x 1"]
        assert await count(4, scale=3) == "4 x 3"
        stream = count.stream(-3)
        with pytest.raises(RuntimeError, match="read by `async for`"):
            next(stream)
        assert [await anext(stream) for _ in range(3)] == [2, 1, 0]
        with pytest.raises(ValueError, match="row -3"):
            await anext(stream)
        assert [piece async for piece in count.stream(2)] == [1, 0]

    trio.run(main)
    assert count.stats.row_endings == {"finished": 5, "failed": 1}


def test_methods_have_a_run_for_each_instance() -> None:
    class Counter:
        scale = 2

        @batched.continuously
        def count(self, rows: Rows[int, int], offset: int = 0) -> None:
            for row in rows.join():
                row.finish(row.item * self.scale + offset)

    two, ten = Counter(), Counter()
    ten.scale = 10
    assert list(two.count.map(range(5))) == [0, 2, 4, 6, 8]
    assert ten.count(1, offset=5) == 15


def test_arrays_are_copied_because_the_state_is_used_again() -> None:
    @batched.continuously
    def drift(rows: Rows[float, Any, Any]) -> None:
        (row,), state = rows.join(), np.zeros(2)
        for _ in range(3):
            row.emit(state)
            state += 1
        row.finish(state)
        state += 1
        rows.leave()

    stream = drift.stream(0.0)
    assert [piece[0] for piece in stream] == [0.0, 1.0, 2.0]
    assert stream.result()[0] == 3.0


def test_several_runs_at_once() -> None:
    barrier = threading.Barrier(2)

    def step(rows: Rows[int, int]) -> None:
        barrier.wait(30)
        finish_all(rows)

    meet = stepwise(step, batch_size=1, max_concurrent_batches=2)
    futures = [meet.submit(number) for number in range(2)]
    assert [future.result(30) for future in futures] == [0, 1]


def test_a_run_goes_on_after_the_queue_was_reset_and_no_call_of_before_is_left() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)
    calls = [count.submit(10**9), count.submit(2)]
    gate.wait_for_step()
    count._batcher.runtime.abort("for the test")
    assert [type(call.exception(30)) for call in calls] == [BatcherClosed] * 2
    gate.open()
    assert count(5) == "5 x 1"
    count.shutdown()
    assert (count.stats.in_flight, count.stats.lost) == (0, 2)


def test_endless_load_keeps_no_memory() -> None:
    count = countdown(batch_size=4)
    futures: list[Any] = [count.submit(1) for _ in range(4)]

    def load(calls: int) -> int:
        for number in range(calls):
            futures[number % 4].result(30)
            futures[number % 4] = count.submit(1)
        assert count.stats.calls  # what is noted and not yet counted would hide a leak
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    load(200)
    tracemalloc.start()
    sizes = [load(200) for _ in range(5)]
    tracemalloc.stop()
    growth = min(after - before for before, after in pairwise(sizes))
    assert growth < 8_000, "each stretch leaves something behind"
