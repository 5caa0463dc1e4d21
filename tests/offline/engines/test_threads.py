"""Engines in threads and on a loop: outcomes, builds and closing."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

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
    outcome,
    running,
    step_of,
)
from stage import wait_until

AT_ONCE = Retry(wait_initial=0, wait_jitter=0)
NEVER = Retry(wait_initial=1e6, wait_max=1e6)

pytestmark = pytest.mark.usefixtures("leftovers")


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


def test_a_dict_of_columns_becomes_a_dict_for_each_row() -> None:
    def classify(items: list[int]) -> dict[str, Any]:
        return {"label": [str(item) for item in items], "score": (1, 2), "unused": None}

    found = outcome(classify, [7, 8], output=("label", "score")).results
    assert found == [{"label": "7", "score": 1}, {"label": "8", "score": 2}]


def test_a_dict_of_columns_of_different_lengths_is_refused() -> None:
    columns = {"label": ["a", "b"], "score": [1]}
    found = outcome(lambda items: columns, [7, 8], output=("label", "score")).results
    assert {type(each) for each in found} == {BatchFunctionError}
    assert str(found[0]).endswith(
        " returned a dict; it must have a list for each of the columns label, score, all of one "
        "length"
    )


def test_without_isolation_a_batch_fails_as_one() -> None:
    fn = Counted({3})
    found = outcome(fn, list(range(8)), isolate_errors=False, isolating=True).results
    assert [type(each) for each in found] == [ValueError] * 8
    assert fn.sizes == [8]


# memory and time


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


def test_a_timeout_of_the_coroutine_itself_is_the_services() -> None:
    calls: list[int] = []

    async def timing_out(items: list[int]) -> list[int]:
        calls.append(1)
        raise TimeoutError("from the client")

    found = outcome(timing_out, [1, 2, 3, 4], timeout_s=SOON).results
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

    good, bad = outcome(Client, [0, 1], timeout_s=0.02).results
    assert (good, type(bad)) == (0, TimeLimitExceeded)
    assert str(bad) == "Client took longer than timeout_s=0.02, and was ended"
    with pytest.raises(TypeError, match="'Client': a coroutine function runs on a loop, not in"):
        step_of(Client, processes=True)


def class_of(init: Any, kind: Any) -> Any:
    """Return a class with that constructor, called as `kind` calls."""

    class Built:
        def __init__(self) -> None:
            init()

        __call__ = kind(lambda _, items: items)

    return Built


def test_a_constructor_that_a_service_refuses_is_tried_as_often_as_a_call(kind: Any) -> None:
    failures = [ConnectionError("refused") for _ in range(AT_ONCE.attempts - 1)]

    def init() -> None:
        if failures:
            raise failures.pop()

    with running(class_of(init, kind), retry=AT_ONCE) as (submitter, _):
        assert ask(submitter, [1]) == [1]
    failures += [ConnectionError("refused") for _ in range(AT_ONCE.attempts)]
    with running(class_of(init, kind), retry=AT_ONCE) as (submitter, outcomes):
        submitter.submit([1])
        assert isinstance(outcomes.get(timeout=SOON).fatal, ConnectionError)
    assert not failures
    assert outcomes.empty(), "it is told once"


def test_closing_ends_the_wait_for_another_build(kind: Any, leftovers: Any) -> None:
    called = threading.Event()

    def init() -> None:
        called.set()
        raise ConnectionError("refused")

    with running(class_of(init, kind), retry=NEVER) as (submitter, outcomes):
        submitter.submit([1])
        assert called.wait(SOON)
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


def test_a_signal_handler_that_raises_while_rows_are_submitted_ends_the_run() -> None:
    def length(item: int) -> int:
        raise KeyboardInterrupt  # as a handler between two instructions

    with running(double, length=length) as (submitter, outcomes), pytest.raises(KeyboardInterrupt):
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


def test_closing_cancels_a_coroutine_that_goes_on_forever() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless(items: list[int]) -> list[int]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return items

    with running(endless) as (submitter, outcomes):
        submitter.submit([1])
        assert begun.wait(SOON)
    assert ended.wait(SOON)
    assert outcomes.empty()


def test_a_call_that_hangs_is_left(kind: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hanging(items: list[int]) -> list[int]:
        begun.set()
        go_on.wait(SOON)
        return items

    with running(kind(hanging)) as (submitter, _):
        submitter.submit([1])
        assert begun.wait(SOON)
        began = time.monotonic()
    took = time.monotonic() - began
    go_on.set()
    assert took < SOON / 2


def test_a_cancellation_that_the_function_raises_itself_is_an_error_of_the_batch() -> None:
    async def cancelling(items: list[int]) -> list[int]:
        raise asyncio.CancelledError

    found = outcome(cancelling, [1, 2]).results
    assert [type(each) for each in found] == [asyncio.CancelledError] * 2


def test_engines_may_be_closed_twice_and_before_they_start(kind: Any) -> None:
    submitter = Submitter(step_of(kind(double)))
    submitter.engine.close()
    submitter.submit([1])
    submitter.engine.close()
    assert submitter.outcomes.empty()


# row threads


def test_row_threads_call_in_parallel_and_drop_calls_that_have_not_begun() -> None:
    together, done = threading.Barrier(3), threading.Event()
    threads = RowThreads(2, "rows")
    for _ in range(2):
        threads.submit(together.wait, SOON)
    together.wait(SOON)
    threads.close(time.perf_counter() + SOON)
    threads.submit(done.set)
    assert not done.is_set()
