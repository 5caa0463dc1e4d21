"""Workers of a step in threads and on a loop: what becomes of batches, errors and waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("cloudpickle")

import batched
from batched.errors import BatchSizeMismatch, TimeLimitExceeded
from batched.offline._batch_run import BatchRun, Done
from batched.offline._retry import Retry
from batched.offline._worker import workers_of
from offline_steps import (
    SOON,
    batch_of,
    double,
    leftovers,
    note_threads,
    outcome,
    results,
    running,
    spec,
)

AT_ONCE = Retry(wait_initial=0, wait_jitter=0)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    note_threads()
    yield
    assert not leftovers()


class Counted:
    """A batch function that notes its calls, and fails for rows as it is told to."""

    def __init__(self, bad: set[int], error: Exception | None = None) -> None:
        self.bad = bad
        self.error = error or ValueError("bad row")
        self.calls: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        if self.bad.intersection(items):
            raise self.error
        return [2 * item for item in items]


def asynchronous(func: Any) -> Any:
    async def fn(items: list[Any]) -> Any:
        await asyncio.sleep(0)
        return func(items)

    return fn


@pytest.fixture(params=["threads", "loop"])
def kind(request: pytest.FixtureRequest) -> Any:
    """Makes a plain function one that the kind of workers runs."""
    return asynchronous if request.param == "loop" else lambda func: func


def test_a_batch_comes_back_with_a_result_for_each_slice(kind: Any) -> None:
    done = outcome(kind(double), [1, 2, 3])
    assert results(done) == [2, 4, 6]
    assert (done.tried, done.calls, done.alive, done.gave_up) == ([1, 1, 1], 1, True, False)
    assert done.fatal is None
    assert done.seconds > 0


def test_a_decorated_function_is_unwrapped() -> None:
    assert results(outcome(batched.dynamically(double), [1, 2])) == [2, 4]
    assert results(outcome(batched.aio.dynamically(asynchronous(double)), [1])) == [2]


def test_arguments_of_a_function_come_after_the_items(kind: Any) -> None:
    def scale(items: list[int], factor: int, *, add: int) -> list[int]:
        return [factor * item + add for item in items]

    async def scale_async(items: list[int], factor: int, *, add: int) -> list[int]:
        return scale(items, factor, add=add)

    fn = scale_async if kind is asynchronous else scale
    assert results(outcome(fn, [1, 2], args=(10,), kwargs={"add": 1})) == [11, 21]


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

    with running(Scale, args=(3,), workers=2) as (workers, outbox):
        for row in range(4):
            workers.submit(batch_of([row]))
        assert sorted(results(outbox.get(timeout=SOON))[0] for _ in range(4)) == [0, 3, 6, 9]
    assert built == [3, 3]


def test_a_class_of_a_coroutine_function_is_built_once_and_runs_batches_at_once() -> None:
    built: list[int] = []

    class Client:
        def __init__(self) -> None:
            built.append(1)
            self.together = asyncio.Barrier(3)

        async def __call__(self, items: list[int]) -> list[int]:
            await self.together.wait()
            return items

    with running(Client, workers=3) as (workers, outbox):
        for row in range(3):
            workers.submit(batch_of([row]))
        assert sorted(results(outbox.get(timeout=SOON))[0] for _ in range(3)) == [0, 1, 2]
    assert built == [1]


def test_what_cannot_be_built_is_reported_once(kind: Any) -> None:
    class Broken:
        def __init__(self) -> None:
            raise FileNotFoundError("no model.bin")

        if kind is asynchronous:

            async def __call__(self, items: list[int]) -> list[int]:
                return items
        else:

            def __call__(self, items: list[int]) -> list[int]:  # type: ignore[misc]
                return items

    with running(Broken, workers=3) as (workers, outbox):
        workers.submit(batch_of([1]))
        done = outbox.get(timeout=SOON)
    assert isinstance(done.fatal, FileNotFoundError)
    assert done.batch is None
    assert outbox.empty()


@pytest.mark.parametrize("bad", [0, 31, 63])
def test_one_bad_row_in_64_is_found_by_13_calls(bad: int, kind: Any) -> None:
    fn = Counted({bad})
    done = outcome(kind(fn), list(range(64)))
    found = results(done)
    assert str(found.pop(bad)) == "bad row"
    assert found == [2 * row for row in range(64) if row != bad]
    assert len(fn.calls) == done.calls == 13
    assert (done.alive, done.gave_up) == (True, False)


def test_a_function_that_fails_for_all_rows_is_given_up_after_six_calls(kind: Any) -> None:
    fn = Counted(set(range(64)), RuntimeError("CUDA error: device-side assert triggered"))
    done = outcome(kind(fn), list(range(64)))
    assert [len(call) for call in fn.calls] == [64, 32, 32, 1, 1, 1]
    assert fn.calls[3:] == [[0], [32], [63]]
    assert {str(each) for each in done.results} == {str(fn.error)}
    assert (len(done.results), done.calls, done.alive, done.gave_up) == (64, 6, False, True)


def test_a_function_of_too_few_results_for_any_batch_is_given_up(kind: Any) -> None:
    done = outcome(kind(lambda items: []), list(range(16)))
    assert {type(each) for each in done.results} == {BatchSizeMismatch}
    assert (done.calls, done.alive, done.gave_up) == (6, False, True)


def test_a_row_that_succeeds_alone_keeps_the_isolation_going(kind: Any) -> None:
    bad = set(range(64)) - {32}
    fn = Counted(bad)
    done = outcome(kind(fn), list(range(64)))
    assert [row for row, each in enumerate(results(done)) if each == 64] == [32]
    assert all([row] in fn.calls for row in range(64)), "each bad row was tried alone"
    assert (done.alive, done.gave_up) == (True, False)
    assert fn.calls[3:5] == [[0], [32]], "the middle row is enough"


def test_a_thorough_batch_is_isolated_to_the_end(kind: Any) -> None:
    fn = Counted(set(range(16)))
    done = outcome(kind(fn), list(range(16)), thoroughly=True)
    assert all([row] in fn.calls for row in range(16))
    assert (done.calls, done.alive, done.gave_up) == (31, False, False)


def test_rows_whose_errors_are_returned_in_their_place_are_not_given_up(kind: Any) -> None:
    done = outcome(kind(lambda items: [KeyError(item) for item in items]), list(range(8)))
    assert {type(each) for each in done.results} == {KeyError}
    assert (done.calls, done.alive, done.gave_up) == (1, False, False)
    probed = outcome(kind(fails_in_company), list(range(8)))
    assert {type(each) for each in probed.results} == {KeyError}
    assert (probed.calls, probed.gave_up) == (6, True)


def fails_in_company(items: list[int]) -> list[Any]:
    if len(items) > 1:
        raise KeyError("several")
    return [KeyError(item) for item in items]


def test_without_isolation_a_batch_fails_as_one(kind: Any) -> None:
    done = outcome(kind(Counted({3})), list(range(8)), isolate_errors=False)
    assert [type(each) for each in done.results] == [ValueError] * 8
    assert (done.calls, done.alive, done.gave_up) == (1, False, False)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_program_is_an_error_as_any_other(error: BaseException) -> None:
    def ending(items: list[int]) -> list[int]:
        raise error

    with running(ending) as (workers, outbox):
        for _ in range(2):
            workers.submit(batch_of([1, 2]))
            done = outbox.get(timeout=SOON)
            assert [type(each) for each in done.results] == [type(error)] * 2


def test_an_error_whose_message_cannot_be_made_is_one_of_its_row(kind: Any) -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    done = outcome(kind(Counted({3}, Mute())), list(range(8)))
    assert [row for row, each in enumerate(results(done)) if type(each) is Mute] == [3]


def test_memory_errors_split_and_are_told_to_the_scheduler(kind: Any) -> None:
    def small(items: list[int]) -> list[int]:
        if len(items) > 4:
            raise MemoryError("too many")
        return items

    done = outcome(kind(small), list(range(16)))
    assert results(done) == list(range(16))
    assert done.batch is not None
    assert list(done.batch.too_big) == [(16, 0), (8, 0)]
    assert not done.batch.fitted


def test_memory_that_ran_out_is_free_for_the_next_attempt(kind: Any) -> None:
    import weakref

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

    done = outcome(dead, list(range(64)))
    assert calls[:3] == [64, 32, 32]
    assert done.gave_up
    assert done.calls < 10


def test_rows_that_run_out_of_memory_alone_are_given_up_and_teach_nothing() -> None:
    calls: list[int] = []

    def odd(items: list[int]) -> list[int]:
        calls.append(len(items))
        raise MemoryError("full") if len(items) == 1 else RuntimeError("device lost")

    done = outcome(odd, list(range(64)))
    assert calls == [64, 32, 32, 1, 1, 1]
    assert done.gave_up
    assert done.batch is not None
    assert not done.batch.too_big


def test_an_outage_costs_the_attempts_of_one_call_and_is_never_narrowed_down(kind: Any) -> None:
    fn = Counted(set(range(64)), ConnectionError("refused"))
    done = outcome(kind(fn), list(range(64)), retry=AT_ONCE)
    assert [len(call) for call in fn.calls] == [64] * 3
    assert {type(each) for each in done.results} == {ConnectionError}
    assert (done.calls, done.alive, done.gave_up) == (3, False, False)


def test_a_fault_of_the_service_that_passes_is_not_seen(kind: Any) -> None:
    failures = [ConnectionError("refused"), TimeoutError("slow")]

    def recovering(items: list[int]) -> list[int]:
        if failures:
            raise failures.pop()
        return items

    done = outcome(kind(recovering), [1, 2], retry=AT_ONCE)
    assert results(done) == [1, 2]
    assert (done.tried, done.calls, done.alive) == ([1, 1], 3, True)


def steps_of(run: BatchRun, error: Exception) -> Generator[Any, Any, Any]:
    """Calls and waits of one attempt of which every call fails with `error`."""
    steps = run.attempt(([1],), {})
    sent = None
    while True:
        try:
            step = steps.send(sent)
        except StopIteration:
            return
        sent = (None, error) if isinstance(step, tuple) else None
        yield step


def test_waits_double_up_to_the_longest_with_jitter_at_random(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    retry = Retry(attempts=5, wait_initial=1, wait_max=5, wait_jitter=0.5)
    run = BatchRun(spec(double, retry=retry), batch_of([1]), False, lambda: False)
    waits = [step for step in steps_of(run, ConnectionError()) if isinstance(step, float)]
    assert waits == [1.5, 2.5, 4.5, 5.0]
    assert run.calls == 5


def test_a_wait_that_the_service_asks_for_is_kept_up_to_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
    error = ConnectionError("busy")
    error.retry_after = 7  # type: ignore[attr-defined]
    retry = Retry(attempts=2, wait_initial=1, wait_max=10)
    assert retry.wait(1, error) == 7.0
    error.retry_after = 3600  # type: ignore[attr-defined]
    assert retry.wait(1, error) == 10.0


def test_closing_ends_a_wait_and_no_further_call_is_made(kind: Any) -> None:
    called = threading.Event()
    calls: list[int] = []

    def refused(items: list[int]) -> list[int]:
        calls.append(1)
        called.set()
        raise ConnectionError("refused")

    retry = Retry(attempts=10, wait_initial=1e6, wait_max=1e6)
    with running(kind(refused), retry=retry) as (workers, outbox):
        workers.submit(batch_of([1, 2]))
        workers.submit(batch_of([3, 4]))
        assert called.wait(SOON)
        workers.close(SOON)
        assert not leftovers()
    assert calls == [1]
    assert outbox.empty(), "what was broken off, or had not begun, is not reported"


def test_closing_lets_a_running_call_end_and_reports_it() -> None:
    running_now, go_on = threading.Event(), threading.Event()

    def slow(items: list[int]) -> list[int]:
        running_now.set()
        assert go_on.wait(SOON)
        return items

    with running(slow) as (workers, outbox):
        workers.submit(batch_of([1]))
        assert running_now.wait(SOON)
        threading.Timer(0.05, go_on.set).start()
        workers.close(SOON)
        assert results(outbox.get_nowait()) == [1]


def test_closing_breaks_off_an_isolation() -> None:
    halves, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def bad(items: list[int]) -> list[int]:
        calls.append(len(items))
        if len(items) < 8:
            halves.set()
            assert go_on.wait(SOON)
        raise ValueError("bad row")

    with running(bad) as (workers, outbox):
        workers.submit(batch_of(list(range(8))))
        assert halves.wait(SOON)
        threading.Timer(0.05, go_on.set).start()
        workers.close(SOON)
    assert calls == [8, 4]
    assert outbox.empty()


def test_closing_cancels_a_coroutine_that_goes_on_for_ever() -> None:
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

    with running(endless) as (workers, outbox):
        workers.submit(batch_of([1]))
        assert begun.wait(SOON)
        workers.close(0)
    assert ended == [asyncio.CancelledError]
    assert outbox.empty()


def test_a_cancellation_that_the_function_raises_itself_is_an_error_of_the_batch() -> None:
    async def cancelling(items: list[int]) -> list[int]:
        raise asyncio.CancelledError

    done = outcome(cancelling, [1, 2])
    assert [type(each) for each in done.results] == [asyncio.CancelledError] * 2


def test_a_coroutine_that_takes_too_long_costs_its_row_only() -> None:
    async def hanging(items: list[int]) -> list[int]:
        if 5 in items:
            await asyncio.Event().wait()
        return items

    done = outcome(hanging, list(range(8)), timeout_s=0.02)
    found = results(done)
    assert type(found[5]) is TimeLimitExceeded
    assert "timeout_s=0.02" in str(found[5])
    assert found[:5] + found[6:] == [0, 1, 2, 3, 4, 6, 7]


def test_a_timeout_of_the_coroutine_itself_is_the_services() -> None:
    calls: list[int] = []

    async def timing_out(items: list[int]) -> list[int]:
        calls.append(1)
        raise TimeoutError("from the client")

    done = outcome(timing_out, [1, 2, 3, 4], timeout_s=SOON, retry=AT_ONCE)
    assert [type(each) for each in done.results] == [TimeoutError] * 4
    assert len(calls) == 3


@pytest.mark.parametrize("func", [double, asynchronous(double)], ids=["threads", "loop"])
def test_workers_may_be_closed_twice_and_before_they_start(func: Any) -> None:
    outbox: SimpleQueue[Done] = SimpleQueue()
    workers = workers_of(spec(func), outbox)
    workers.close(0)
    with running(func) as (started, _):
        started.close(SOON)
        started.close(SOON)
        started.submit(batch_of([1]))
