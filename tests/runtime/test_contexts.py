"""Code that serves many callers runs in no caller's context, where threads inherit contexts, too:
free-threaded builds do so, and others if `thread_inherit_context` is set.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched
from stage import BOUND

CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller")


def test_a_function_sees_no_context_of_the_caller_who_came_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def start_in_copy(thread: Any) -> None:
        run, context = thread.run, contextvars.copy_context()
        thread.run = lambda: context.run(run)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_in_copy)
    CALLER.set("the first one")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(CALLER.get).result(BOUND) == "the first one", "threads inherit contexts"
    fn: Any = batched.dynamically(lambda items: [CALLER.get(None) for _ in items])
    with fn:
        assert fn(1) is None
        CALLER.set("the next one")
        assert [fn.submit(1).result(BOUND) for _ in range(3)] == [None] * 3


def test_a_coroutine_function_sees_no_context_of_the_caller_who_came_first() -> None:
    async def see(items: list[int]) -> list[str | None]:
        return [CALLER.get(None) for _ in items]

    async def main() -> str | None:
        CALLER.set("the first one")
        async with batched.aio.dynamically(see) as fn:
            return await fn(1)

    assert asyncio.run(main()) is None
