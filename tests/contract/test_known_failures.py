"""What was seen to go wrong in other libraries and cannot here; each test says in its docstring
what happened there.

They are batched 0.1.5 of PyPI, Ray Serve 2.60, async-batcher 0.2.2 and service-streamer. All but
the last tests are for items and for rows of features alike.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

import batched
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
    [scenario for scenario in SCENARIOS if scenario.kind not in {"threads", "connect"}],
    ids=lambda scenario: f"{scenario.kind}-{scenario.loop}",
)


@pytest.fixture
def stage(numbers: NumberStage) -> NumberStage:
    return numbers


def refusing(number: int, error: Callable[[], BaseException]) -> Callable[[list[int]], list[int]]:
    def compute(numbers: list[int]) -> list[int]:
        if number in numbers:
            raise error()
        return numbers

    return compute


# --- what the function does


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
    stage.skip_if_connected("a model process refuses to connect to itself")
    backend, options = scenario.backend

    def plain(batch: Any) -> Any:
        if 1 in stage.numbers(batch):
            if stage.calls_from_threads:
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
        await stage.queued(0)
        assert stage.fn.stats.cancelled == 100
        await callers.call(stage.one(200))
        stage.let_through(2)
    assert stage.given == [[BUSY], [200]]


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


def owners(stage: NumberStage, name: str) -> type:
    """Return a class with a batched method of the scenario's kind."""

    class Owner:
        @stage.decorator(name=name)  # type: ignore[untyped-decorator]  # whichever it is
        @stage.written
        def method(self, batch: Any) -> Any:
            return stage.output(stage.numbers(batch))

    return Owner


@pytest.mark.parametrize(
    "scenario",
    [
        scenario
        for scenario in SCENARIOS
        # a connected function belongs to no instance
        if scenario.loop == "asyncio" and not scenario.kind.endswith("connect")
    ],
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
