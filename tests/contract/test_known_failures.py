"""What was seen to go wrong in other libraries and cannot here; each test says in its docstring
what happened there.

They are batched 0.1.5 of PyPI, Ray Serve 2.60, async-batcher 0.2.2 and service-streamer. All but
the last tests are for items and for rows of features alike.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.to_thread
import numpy
import pytest

import batched
from feature_stage import DECOY, FeatureStage, decoy
from number_stage import BUSY, FeatureNumberStage, NumberStage
from stage import BOUND, SCENARIOS, Scenario, python

pytestmark = pytest.mark.anyio

payloads = pytest.mark.parametrize(
    "payload", [NumberStage, FeatureNumberStage], ids=["items", "features"]
)
decorators = pytest.mark.parametrize(
    "decorator",
    [
        batched.dynamically,
        batched.aio.dynamically,
        batched.inference.dynamically,
        batched.aio.inference.dynamically,
    ],
    ids=["threads-items", "aio-items", "threads-features", "aio-features"],
)
cancellable = pytest.mark.parametrize(
    "scenario",
    # a thread that waits in a plain call cannot be cancelled
    [scenario for scenario in SCENARIOS if scenario.kind != "threads"],
    ids=lambda scenario: f"{scenario.kind}-{scenario.loop}",
)


@pytest.fixture
def stage(numbers: NumberStage) -> NumberStage:
    return numbers


@pytest.fixture
async def tensors(scenario: Scenario, anyio_backend: object) -> AsyncIterator[FeatureStage]:
    stage = FeatureStage(scenario)
    yield stage
    await stage.close()


def refusing(number: int, error: Callable[[], BaseException]) -> Callable[[list[int]], list[int]]:
    def compute(numbers: list[int]) -> list[int]:
        if number in numbers:
            raise error()
        return numbers

    return compute


# --- what the function does


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
async def test_a_batch_that_raises_what_is_no_exception_fails_alone(
    stage: NumberStage, error: type[BaseException]
) -> None:
    """batched 0.1.5: this call and all later ones hung."""
    stage.decorate(refusing(13, error), gated=True)
    async with stage.busy() as callers:
        failed = [await callers.call(stage.one(number)) for number in (13, 1)]
        stage.let_through(2)
    assert stage.values(callers.answers[0]) == [BUSY]
    for number in failed:
        with pytest.raises(batched.BatchFunctionError) as raised:
            stage.values(callers.answers[number])
        assert type(raised.value.__cause__) is error
    stage.let_through(2)
    for number in (2, 3):
        assert stage.values(await stage.call(stage.one(number))) == [number]


async def test_after_one_exception_the_next_calls_are_served(stage: NumberStage) -> None:
    """service-streamer: every later call timed out."""
    stage.decorate(refusing(13, lambda: ValueError("unlucky")))
    with pytest.raises(ValueError, match="unlucky"):
        await stage.call(stage.one(13))
    for number in range(3):
        assert stage.values(await stage.call(stage.one(number))) == [number]


async def test_each_caller_of_a_failed_batch_gets_an_exception_of_its_own(
    stage: NumberStage,
) -> None:
    """batched 0.1.5: for one bad item of 8, all 8 callers raised the same object."""
    original = ValueError("unlucky", 13)
    stage.decorate(refusing(13, lambda: original), gated=True)
    async with stage.busy() as callers:
        numbers = [await callers.call(stage.one(number)) for number in range(10, 18)]
        stage.let_through(2)
    errors = [callers.answers[number] for number in numbers]
    assert len({id(error) for error in [original, *errors]}) == 9
    for error in errors:
        assert type(error) is ValueError
        assert error.args == original.args
        assert error.__cause__ is None
    assert stage.fn.stats.errors == 8


async def test_one_result_too_few_is_told_to_every_caller_of_the_batch(stage: NumberStage) -> None:
    """batched 0.1.5: features hung."""
    stage.decorate(lambda numbers: numbers[1:] if 13 in numbers else numbers, gated=True)
    async with stage.busy() as callers:
        short = [await callers.call(stage.one(13)), await callers.call(stage.many([1, 2]))]
        stage.let_through(2)
    for number in short:
        error = callers.answers[number]
        assert isinstance(error, batched.BatchSizeMismatch)
        assert (error.expected, error.actual) == (3, 2)
    assert stage.fn.stats.errors == 2
    stage.let_through()
    assert stage.values(await stage.call(stage.one(3))) == [3]


@pytest.mark.once
@payloads
def test_one_result_too_few_is_told_where_assertions_are_off(payload: type[NumberStage]) -> None:
    """batched 0.1.5: items hung under `python -O`, features anyway."""
    done = python(
        f"""
        import anyio, batched
        from number_stage import {payload.__name__} as NumberStage
        from stage import SCENARIOS

        async def main(stage):
            stage.decorate(lambda numbers: numbers[1:] if 13 in numbers else numbers)
            try:
                await stage.call(stage.many([13, 1, 2]))
            except batched.BatchSizeMismatch as error:
                print(error.expected, error.actual, *stage.values(await stage.call(stage.one(7))))
            await stage.close()

        assert False, "assertions are on"
        for scenario in SCENARIOS:
            backend, options = scenario.backend
            anyio.run(main, NumberStage(scenario), backend=backend, backend_options=options)
        """,
        "-O",
    )
    assert done.stdout == "3 2 7\n" * len(SCENARIOS), done.stderr


async def test_a_function_that_calls_itself_through_its_batcher_is_told_so(
    stage: NumberStage, scenario: Scenario
) -> None:
    """batched 0.1.5: hung."""
    backend, options = scenario.backend

    def plain(batch: Any) -> Any:
        if 1 in stage.numbers(batch):
            if stage.kind == "threads":
                stage.fn(stage.one(0))
            else:
                anyio.run(stage.fn.acall, stage.one(0), backend=backend, backend_options=options)
        return stage.output(stage.numbers(batch))

    async def coroutine(batch: Any) -> Any:
        if 1 in stage.numbers(batch):
            await stage.fn(stage.one(0))
        return stage.output(stage.numbers(batch))

    stage.fn = stage.decorator(coroutine if stage.kind == "aio-coroutine" else plain)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="would wait for itself"):
            await stage.call(stage.one(1))
    assert stage.values(await stage.call(stage.one(0))) == [0]


@pytest.mark.parametrize("way", ["future", "map"])
async def test_a_function_that_waits_for_its_own_batcher_is_told_so(
    stage: NumberStage, scenario: Scenario, way: str
) -> None:
    """batched 0.1.5: a call of itself hung; these are other ways of waiting for one."""
    backend, options = scenario.backend

    async def read() -> None:
        async for _ in stage.fn.map([stage.one(0)]):
            pass

    def plain(batch: Any) -> Any:
        if 1 in stage.numbers(batch):
            if way == "future":
                stage.fn.submit(stage.one(0)).result()
            elif stage.kind == "aio-sync":
                anyio.run(read, backend=backend, backend_options=options)
            else:
                list(stage.fn.map([stage.one(0)]))
        return stage.output(stage.numbers(batch))

    async def coroutine(batch: Any) -> Any:
        if 1 in stage.numbers(batch):
            if way == "future":
                stage.fn.submit(stage.one(0)).result()
            else:
                await read()
        return stage.output(stage.numbers(batch))

    stage.fn = stage.decorator(coroutine if stage.kind == "aio-coroutine" else plain)
    with pytest.raises(RuntimeError):
        await stage.call(stage.one(1))
    assert stage.values(await stage.call(stage.one(0))) == [0]


@decorators
@pytest.mark.parametrize(
    "settings", [{"batch_size": 0}, {"timeout_ms": -1}], ids=["batch_size", "timeout_ms"]
)
def test_a_setting_that_no_call_could_end_with_is_refused_at_decoration(
    decorator: Any, settings: dict[str, Any]
) -> None:
    """batched 0.1.5: accepted, and calls hung."""
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name} must be at least .*, got {value}"):
        decorator(**settings)


async def test_a_length_that_raises_is_an_error_of_its_caller_alone(stage: NumberStage) -> None:
    """Ray Serve 2.60: once the size callback had raised, every later call hung."""

    def length(item: Any) -> int:
        if stage.number(item) == 13:
            raise LookupError("no length")
        return 1

    stage.decorate(gated=True, length=length)
    async with stage.busy() as callers:
        await callers.call(stage.one(1))
        bad = [await callers.call(stage.one(13)), await callers.call(stage.many([2, 13]))]
        assert [type(callers.answers[number]) for number in bad] == [LookupError, LookupError]
        await callers.call(stage.one(3))
        stage.let_through(2)
    assert stage.given == [[BUSY], [1, 3]]
    assert [stage.values(callers.answers[number]) for number in (1, 4)] == [[1], [3]]


# --- order and load


async def test_a_full_batch_leaves_at_once(stage: NumberStage) -> None:
    """batched 0.1.5: a full batch of 4 waited for the timeout, 950 ms of 1000."""
    # held, any of these would outlast the test
    stage.decorate(batch_size=4, timeout_ms=1e9, flush="window")
    async with stage.callers() as callers:
        for number in range(4):
            await callers.call(stage.one(number))
    assert stage.values(await stage.call(stage.many([4, 5, 6, 7]))) == [4, 5, 6, 7]
    assert stage.given == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stage.fn.stats.flush_reasons == {"full": 2}


async def test_single_calls_are_handed_over_in_their_order(stage: NumberStage) -> None:
    """batched 0.1.5: 24 of them came as 0, 2, 6, 14, 23, 22, ..."""
    stage.decorate(gated=True, batch_size=5)
    async with stage.busy() as callers:
        numbers = [await callers.call(stage.one(number)) for number in range(24)]
        stage.let_through(6)
    assert stage.given == [
        [BUSY],
        *(list(range(first, min(first + 5, 24))) for first in range(0, 24, 5)),
    ]
    assert [stage.values(callers.answers[number]) for number in numbers] == [
        [number] for number in range(24)
    ]


@pytest.mark.parametrize(
    "hold", [{}, {"flush": "window", "timeout_ms": 0.0}], ids=["auto", "window"]
)
async def test_calls_that_come_while_the_worker_is_busy_run_together(
    stage: NumberStage, hold: dict[str, Any]
) -> None:
    """Ray Serve 2.60: 40 calls 10 ms apart into a 200 ms function became 40 batches of one."""
    stage.decorate(gated=True, batch_size=64, **hold)
    async with stage.busy() as callers:
        for number in range(20):
            await callers.call(stage.one(number))
        stage.let_through()
        await stage.running(2)
        for number in range(20, 40):
            await callers.call(stage.one(number))
        stage.let_through(2)
    assert stage.given == [[BUSY], list(range(20)), list(range(20, 40))]
    assert [stage.values(callers.answers[1 + number]) for number in range(40)] == [
        [number] for number in range(40)
    ]


async def test_a_small_call_behind_a_large_one_is_in_the_next_batch(stage: NumberStage) -> None:
    """batched 0.1.5: waited for all 20 batches of an 80-item call, which were popped up front."""
    stage.decorate(gated=True, batch_size=4)
    async with stage.callers() as callers:
        large = await callers.call(stage.many(range(80)))
        await stage.running(1)
        small = await callers.call(stage.one(100))
        stage.let_through(2)
        await stage.until(lambda: small in callers.answers)
        assert large not in callers.answers
        stage.let_through(20)
    assert 100 in stage.given[1]
    assert stage.values(callers.answers[small]) == [100]
    assert stage.values(callers.answers[large]) == list(range(80))


async def test_a_large_call_under_small_callers_finishes_within_its_bound(
    stage: NumberStage,
) -> None:
    """batched 0.1.5: a 9-item call under 24 small callers had no result in 5 s, while they got
    8,045.
    """
    stage.decorate(gated=True, batch_size=4, small_batch_threshold=8)
    # ceil(4 * 9 / 4) + 1 batches after the one that runs when it comes
    large, bound = range(100, 109), 9 + 1
    async with stage.busy() as callers:
        for number in range(24):
            await callers.call(stage.one(number))
        answer = await callers.call(stage.many(large))
        for batches in range(1, bound + 1):
            stage.let_through()
            await stage.running(1 + batches)
            for number in range(4):  # those of them who were answered come back
                await callers.call(stage.one(number))
        stage.let_through(100)
    within = [number for batch in stage.given[1 : 1 + bound] for number in batch]
    assert len(within) == 4 * bound, "small callers were waiting all the time"
    assert [number for number in within if number in large] == list(large)
    assert stage.values(callers.answers[answer]) == list(large)


# --- cancellation


@cancellable
async def test_cancelled_calls_are_never_computed(stage: NumberStage) -> None:
    """batched 0.1.5: 100 cancelled `acall`s were all executed."""
    stage.decorate(gated=True)
    async with stage.busy() as callers:
        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(stage.call, stage.one(number))
            await stage.queued(100)
            group.cancel_scope.cancel()
        assert stage.fn.stats.queue_size == 0
        assert stage.fn.stats.cancelled == 100
        await callers.call(stage.one(200))
        stage.let_through(2)
    assert stage.given == [[BUSY], [200]]


async def test_cancelled_futures_are_never_computed(stage: NumberStage) -> None:
    """batched 0.1.5: 100 cancelled `acall`s were all executed; these are futures, which threads can
    cancel too.
    """
    stage.decorate(gated=True)
    async with stage.busy() as callers:
        futures = [stage.fn.submit(stage.one(number)) for number in range(100)]
        assert all(future.cancel() for future in futures)
        assert stage.fn.stats.queue_size == 0
        await callers.call(stage.one(200))
        stage.let_through(2)
    assert stage.given == [[BUSY], [200]]
    assert all(future.cancelled() for future in futures)


@cancellable
async def test_cancelling_one_call_of_a_running_batch_leaves_the_others_untouched(
    stage: NumberStage,
) -> None:
    """async-batcher 0.2.2: for one of 4 cancelled, the other 3 hung."""
    stage.decorate(gated=True)
    async with stage.busy() as callers:
        async with anyio.create_task_group() as group:
            numbers = [await callers.call(stage.one(0))]
            group.start_soon(stage.call, stage.one(1))
            await stage.queued(2)
            numbers += [await callers.call(stage.one(number)) for number in (2, 3)]
            stage.let_through()
            await stage.running(2)
            group.cancel_scope.cancel()
        stage.let_through()
    assert stage.given == [[BUSY], [0, 1, 2, 3]]
    assert [stage.values(callers.answers[number]) for number in numbers] == [[0], [2], [3]]


# --- life and death


@pytest.mark.parametrize("cancel", [False, True], ids=["drain", "cancel"])
@pytest.mark.parametrize("way", ["aclose", "shutdown"])
async def test_a_shutdown_ends_queued_calls_and_refuses_later_ones(
    stage: NumberStage, way: str, cancel: bool
) -> None:
    """batched 0.1.5: both hung."""
    stage.decorate(gated=True, batch_size=2)

    async def close() -> None:
        if way == "aclose":
            await stage.fn.aclose(cancel_futures=cancel)
        else:
            await anyio.to_thread.run_sync(lambda: stage.fn.shutdown(cancel_futures=cancel))

    async with stage.busy() as callers:
        queued = [await callers.call(stage.one(number)) for number in range(5)]
        queued.append(await callers.call(stage.many([5, 6])))
        async with anyio.create_task_group() as group:
            group.start_soon(close)
            if cancel:
                await stage.until(lambda: all(number in callers.answers for number in queued))
            stage.let_through(10)
    assert stage.values(callers.answers[0]) == [BUSY]
    answers = [callers.answers[number] for number in queued]
    if cancel:
        assert [type(answer) for answer in answers] == [batched.BatcherClosed] * 6
    else:
        assert [stage.values(answer) for answer in answers] == [[0], [1], [2], [3], [4], [5, 6]]
    with pytest.raises(batched.BatcherClosed):
        await stage.call(stage.one(7))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@payloads
def test_after_a_call_and_a_fork_parent_and_child_are_served(payload: type[NumberStage]) -> None:
    """batched 0.1.5: the call in the child hung."""
    done = python(
        f"""
        import os, signal, warnings
        # forking beside threads is what this is about
        warnings.simplefilter("ignore", DeprecationWarning)
        import anyio
        from number_stage import {payload.__name__} as NumberStage
        from stage import SCENARIOS

        async def answer(stage, number):
            return stage.values(await stage.call(stage.one(number)))

        for scenario in SCENARIOS:
            backend, options = scenario.backend
            def call(number):
                return anyio.run(answer, stage, number, backend=backend, backend_options=options)
            stage = NumberStage(scenario)
            stage.decorate()
            before = call(1)
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    signal.alarm(10)  # ends a child that hangs
                    code = 0 if call(2) == [2] and call(3) == [3] else 1
                finally:
                    os._exit(code)
            print(before, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), call(4))
            stage.fn.shutdown()
        """
    )
    assert done.stdout == "[1] 0 [4]\n" * len(SCENARIOS), done.stderr


@payloads
def test_one_loop_after_another_is_served(payload: type[NumberStage], scenario: Scenario) -> None:
    """batched 0.1.5: the second `asyncio.run` raised a RuntimeError about a different loop."""
    backend, options = scenario.backend
    stage = payload(scenario)
    stage.decorate(batch_size=4)

    async def main(first: int) -> None:
        async with stage.callers() as callers:
            for number in range(first, first + 6):
                await callers.call(stage.one(number))
        assert [stage.values(callers.answers[number]) for number in range(6)] == [
            [first + number] for number in range(6)
        ]

    for run in range(3):
        anyio.run(main, 10 * run, backend=backend, backend_options=options)
    stage.fn.shutdown()


def owners(stage: NumberStage, name: str) -> type:
    """A class with a batched method of the scenario's kind."""

    class Owner:
        @stage.decorator(name=name)  # type: ignore[untyped-decorator]  # whichever it is
        @stage.written
        def method(self, batch: Any) -> Any:
            return stage.output(stage.numbers(batch))

    return Owner


async def test_a_decorated_instance_that_is_dropped_is_collected_and_its_thread_ends(
    stage: NumberStage,
) -> None:
    """batched 0.1.5: of 20 dropped instances, 20 were alive, and 21 threads."""

    def workers() -> int:
        return sum(thread.name.startswith("batched-dropped-") for thread in threading.enumerate())

    async def used() -> list[weakref.ref[Any]]:
        kind = owners(stage, "dropped")
        instances = [kind() for _ in range(20)]
        for number, instance in enumerate(instances):
            assert stage.values(await stage.call(stage.one(number), on=instance.method)) == [number]
        assert workers() == (0 if stage.kind == "aio-coroutine" else 20)
        return list(map(weakref.ref, instances))

    refs = await used()
    gc.collect()
    await stage.until(lambda: not any(ref() for ref in refs) and workers() == 0)


@pytest.mark.parametrize(
    "scenario",
    [scenario for scenario in SCENARIOS if scenario.loop == "asyncio"],
    ids=lambda scenario: f"{scenario.kind}",
)
async def test_threads_that_race_for_the_first_access_find_one_batcher(stage: NumberStage) -> None:
    """batched 0.1.5: they found more than one on 114 of 300 instances."""
    kind, racers, rounds = owners(stage, "raced"), 4, 50
    instances = [kind() for _ in range(rounds)]
    barrier = threading.Barrier(racers)
    found: list[list[Any]] = [[] for _ in instances]

    def race() -> None:
        for instance, methods in zip(instances, found, strict=True):
            barrier.wait(BOUND)
            methods.append(instance.method)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=race) for _ in range(racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
    finally:
        sys.setswitchinterval(interval)
    for instance, methods in zip(instances, found, strict=True):
        assert len(methods) == racers
        for method in methods:
            assert stage.values(await stage.call(stage.one(1), on=method)) == [1]
        assert instance.method.stats.calls == racers


@pytest.mark.once
@pytest.mark.skipif(sys.platform == "win32", reason="counts context switches")
def test_idle_batchers_do_not_wake_up() -> None:
    """batched 0.1.5: 50 idle ones woke up 10,600 times a second; with `timeout_ms=0` they kept a
    core at 100 %.
    """
    done = python(
        """
        import itertools, resource, sys, threading
        import anyio
        from number_stage import FeatureNumberStage, NumberStage
        from stage import SCENARIOS

        steps = itertools.count()  # of Python code, in all threads
        # of them: trio tosses a coin for the order of its tasks, and may turn the list round
        FEW = 10

        def note(*_):
            next(steps)

        threading.setprofile(note)
        sys.setprofile(note)

        async def quiet():
            # context switches and steps while nobody calls
            switches, before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, next(steps)
            await anyio.sleep(0.5)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            return after - switches, next(steps) - before

        async def main(scenarios):
            await quiet()  # what is imported or set up at first
            alone = await quiet()
            stages = []
            for scenario in scenarios:
                for number in range(24):  # three of each kind
                    stage = (NumberStage if number % 2 else FeatureNumberStage)(scenario)
                    flush = "window" if number // 4 % 2 else "auto"
                    stage.decorate(timeout_ms=0 if number // 2 % 2 else 5, flush=flush)
                    assert stage.values(await stage.call(stage.one(number))) == [number]
                    stages.append(stage)
            seen = []
            # what ends just now, and what else the machine does, may fall into the first ones
            while len(seen) < 8:
                seen.append(await quiet())
                allowed = [before + more for before, more in zip(alone, (0, FEW))]
                if all(beside <= most for beside, most in zip(seen[-1], allowed)):
                    print("still")
                    break
            else:
                print(f"alone {alone}, beside idle batchers {seen}")
            for stage in stages:
                await stage.close()

        for loop in ("asyncio", "uvloop", "trio"):
            scenarios = [scenario for scenario in SCENARIOS if scenario.loop == loop]
            backend, options = scenarios[0].backend
            anyio.run(main, scenarios, backend=backend, backend_options=options)
        """,
        timeout=50,
    )
    assert done.stdout == "still\n" * 3, done.stdout + done.stderr


# --- tensors


async def shared(stage: FeatureStage, *calls: dict[str, Any]) -> list[Any]:
    """What the calls, which wait together while the worker is busy, return."""
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        numbers = [await callers.call(features) for features in calls]
        stage.let_through()
    assert list(callers.answers[0]) == [DECOY]
    for number in numbers:
        if isinstance(callers.answers[number], Exception):
            raise callers.answers[number]
    return [callers.answers[number] for number in numbers]


@pytest.mark.parametrize("library", ["numpy", "torch"])
async def test_floats_that_are_padded_stay_the_numbers_they_were(
    tensors: FeatureStage, library: str
) -> None:
    """batched 0.1.5: the model saw float32 [.25, .75, 1.5] as int64 [0, 0, 1]."""
    module: Any = pytest.importorskip(library)
    make = module.array if library == "numpy" else module.tensor
    tensors.decorate(lambda features: features["x"], pad_token={"x": 0})
    results = await shared(
        tensors,
        {"x": make([[0.25, 0.75, 1.5]], dtype=module.float32)},
        {"x": make([[0.5, 0.125]], dtype=module.float32)},
    )
    assert tensors.seen[0]["x"].tolist() == [[0.25, 0.75, 1.5], [0.5, 0.125, 0.0]]
    assert [features["x"].dtype for features in tensors.seen] == [module.float32] * len(
        tensors.seen
    )
    assert [result.tolist() for result in results] == [[[0.25, 0.75, 1.5]], [[0.5, 0.125]]]
    assert [result.dtype for result in results] == [module.float32] * 2


@pytest.mark.parametrize("callers", [1, 2, 3])
async def test_a_tuple_of_two_heads_is_dealt_out_by_rows(
    tensors: FeatureStage, callers: int
) -> None:
    """batched 0.1.5: the heads were dealt out as rows."""
    tensors.decorate(
        lambda features: (features["ids"][:, 0], features["ids"] * numpy.ones((1, 4), int))
    )
    results = await shared(
        tensors, *({"ids": numpy.full((1, 1), number)} for number in range(callers))
    )
    assert len(tensors.seen) == 1
    for number, result in enumerate(results):
        assert type(result) is tuple
        first, second = result
        assert first.tolist() == [number]
        assert second.tolist() == [[number] * 4]


async def test_results_per_token_are_as_long_as_the_rows_of_their_caller(
    tensors: FeatureStage,
) -> None:
    """batched 0.1.5: of callers with 3 and 5 tokens, the first got 5 columns back."""
    tensors.decorate(lambda features: {"hidden": features["ids"][:, :, None] * numpy.ones(2, int)})
    results = await shared(
        tensors, {"ids": numpy.array([[1, 2, 3]])}, {"ids": numpy.array([[4, 5, 6, 7, 8]])}
    )
    assert tensors.seen[0]["ids"].tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    assert results[0]["hidden"].tolist() == [[[token] * 2 for token in (1, 2, 3)]]
    assert results[1]["hidden"].tolist() == [[[token] * 2 for token in (4, 5, 6, 7, 8)]]


async def test_a_feature_that_only_the_second_caller_has_reaches_the_function(
    tensors: FeatureStage,
) -> None:
    """batched 0.1.5: its `mask` was dropped in silence."""
    tensors.decorate(lambda features: features["ids"] * features.get("mask", 1))
    ids, mask = numpy.array([[1, 2, 3]]), numpy.array([[1, 1, 0]])
    results = await shared(tensors, {"ids": ids}, {"ids": ids, "mask": mask})
    assert [list(features) for features in tensors.seen] == [["ids"], ["ids", "mask"]]
    assert tensors.seen[1]["mask"].tolist() == mask.tolist()
    assert [result.tolist() for result in results] == [[[1, 2, 3]], [[1, 2, 0]]]
