"""Thousands of objects with batched methods leave no object, batcher, worker or memory behind."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator

import anyio
import pytest

import batched
from stage import BOUND, wait_until

FIRST = 200
"""Instances before the first count, which fill the caches and cause the one warning."""
SLACK = 0.5
"""Blocks of memory per instance that may appear by chance. A leak is at least one block."""


class Owner:
    @batched.dynamically(name="passing")
    def in_a_thread(self, items: list[int]) -> list[int]:
        return items

    @batched.aio.dynamically(name="passing")
    async def on_the_loop(self, items: list[int]) -> list[int]:
        return items

    @batched.aio.dynamically(name="passing")
    def off_the_loop(self, items: list[int]) -> list[int]:
        return items


def workers() -> int:
    return sum(thread.name.startswith("batched-passing-") for thread in threading.enumerate())


def blocks() -> int:
    """Return the number of blocks of memory that Python holds."""
    gc.collect()
    return sys.getallocatedblocks()


many = pytest.mark.parametrize(
    "instances", [100, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)


@pytest.fixture(autouse=True)
def no_tracing_of_threads() -> Iterator[None]:
    """Stop coverage, which keeps memory for each thread that it traces."""
    tracer = threading.gettrace()
    threading.settrace(None)
    yield
    threading.settrace(tracer)


@many
def test_instances_leave_nothing_behind(instances: int) -> None:
    def use(count: int) -> int:
        for i in range(count):
            assert Owner().in_a_thread(i) == i
        wait_until(lambda: workers() == 0)
        return blocks()

    held = use(FIRST)
    assert use(instances) - held < SLACK * instances


@many
def test_instances_leave_nothing_behind_on_a_loop_that_goes_on(instances: int) -> None:
    async def use(count: int) -> int:
        for i in range(count):
            owner = Owner()
            assert await owner.on_the_loop(i) == i
            if not i % 10:
                assert await owner.off_the_loop(i) == i
        with anyio.fail_after(BOUND):
            while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110  # workers that are about to end
                await asyncio.sleep(0)
        wait_until(lambda: workers() == 0)
        return blocks()

    async def main() -> None:
        held = await use(FIRST)
        assert await use(instances) - held < SLACK * instances

    asyncio.run(main())
