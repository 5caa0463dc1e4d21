"""Workers that cannot start, workers that fail, and loops that end before an answer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trio

import batched
from batched._core.request import Batch, Request
from batched._execution.attempts import Outcomes
from batched._runtime.async_backend import is_over
from batched._runtime.event_loop import EventLoopRuntime
from batched._runtime.thread import ThreadRuntime
from stage import BOUND, Gate, echo_coroutine, held, refuse_thread, wait_until


def test_one_worker_does_the_work_of_two_where_no_second_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, fn, running = held(max_concurrent_batches=2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        others = [fn.submit(i) for i in (1, 2)]
    gate.opened.set()
    assert [future.result(BOUND) for future in (running, *others)] == ["running", 1, 2]
    fn.shutdown()


def test_a_worker_that_could_not_be_started_is_started_after_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_worker_that_fails_beside_other_workers_leaves_a_batcher_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates = {name: threading.Event() for name in ("fails", "runs on")}

    @batched.dynamically(name="crew", batch_size=1, max_concurrent_batches=3)
    def fn(items: list[str]) -> list[str]:
        if items[0] in gates:
            assert gates[items[0]].wait(BOUND)
        return items

    assert [fn.submit(name).result(BOUND) for name in "abc"] == ["a", "b", "c"]
    finish = ThreadRuntime.finish

    def fail(runtime: ThreadRuntime, batch: Batch, outcomes: Outcomes) -> None:
        if batch.slices[0][0].items == "fails":
            raise MemoryError("here")
        finish(runtime, batch, outcomes)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadRuntime, "finish", fail)
        fails, runs_on = fn.submit("fails"), fn.submit("runs on")
        wait_until(lambda: fn.stats.in_flight == 2)
        gates["fails"].set()
        for future in (fails, runs_on):
            assert isinstance(future.exception(BOUND), batched.BatcherClosed)
        gates["runs on"].set()
        assert fn(["still", "served"]) == ["still", "served"]
    fn.shutdown()
    wait_until(
        lambda: not any(thread.name.startswith("batched-crew-") for thread in threading.enumerate())
    )


@pytest.mark.parametrize(
    "run", [asyncio.run, lambda main: trio.run(lambda: main)], ids=["asyncio", "trio"]
)
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


def test_a_signal_handler_that_raises_in_the_worker_ends_the_loop_and_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_list_whose_answer_cannot_be_made_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
