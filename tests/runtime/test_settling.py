"""Answers of requests that have ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

import batched
from batched._runtime.wakers import Future, wait
from stage import BOUND, held


def test_a_done_callback_may_raise_anything(caplog: pytest.LogCaptureFixture) -> None:
    gate, fn, running = held()
    futures = [running, *(fn.submit(number) for number in range(3))]

    def callback(_: object) -> None:
        raise SystemExit("from a callback")

    for future in futures[:2]:
        future.add_done_callback(callback)
    assert futures[1].cancel()
    assert concurrent.futures.wait([futures.pop(1)], timeout=0).done
    gate.opened.set()
    assert [future.result(BOUND) for future in futures] == ["running", 1, 2]
    assert fn(4) == 4
    assert caplog.text.count("callback of a future") == 2
    fn.shutdown()


def test_a_task_that_comes_to_a_done_future_is_woken() -> None:
    future: Future[int] = Future()
    future.set_result(7)

    async def come() -> bool:
        return await wait(future.new_waker(asyncio.get_running_loop()), BOUND)

    assert asyncio.run(come())


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_a_task_that_awaits_a_call_whose_preparation_ends_it_is_woken(end: str) -> None:
    gate = threading.Event()

    def prepare(item: int) -> int:
        assert gate.wait(BOUND)
        raise ValueError(item)

    fn = batched.dynamically(prepare=prepare)(sorted)

    async def main() -> None:
        future = fn.submit(1)
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        if end == "is cancelled":
            assert future.cancel()
        else:
            gate.set()
        error = ValueError if end == "fails" else concurrent.futures.CancelledError
        with pytest.raises(error):
            await asyncio.wait_for(waiting, BOUND)
        gate.set()

    asyncio.run(main())
