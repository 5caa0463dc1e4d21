"""Workers that cannot start, workers that fail, and loops that end before an answer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trio

import batched
from batched._core.request import Request
from batched._runtime.async_backend import is_over
from batched._runtime.event_loop import EventLoopRuntime
from stage import BOUND, Gate, echo_coroutine, refuse_thread


def test_a_worker_that_could_not_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    first, both = Gate(), threading.Barrier(2)

    @batched.dynamically(batch_size=1, max_concurrent_batches=2)
    def fn(items: list[int]) -> list[int]:
        if items[0] == 1:
            first(items)
        elif items[0]:
            both.wait(BOUND)  # the last two items run at once
        return items

    fn(0)
    with ThreadPoolExecutor(1) as caller:
        caller.submit(int).result()  # its thread has started
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_thread)
            answers = caller.submit(fn, [1, 2, 3])
            assert first.entered.wait(BOUND)
        first.opened.set()
        assert answers.result(BOUND) == [1, 2, 3]
    fn.shutdown()


@pytest.mark.parametrize("run", [asyncio.run, lambda main: trio.run(lambda: main)])
def test_a_failure_within_the_library_ends_its_calls_and_not_the_loop(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fn: Any = batched.aio.dynamically(name="broken")(echo_coroutine)

    def fail(*_: object) -> None:
        raise MemoryError("here")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(EventLoopRuntime, "finish", fail)
            with pytest.raises(batched.BatcherClosed, match="its worker failed"):
                await fn(1)
        assert await fn(2) == 2

    run(main())
    assert "the worker of broken failed" in caplog.text


def test_a_worker_that_is_cancelled_before_it_begins_ends_its_calls() -> None:
    fn: Any = batched.aio.dynamically(name="young")(echo_coroutine)

    async def main() -> None:
        call = asyncio.ensure_future(fn(1))
        await asyncio.sleep(0)
        (worker,) = [task for task in asyncio.all_tasks() if task.get_name() == "batched-young"]
        worker.cancel()
        with pytest.raises(batched.BatcherClosed, match="ended before it began"):
            await call
        assert await fn(2) == 2

    asyncio.run(main())


def test_a_signal_handler_that_raises_ends_loop_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    fn: Any = batched.aio.dynamically(echo_coroutine)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with asyncio.Runner() as runner:
        calls = []
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(EventLoopRuntime, "finish", interrupt)
            calls.append(runner.get_loop().create_task(fn(1)))
            runner.get_loop().run_until_complete(asyncio.wait(calls))
        with pytest.raises(batched.BatcherClosed, match="its worker failed"):
            runner.get_loop().run_until_complete(calls[0])


def test_a_list_whose_answer_is_lost_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = batched.dynamically(batch_size=2)(lambda items: items)

    def fail(ended: list[Request], *_: object) -> int:
        if ended:
            raise MemoryError("here")
        return 0

    with monkeypatch.context() as patch:
        patch.setattr("batched._runtime.runtime.complete", fail)
        with pytest.raises(batched.BatcherClosed, match="its answer was lost"):
            fn([1, 2, 3])
    fn.shutdown()


def test_an_answer_to_a_loop_that_is_closed_is_dropped() -> None:
    gate = Gate()
    fn = batched.dynamically(batch_size=1)(gate)
    loop = asyncio.new_event_loop()
    task = loop.create_task(fn.acall(1))
    loop.run_until_complete(asyncio.sleep(0))
    assert gate.entered.wait(BOUND)
    loop.close()
    gate.opened.set()
    assert fn(2) == 2
    fn.shutdown()
    # else asyncio logs it in a later test
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    assert is_over(loop)
