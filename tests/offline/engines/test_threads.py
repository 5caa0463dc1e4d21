"""Engines in threads and on a loop: outcomes of batches, narrowing, builds, routing and closing."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("cloudpickle")

import batched
from batched.errors import BatchFunctionError, BatchSizeMismatch, RemoteError, TimeLimitExceeded
from batched.offline.engines import Engine, Outcome, engine_for
from batched.offline.engines.row_threads import RowThreads
from batched.offline.engines.threads import CallerEngine
from batched.offline.retry import Retry
from offline_steps import (
    SOON,
    Counted,
    ask,
    batch_of,
    close,
    double,
    leftovers,
    note_threads,
    outcome,
    results,
    routed,
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
    assert not leftovers()


def answers(engine: Engine, outcomes: SimpleQueue[Outcome], rows: Sequence[Any]) -> list[Any]:
    """Return the results of batches of one row each, in the order in which they come."""
    for row in rows:
        engine.submit(batch_of([row]))
    return [results(outcomes.get(timeout=SOON))[0] for _ in rows]


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


def test_a_batch_comes_back_with_a_result_for_each_slice(kind: Any) -> None:
    done = outcome(kind(double), [1, 2, 3])
    assert results(done) == [2, 4, 6]
    assert done.tried == [1, 1, 1]
    assert done.fatal is None
    assert done.seconds > 0


def test_a_decorated_function_is_unwrapped() -> None:
    assert results(outcome(batched.dynamically(double), [1, 2])) == [2, 4]
    assert results(outcome(batched.aio.dynamically(asynchronous(double)), [1])) == [2]


def test_arguments_of_a_function_come_after_the_items(kind: Any) -> None:
    def scale(items: list[int], factor: int, *, add: int) -> list[int]:
        return [factor * item + add for item in items]

    assert results(outcome(kind(scale), [1, 2], args=(10,), kwargs={"add": 1})) == [11, 21]


def test_slots_are_the_batches_that_run_at_once(kind: Any) -> None:
    together = threading.Barrier(4)

    def wait(items: list[int]) -> list[int]:
        together.wait(SOON)
        return items

    async def wait_async(items: list[int]) -> list[int]:
        await asyncio.to_thread(together.wait, SOON)
        return items

    fn = wait_async if kind is asynchronous else wait
    with running(fn, workers=3) as (engine, outcomes):
        assert engine.slots == 3
        for row in range(engine.slots):
            engine.submit(batch_of([row]))
        together.wait(SOON)
        assert sorted(results(outcomes.get(timeout=SOON))[0] for _ in range(3)) == [0, 1, 2]


def test_a_dict_of_columns_becomes_a_dict_for_each_row(kind: Any) -> None:
    def classify(items: list[int]) -> dict[str, Any]:
        return {"label": [str(item) for item in items], "score": (1, 2), "unused": None}

    done = outcome(kind(classify), [7, 8], output=("label", "score"))
    assert results(done) == [{"label": "7", "score": 1}, {"label": "8", "score": 2}]


@pytest.mark.parametrize(
    "columns",
    [{"label": ["a", "b"]}, {"label": ["a", "b"], "score": [1]}, {"label": 1, "score": 2}],
)
def test_a_dict_of_columns_of_different_lengths_is_refused(columns: dict[str, Any]) -> None:
    done = outcome(lambda items: columns, [7, 8], output=("label", "score"))
    assert {type(each) for each in done.results} == {BatchFunctionError}
    assert str(done.results[0]).endswith(
        " returned a dict; it must have a list for each of the columns label, score, all of one "
        "length"
    )


# narrowing


def test_a_function_that_fails_for_all_rows_is_given_up_after_three_calls(kind: Any) -> None:
    fn = Counted(set(range(64)), RuntimeError("CUDA error: device-side assert triggered"))
    done = outcome(kind(fn), list(range(64)))
    assert fn.sizes == [64, 32, 32]
    assert {str(each) for each in done.results} == {str(fn.error)}
    assert len(done.results) == 64


def test_a_isolating_batch_is_narrowed_to_the_end(kind: Any) -> None:
    fn = Counted(set(range(16)) - {5})
    done = outcome(kind(fn), list(range(16)), isolating=True)
    assert [each for each in results(done) if isinstance(each, int)] == [10]
    assert all([row] in fn.calls for row in range(16))
    assert len(fn.calls) == 31


def test_a_service_error_of_the_whole_batch_comes_back_after_one_call(kind: Any) -> None:
    fn = Counted(set(range(64)), ConnectionError("refused"))
    done = outcome(kind(fn), list(range(64)), retry=NEVER)
    assert fn.sizes == [64]
    assert {type(each) for each in done.results} == {ConnectionError}


def test_a_service_error_of_an_isolating_batch_is_narrowed(kind: Any) -> None:
    fn = Counted({3}, ConnectionError("refused"))
    done = outcome(kind(fn), list(range(8)), retry=NEVER, isolating=True)
    assert [row for row, each in enumerate(results(done)) if each is fn.error] == [3]


def test_without_isolation_a_batch_fails_as_one(kind: Any) -> None:
    fn = Counted({3})
    done = outcome(kind(fn), list(range(8)), isolate_errors=False, isolating=True)
    assert [type(each) for each in done.results] == [ValueError] * 8
    assert fn.sizes == [8]


def test_too_few_results_are_logged_once_and_narrowed(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with running(kind(lambda items: [])) as (engine, outcomes):
        for _ in range(2):
            engine.submit(batch_of(list(range(16))))
            done = outcomes.get(timeout=SOON)
            assert {type(each) for each in done.results} == {BatchSizeMismatch}
    (message,) = caplog.messages
    assert re.fullmatch(
        r"\S+ was given 16 items and returned 0 results; it must return one per item, in order; "
        "it is called with fewer items, down to one",
        message,
    )


def test_rows_whose_errors_are_returned_in_their_place_are_not_given_up(kind: Any) -> None:
    done = outcome(kind(lambda items: [KeyError(item) for item in items]), list(range(8)))
    assert {type(each) for each in done.results} == {KeyError}
    assert done.tried == [1] * 8


def test_an_error_whose_message_cannot_be_made_is_one_of_its_row(kind: Any) -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    done = outcome(kind(Counted({3}, Mute())), list(range(8)))
    assert [row for row, each in enumerate(results(done)) if type(each) is Mute] == [3]


# memory and time


def test_memory_errors_split_and_are_noted_for_the_scheduler(kind: Any) -> None:
    def small(items: list[int]) -> list[int]:
        if len(items) > 4:
            raise MemoryError("too many")
        return items

    done = outcome(kind(small), list(range(16)))
    assert results(done) == list(range(16))
    assert done.batch is not None
    assert list(done.batch.too_big) == [(16, 0), (8, 0), (8, 0)]
    assert not done.batch.fitted


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

    done = outcome(hanging, list(range(8)), timeout_s=0.02)
    found = results(done)
    assert type(found[5]) is TimeLimitExceeded
    assert str(found[5]) == "hanging took longer than timeout_s=0.02, and was ended"
    assert found[:5] + found[6:] == [0, 1, 2, 3, 4, 6, 7]
    assert done.batch is not None
    assert not done.batch.too_big


def test_a_time_limit_that_only_full_batches_exceed_makes_batches_smaller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def slow(items: list[int]) -> list[int]:
        if len(items) > 4:
            await asyncio.Event().wait()
        return items

    done = outcome(slow, list(range(8)), timeout_s=0.02)
    assert results(done) == list(range(8))
    assert done.batch is not None
    assert list(done.batch.too_big) == [(8, 0)]
    (message,) = caplog.messages
    assert message.startswith("step 'slow': 8 rows took longer than timeout_s, and their parts did")


def test_a_timeout_of_the_coroutine_itself_is_the_services() -> None:
    calls: list[int] = []

    async def timing_out(items: list[int]) -> list[int]:
        calls.append(1)
        raise TimeoutError("from the client")

    done = outcome(timing_out, [1, 2, 3, 4], timeout_s=SOON)
    assert [type(each) for each in done.results] == [TimeoutError] * 4
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

    with running(Scale, args=(3,), workers=2) as (engine, outcomes):
        assert sorted(answers(engine, outcomes, range(4))) == [0, 3, 6, 9]
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

    with running(Client, workers=3) as (engine, outcomes):
        assert sorted(answers(engine, outcomes, range(3))) == [0, 1, 2]
    assert len(built) == 1


def test_a_class_of_a_coroutine_function_has_time_limits_and_no_processes() -> None:
    class Client:
        async def __call__(self, items: list[int]) -> list[int]:
            if 1 in items:
                await asyncio.Event().wait()
            return items

    good, bad = results(outcome(Client, [0, 1], timeout_s=0.02))
    assert (good, type(bad)) == (0, TimeLimitExceeded)
    with pytest.raises(TypeError, match="'Client': a coroutine function runs on a loop, not in"):
        step_of(Client, processes=True)


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


def test_a_class_that_no_worker_can_build_is_reported_once(kind: Any) -> None:
    def init() -> None:
        raise FileNotFoundError("no model.bin")

    with running(class_of(init, kind), workers=3) as (engine, outcomes):
        engine.submit(batch_of([1]))
        done = outcomes.get(timeout=SOON)
    assert isinstance(done.fatal, FileNotFoundError)
    assert done.batch is None
    assert outcomes.empty()


def test_one_failed_constructor_of_four_costs_one_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = iter(range(4))

    def init() -> None:
        if next(numbers) == 0:
            raise FileNotFoundError("no model.bin")

    with running(class_of(init, None), workers=4) as (engine, outcomes):
        wait_until(lambda: len(caplog.messages) == 1)
        assert sorted(answers(engine, outcomes, range(20))) == list(range(20))
    (message,) = caplog.messages
    assert message == (
        "step 'Built' goes on with a worker less, which could not be built: FileNotFoundError: no "
        "model.bin"
    )


def test_a_constructor_that_a_service_refuses_is_tried_again(kind: Any) -> None:
    failures = [ConnectionError("refused"), ConnectionError("refused")]

    def init() -> None:
        if failures:
            raise failures.pop()

    with running(class_of(init, kind), retry=AT_ONCE) as (engine, outcomes):
        assert ask(engine, outcomes, batch_of([1])) == [1]


def test_a_constructor_is_tried_as_often_as_a_call(kind: Any) -> None:
    calls: list[int] = []

    def init() -> None:
        calls.append(1)
        raise ConnectionError("refused")

    with running(class_of(init, kind), retry=AT_ONCE) as (_, outcomes):
        assert isinstance(outcomes.get(timeout=SOON).fatal, ConnectionError)
    assert len(calls) == AT_ONCE.attempts


def test_closing_ends_the_wait_for_another_build(kind: Any) -> None:
    called = threading.Event()

    def init() -> None:
        called.set()
        raise ConnectionError("refused")

    with running(class_of(init, kind), retry=NEVER) as (engine, outcomes):
        engine.submit(batch_of([1]))
        assert called.wait(SOON)
        close(engine)
        assert not leftovers()
    assert outcomes.empty()


# routing


class Model:
    """A model of a key, which notes how many models live at once."""

    built: Counter[str]
    alive: weakref.WeakSet[Model]
    most = 0

    def __init__(self, key: str) -> None:
        Model.built[key] += 1
        Model.most = max(Model.most, 1 + len(Model.alive))
        if key.startswith("broken"):
            raise FileNotFoundError(f"no {key}.bin")
        Model.alive.add(self)
        self.itself = self  # a circle, as models have
        self.key = key

    def __call__(self, items: list[Any]) -> list[str]:
        for item in items:
            if isinstance(item, threading.Barrier):
                item.wait(SOON)
        return [self.key] * len(items)


@pytest.fixture
def _no_models() -> None:
    gc.collect()
    Model.built, Model.alive, Model.most = Counter(), weakref.WeakSet(), 0


@pytest.mark.usefixtures("_no_models")
def test_one_model_at_most_is_held_even_while_the_next_one_is_built() -> None:
    with running(Model, max_models=1, route=str) as (engine, outcomes):
        assert ask(engine, outcomes, *[routed(key, [1]) for key in "abab"]) == list("abab")
    assert Model.most == 1
    assert Model.built == {"a": 2, "b": 2}


@pytest.mark.usefixtures("_no_models")
def test_a_worker_takes_the_batches_of_its_model_first() -> None:
    begin = threading.Barrier(2)
    with running(Model, max_models=1, route=str) as (engine, outcomes):
        engine.submit(routed("a", [begin]))
        for key in "bcabcabca":
            engine.submit(routed(key, [1]))
        begin.wait(SOON)
        found = [results(outcomes.get(timeout=SOON))[0] for _ in range(10)]
    assert found == list("aaaabbbccc")
    assert Model.built == {"a": 1, "b": 1, "c": 1}


@pytest.mark.usefixtures("_no_models")
def test_a_worker_takes_a_key_that_no_worker_holds_before_an_older_one() -> None:
    busy = {key: threading.Barrier(2) for key in "ax"}
    with running(Model, max_models=1, route=str, workers=2) as (engine, outcomes):
        for key, barrier in busy.items():
            engine.submit(routed(key, [barrier, barrier]))
        for barrier in busy.values():
            barrier.wait(SOON)  # one worker holds `a`, the other one `x`
        for key in "ab":
            engine.submit(routed(key, [1]))
        busy["x"].wait(SOON)
        assert [results(outcomes.get(timeout=SOON))[0] for _ in range(2)] == ["x", "b"]
        busy["a"].wait(SOON)
        assert [results(outcomes.get(timeout=SOON))[0] for _ in range(2)] == ["a", "a"]


@pytest.mark.usefixtures("_no_models")
def test_a_key_that_cannot_be_built_is_built_once_and_fails_alone() -> None:
    with running(Model, max_models=2, route=str) as (engine, outcomes):
        for isolating in (False, True):
            engine.submit(routed("broken", list(range(256))), isolating=isolating)
            done = outcomes.get(timeout=SOON)
            assert {type(each) for each in done.results} == {RemoteError}
            assert str(done.results[0]) == "FileNotFoundError: no broken.bin"
            assert 'raise FileNotFoundError(f"no {key}.bin")' in done.results[0].lines
        assert ask(engine, outcomes, routed("a", [1])) == ["a"]
    assert Model.built == {"broken": 1, "a": 1}


def test_a_key_that_a_service_refuses_is_built_again() -> None:
    failures = [ConnectionError("refused")]

    class Client:
        def __init__(self, key: str) -> None:
            if failures:
                raise failures.pop()

        def __call__(self, items: list[Any]) -> list[Any]:
            return items

    with running(Client, max_models=1, route=str) as (engine, outcomes):
        found = ask(engine, outcomes, *[routed("a", [1])] * 2)
    assert [type(each) for each in found] == [ConnectionError, int]


def test_coroutine_functions_keep_a_model_for_each_key() -> None:
    built: list[str] = []

    class Client:
        def __init__(self, key: str) -> None:
            built.append(key)

        async def __call__(self, items: list[int]) -> list[int]:
            return items

    with running(Client, max_models=1, route=str, workers=2) as (engine, outcomes):
        ask(engine, outcomes, *[routed(key, [1]) for key in "abab"])
    assert sorted(built) == ["a", "b"]


# closing


def test_closing_lets_a_running_call_end_and_reports_it(kind: Any) -> None:
    running_now, go_on = threading.Event(), threading.Event()

    def slow(items: list[int]) -> list[int]:
        running_now.set()
        assert go_on.wait(SOON)
        return items

    with running(kind(slow)) as (engine, outcomes):
        engine.submit(batch_of([1]))
        assert running_now.wait(SOON)
        engine.stop()
        go_on.set()
        close(engine)
        assert results(outcomes.get_nowait()) == [1]


def test_nothing_begins_after_stop_and_a_narrowing_is_not_reported(kind: Any) -> None:
    halves, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def bad(items: list[int]) -> list[int]:
        calls.append(len(items))
        if len(items) < 8:
            halves.set()
            assert go_on.wait(SOON)
        raise ValueError("bad row")

    with running(kind(bad)) as (engine, outcomes):
        engine.submit(batch_of(list(range(8))))
        engine.submit(batch_of([1, 2]))
        assert halves.wait(SOON)
        engine.stop()
        go_on.set()
        close(engine)
    assert calls == [8, 4]
    assert outcomes.empty(), "neither a batch that was interrupted nor one that had not begun"


def test_one_deadline_holds_for_all_engines_and_a_thread_that_hangs_is_left() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def hanging(items: list[int]) -> list[int]:
        begun.release()
        go_on.wait(SOON)
        return items

    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    engines = [engine_for(step_of(hanging), outcomes.put) for _ in range(3)]
    for engine in engines:
        engine.start()
        engine.submit(batch_of([1]))
        assert begun.acquire(timeout=SOON)
    deadline = time.perf_counter()  # it has passed: none may take time of its own
    for engine in engines:
        engine.close(deadline)
    assert len(leftovers()) == 3
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

    with running(endless) as (engine, outcomes):
        engine.submit(batch_of([1]))
        assert begun.wait(SOON)
        close(engine, 0)
    assert ended == [asyncio.CancelledError]
    assert outcomes.empty()


def test_a_cancellation_that_the_function_raises_itself_is_an_error_of_the_batch() -> None:
    async def cancelling(items: list[int]) -> list[int]:
        raise asyncio.CancelledError

    done = outcome(cancelling, [1, 2])
    assert [type(each) for each in done.results] == [asyncio.CancelledError] * 2


def test_engines_may_be_closed_twice_and_before_they_start(kind: Any) -> None:
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    engine = engine_for(step_of(kind(double)), outcomes.put)
    close(engine, 0)
    engine.start()
    close(engine)
    engine.submit(batch_of([1]))
    assert outcomes.empty()


# the thread of the caller


@contextmanager
def calling(func: Any) -> Iterator[tuple[CallerEngine, list[Outcome]]]:
    """Yield an engine that computes in this thread, with its outcomes."""
    outcomes: list[Outcome] = []
    engine = CallerEngine(step_of(func), outcomes.append)
    yield engine, outcomes
    close(engine)


def test_the_engine_of_a_caller_computes_in_its_thread(kind: Any) -> None:
    threads: list[threading.Thread] = []

    def fn(items: list[int]) -> list[int]:
        threads.append(threading.current_thread())
        return double(items)

    with calling(kind(fn)) as (engine, outcomes):
        engine.start()
        assert engine.slots == 1
        for _ in range(2):
            engine.submit(batch_of([1, 2]))
            assert results(outcomes.pop()) == [2, 4]
    assert set(threads) == {threading.main_thread()}


def test_a_caller_gets_the_error_of_a_class_that_cannot_be_built(kind: Any) -> None:
    def init() -> None:
        raise FileNotFoundError("no model.bin")

    with calling(class_of(init, kind)) as (engine, _), pytest.raises(FileNotFoundError):
        engine.start()


def test_an_interrupt_is_the_callers_and_not_the_answer_of_a_row() -> None:
    def interrupted(items: list[int]) -> list[int]:
        raise KeyboardInterrupt

    with calling(interrupted) as (engine, outcomes):
        engine.start()
        with pytest.raises(KeyboardInterrupt):
            engine.submit(batch_of([1, 2]))
    assert not outcomes


# row threads


def test_row_threads_call_in_parallel_and_drop_calls_that_have_not_begun() -> None:
    together, done = threading.Barrier(3), SimpleQueue[int]()
    threads = RowThreads(2, "batched-rows")

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
