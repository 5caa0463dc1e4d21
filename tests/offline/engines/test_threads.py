"""Engines in threads and on a loop: outcomes, searches, builds and closing."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("cloudpickle")

import batched
from batched.errors import BatchFunctionError, TimeLimitExceeded
from batched.offline.engines.engine import WorkerClosed
from batched.offline.engines.row_threads import RowThreads
from batched.offline.engines.threads import LoopWorker
from batched.offline.retry import Retry
from offline_steps import (
    SOON,
    Counted,
    Submitter,
    ask,
    double,
    leftovers,
    note_threads,
    outcome,
    results,
    running,
    step_of,
)
from stage import wait_until

AT_ONCE = Retry(wait_initial=0, wait_jitter=0)
NEVER = Retry(wait_initial=1e6, wait_max=1e6)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    note_threads()
    yield
    wait_until(lambda: not leftovers())


def answers(submitter: Submitter, rows: Sequence[Any]) -> list[Any]:
    """Return the results of rows that are submitted one by one, in the order in which they come."""
    for row in rows:
        submitter.submit([row])
    return [submitter.outcomes.get(timeout=SOON).results[0] for _ in rows]


def asynchronous(func: Any) -> Any:
    async def fn(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return func(*args, **kwargs)

    return fn


@pytest.fixture(params=["threads", "loop"])
def kind(request: pytest.FixtureRequest) -> Any:
    """Return a converter of a plain function to one that runs in threads, or on the loop."""
    return asynchronous if request.param == "loop" else lambda func: func


# outcomes


def test_each_row_gets_its_result_and_batches_are_counted(kind: Any) -> None:
    with running(kind(double)) as (submitter, _):
        assert ask(submitter, [1, 2, 3], [4]) == [2, 4, 6, 8]
        assert submitter.engine.batches == 2


def test_a_decorated_function_is_unwrapped() -> None:
    assert results(batched.dynamically(double), [1, 2]) == [2, 4]
    assert results(batched.aio.dynamically(asynchronous(double)), [1]) == [2]


def test_arguments_of_a_function_come_after_the_items(kind: Any) -> None:
    def scale(items: list[int], factor: int, *, add: int) -> list[int]:
        return [factor * item + add for item in items]

    assert results(kind(scale), [1, 2], args=(10,), kwargs={"add": 1}) == [11, 21]


def test_slots_are_the_batches_that_run_at_once(kind: Any) -> None:
    together = threading.Barrier(4)

    def wait(items: list[int]) -> list[int]:
        together.wait(SOON)
        return items

    async def wait_async(items: list[int]) -> list[int]:
        await asyncio.to_thread(together.wait, SOON)
        return items

    fn = wait_async if kind is asynchronous else wait
    with running(fn, workers=3, batch_size=1) as (submitter, _):
        assert submitter.engine.slots == 3
        submitter.submit([0, 1, 2])
        together.wait(SOON)
        assert submitter.outcomes.get(timeout=SOON).results == [0, 1, 2]


def test_a_dict_of_columns_becomes_a_dict_for_each_row(kind: Any) -> None:
    def classify(items: list[int]) -> dict[str, Any]:
        return {"label": [str(item) for item in items], "score": (1, 2), "unused": None}

    found = results(kind(classify), [7, 8], output=("label", "score"))
    assert found == [{"label": "7", "score": 1}, {"label": "8", "score": 2}]


@pytest.mark.parametrize(
    "columns",
    [{"label": ["a", "b"]}, {"label": ["a", "b"], "score": [1]}, {"label": 1, "score": 2}],
)
def test_a_dict_of_columns_of_different_lengths_is_refused(columns: dict[str, Any]) -> None:
    found = results(lambda items: columns, [7, 8], output=("label", "score"))
    assert {type(each) for each in found} == {BatchFunctionError}
    assert str(found[0]).endswith(
        " returned a dict; it must have a list for each of the columns label, score, all of one "
        "length"
    )


# narrowing


def test_a_function_that_fails_for_all_rows_is_given_up_after_a_few_calls(kind: Any) -> None:
    fn = Counted(set(range(64)), RuntimeError("CUDA error: device-side assert triggered"))
    found = results(kind(fn), list(range(64)))
    assert fn.sizes == [64, 32, 32, 16, 16]
    assert {str(each) for each in found} == {str(fn.error)}
    assert len(found) == 64


def test_a_isolating_batch_is_narrowed_to_the_end(kind: Any) -> None:
    fn = Counted(set(range(16)) - {5})
    found = results(kind(fn), list(range(16)), isolating=True)
    assert [each for each in found if isinstance(each, int)] == [10]
    assert all([row] in fn.calls for row in range(16))
    assert len(fn.calls) == 31


def test_a_service_error_of_the_whole_batch_comes_back_after_one_call(kind: Any) -> None:
    fn = Counted(set(range(64)), ConnectionError("refused"))
    found = results(kind(fn), list(range(64)), retry=NEVER)
    assert fn.sizes == [64]
    assert {type(each) for each in found} == {ConnectionError}


def test_a_service_error_of_an_isolating_batch_is_narrowed(kind: Any) -> None:
    fn = Counted({3}, ConnectionError("refused"))
    found = results(kind(fn), list(range(8)), retry=NEVER, isolating=True)
    assert [row for row, each in enumerate(found) if each is fn.error] == [3]


def test_without_isolation_a_batch_fails_as_one(kind: Any) -> None:
    fn = Counted({3})
    found = results(kind(fn), list(range(8)), isolate_errors=False, isolating=True)
    assert [type(each) for each in found] == [ValueError] * 8
    assert fn.sizes == [8]


def test_too_few_results_are_narrowed_down_to_one(kind: Any) -> None:
    found = results(kind(lambda items: items[:1]), list(range(16)), isolating=True)
    assert found == list(range(16))


def test_rows_whose_errors_are_returned_in_their_place_are_not_given_up(kind: Any) -> None:
    found = results(kind(lambda items: [KeyError(item) for item in items]), list(range(8)))
    assert {type(each) for each in found} == {KeyError}


def test_an_error_whose_message_cannot_be_made_is_one_of_its_row(kind: Any) -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    found = results(kind(Counted({3}, Mute())), list(range(8)))
    assert [row for row, each in enumerate(found) if type(each) is Mute] == [3]


# memory and time


def test_memory_errors_split_and_are_noted_for_the_scheduler(kind: Any) -> None:
    def small(items: list[int]) -> list[int]:
        if len(items) > 4:
            raise MemoryError("too many")
        return items

    found = results(kind(small), list(range(16)))
    assert found == list(range(16))


def test_memory_that_ran_out_is_free_for_the_next_attempt(kind: Any) -> None:
    class Large:
        pass

    held: list[weakref.ref[Large]] = []
    kept: list[bool] = []

    def small(items: list[int]) -> list[int]:
        kept.extend(each() is not None for each in held)
        large = Large()
        held.append(weakref.ref(large))
        if len(items) > 1:
            raise MemoryError("too many")
        return items

    outcome(kind(small), list(range(4)))
    assert len(kept) > 3
    assert not any(kept)


def test_a_dead_device_whose_memory_ran_out_first_is_given_up_too() -> None:
    calls: list[int] = []

    def dead(items: list[int]) -> list[int]:
        calls.append(len(items))
        if len(calls) == 1:
            raise MemoryError("too many")
        raise RuntimeError("device lost")

    outcome(dead, list(range(64)))
    assert calls[:3] == [64, 32, 32]
    assert len(calls) < 10


def test_a_coroutine_that_takes_too_long_costs_its_row_only() -> None:
    async def hanging(items: list[int]) -> list[int]:
        if 5 in items:
            await asyncio.Event().wait()
        return items

    found = results(hanging, list(range(8)), timeout_s=0.02)
    assert type(found[5]) is TimeLimitExceeded
    assert str(found[5]) == "hanging took longer than timeout_s=0.02, and was ended"
    assert found[:5] + found[6:] == [0, 1, 2, 3, 4, 6, 7]


def test_a_time_limit_that_only_full_batches_exceed_costs_no_row() -> None:
    async def slow(items: list[int]) -> list[int]:
        if len(items) > 4:
            await asyncio.Event().wait()
        return items

    assert results(slow, list(range(8)), timeout_s=0.02) == list(range(8))


def test_a_timeout_of_the_coroutine_itself_is_the_services() -> None:
    calls: list[int] = []

    async def timing_out(items: list[int]) -> list[int]:
        calls.append(1)
        raise TimeoutError("from the client")

    found = results(timing_out, [1, 2, 3, 4], timeout_s=SOON)
    assert [type(each) for each in found] == [TimeoutError] * 4
    assert len(calls) == 1


# builds


def test_a_class_is_built_once_for_each_worker_with_its_arguments() -> None:
    built: list[int] = []
    together = threading.Barrier(2)

    class Scale:
        def __init__(self, factor: int) -> None:
            built.append(factor)
            self.factor = factor

        def __call__(self, items: list[int]) -> list[int]:
            together.wait(SOON)  # one batch in each of the two workers
            return [self.factor * item for item in items]

    with running(Scale, args=(3,), workers=2, batch_size=1) as (submitter, _):
        assert sorted(answers(submitter, range(4))) == [0, 3, 6, 9]
    assert built == [3, 3]


def test_a_class_of_a_coroutine_function_is_built_once_on_its_loop() -> None:
    built: list[Any] = []

    class Client:
        def __init__(self) -> None:
            built.append(asyncio.get_running_loop())
            self.together = asyncio.Barrier(3)

        async def __call__(self, items: list[int]) -> list[int]:
            await self.together.wait()
            return items

    with running(Client, workers=3, batch_size=1) as (submitter, _):
        assert sorted(answers(submitter, range(3))) == [0, 1, 2]
    assert len(built) == 1


def test_a_class_of_a_coroutine_function_has_time_limits_and_no_processes() -> None:
    class Client:
        async def __call__(self, items: list[int]) -> list[int]:
            if 1 in items:
                await asyncio.Event().wait()
            return items

    good, bad = results(Client, [0, 1], timeout_s=0.02)
    assert (good, type(bad)) == (0, TimeLimitExceeded)
    with pytest.raises(TypeError, match="'Client': a coroutine function runs on a loop, not in"):
        step_of(Client, processes=True)


def test_rows_that_several_threads_submit_first_run_on_one_loop() -> None:
    loops: set[Any] = set()
    together = threading.Barrier(4)

    async def fn(items: list[int]) -> list[int]:
        loops.add(asyncio.get_running_loop())
        return items

    with running(fn, batch_size=1) as (submitter, outcomes):

        def submit(row: int) -> None:
            together.wait(SOON)
            submitter.submit([row])

        threads = [threading.Thread(target=submit, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        assert sorted(outcomes.get(timeout=SOON).results[0] for _ in range(4)) == [0, 1, 2, 3]
    assert len(loops) == 1


def class_of(init: Any, kind: Any) -> Any:
    """Return a class with that constructor, called as `kind` calls."""

    class Built:
        def __init__(self) -> None:
            init()

        if kind is asynchronous:

            async def __call__(self, items: list[int]) -> list[int]:
                return items
        else:

            def __call__(self, items: list[int]) -> list[int]:  # type: ignore[misc]
                return items

    return Built


def test_a_class_that_cannot_be_built_is_reported_once(kind: Any) -> None:
    def init() -> None:
        raise FileNotFoundError("no model.bin")

    with running(class_of(init, kind)) as (submitter, outcomes):
        submitter.submit([1])
        assert isinstance(outcomes.get(timeout=SOON).fatal, FileNotFoundError)
    assert outcomes.empty()


def test_a_constructor_that_a_service_refuses_is_tried_again(kind: Any) -> None:
    failures = [ConnectionError("refused"), ConnectionError("refused")]

    def init() -> None:
        if failures:
            raise failures.pop()

    with running(class_of(init, kind), retry=AT_ONCE) as (submitter, _):
        assert ask(submitter, [1]) == [1]


def test_a_constructor_is_tried_as_often_as_a_call(kind: Any) -> None:
    calls: list[int] = []

    def init() -> None:
        calls.append(1)
        raise ConnectionError("refused")

    with running(class_of(init, kind), retry=AT_ONCE) as (submitter, outcomes):
        submitter.submit([1])
        assert isinstance(outcomes.get(timeout=SOON).fatal, ConnectionError)
    assert len(calls) == AT_ONCE.attempts


def test_closing_ends_the_wait_for_another_build(kind: Any) -> None:
    called = threading.Event()

    def init() -> None:
        called.set()
        raise ConnectionError("refused")

    with running(class_of(init, kind), retry=NEVER) as (submitter, outcomes):
        submitter.submit([1])
        assert called.wait(SOON)
        submitter.engine.close()
        wait_until(lambda: not leftovers())
    assert outcomes.empty()


# closing


def test_closing_lets_a_running_call_end_and_reports_it(kind: Any) -> None:
    running_now, go_on = threading.Event(), threading.Event()

    def slow(items: list[int]) -> list[int]:
        running_now.set()
        assert go_on.wait(SOON)
        return items

    with running(kind(slow)) as (submitter, outcomes):
        submitter.submit([1])
        assert running_now.wait(SOON)
        submitter.engine.stop()
        go_on.set()
        assert outcomes.get(timeout=SOON).results == [1]


def test_nothing_begins_after_stop_and_a_narrowing_is_not_reported(kind: Any) -> None:
    halves, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def bad(items: list[int]) -> list[int]:
        calls.append(len(items))
        if len(items) < 8:
            halves.set()
            assert go_on.wait(SOON)
        raise ValueError("bad row")

    with running(kind(bad), batch_size=8) as (submitter, outcomes):
        submitter.submit(list(range(8)))
        submitter.submit([1, 2])
        assert halves.wait(SOON)
        submitter.engine.stop()
        go_on.set()
        wait_until(lambda: not submitter.engine.running)
    assert calls == [8, 4]
    assert outcomes.empty(), "neither a batch that was interrupted nor one that had not begun"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_signal_handler_that_raises_while_rows_are_submitted_ends_the_run(error: Any) -> None:
    def length(item: int) -> int:
        raise error  # as a handler between two instructions

    with running(double, length=length) as (submitter, outcomes), pytest.raises(error):
        submitter.submit([1, 2])
    assert outcomes.empty()


def test_a_call_on_a_loop_that_has_ended_is_refused() -> None:
    async def same(items: list[int]) -> list[int]:
        return items

    worker = LoopWorker(step_of(same))
    worker.make_ready()
    assert worker.call([1]) == [1]
    worker.closing.set()
    worker.close()
    with pytest.raises(WorkerClosed):
        worker.call([2])  # and no coroutine is left that nobody awaits


def test_a_thread_that_hangs_is_left() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hanging(items: list[int]) -> list[int]:
        begun.set()
        go_on.wait(SOON)
        return items

    with running(hanging) as (submitter, _):
        submitter.submit([1])
        assert begun.wait(SOON)
    assert len(leftovers()) == 1
    go_on.set()
    wait_until(lambda: not leftovers())


def test_closing_cancels_a_coroutine_that_goes_on_forever() -> None:
    begun = threading.Event()
    ended: list[type[BaseException]] = []

    async def endless(items: list[int]) -> list[int]:
        begun.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            ended.append(type(error))
            raise
        return items

    with running(endless) as (submitter, outcomes):
        submitter.submit([1])
        assert begun.wait(SOON)
    assert ended == [asyncio.CancelledError]
    assert outcomes.empty()


def test_a_loop_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    joined: list[str] = []

    async def hanging(items: list[int]) -> list[int]:
        begun.set()
        go_on.wait(SOON)
        return items

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(thread.name)

    with running(hanging, workers=3, batch_size=1) as (submitter, _):
        submitter.submit([1, 2, 3])
        assert begun.wait(SOON)
        wait_until(lambda: submitter.engine.running == 3)  # two calls cannot begin
        monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.undo()
    go_on.set()
    assert len(joined) == 1


def test_a_cancellation_that_the_function_raises_itself_is_an_error_of_the_batch() -> None:
    async def cancelling(items: list[int]) -> list[int]:
        raise asyncio.CancelledError

    found = results(cancelling, [1, 2])
    assert [type(each) for each in found] == [asyncio.CancelledError] * 2


def test_engines_may_be_closed_twice_and_before_they_start(kind: Any) -> None:
    submitter = Submitter(step_of(kind(double)))
    submitter.engine.close()
    submitter.submit([1])
    submitter.engine.close()
    assert submitter.outcomes.empty()


# row threads


def test_row_threads_call_in_parallel_and_drop_calls_that_have_not_begun() -> None:
    together, done = threading.Barrier(3), SimpleQueue[int]()
    threads = RowThreads(2, "rows")

    def note(row: int) -> None:
        together.wait(SOON)
        done.put(row)

    for number in range(2):
        threads.submit(note, number)
    together.wait(SOON)
    assert sorted(done.get(timeout=SOON) for _ in range(2)) == [0, 1]
    threads.close(time.perf_counter() + SOON)
    threads.submit(done.put, 3)
    assert done.empty()
