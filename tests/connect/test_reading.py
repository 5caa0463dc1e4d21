"""Callers of one process, who read answers for each other."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched
from batched.errors import ServerGone
from stage import BOUND, Turnstile, wait_until

Connect = Callable[..., Any]


class Interruption(Exception):
    """Exception of a signal handler."""


def test_a_caller_that_is_interrupted_lets_another_one_read(served: Connect) -> None:
    turnstile = Turnstile()
    call = served(batched.dynamically(batch_size=1)(turnstile))

    def interrupt(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None

    def other() -> Any:
        wait_until(lambda: turnstile.batches == [[1]])
        future = threads.submit(call, 2)
        wait_until(lambda: call.client_stats.sent == 2)
        signal.pthread_kill(main, signal.SIGUSR1)
        return future

    try:
        with ThreadPoolExecutor(2) as threads:
            later = threads.submit(other)
            with pytest.raises(Interruption):
                call(1)
            turnstile.let_through(2)
            error = later.result(BOUND).exception(BOUND)
            # if the handler broke in before the caller waited, the connection has ended
            assert error is None or isinstance(error, ServerGone)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_callbacks_of_futures_do_not_run_in_threads_of_callers(served: Connect) -> None:
    turnstile = Turnstile()
    call = served(batched.dynamically(batch_size=1)(turnstile))
    ran: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(call, 1)
        wait_until(lambda: turnstile.batches == [[1]])
        future = call.submit(2)
        future.add_done_callback(lambda _: ran.append(threading.get_ident()))
        turnstile.let_through(2)
        assert (reader.result(BOUND), future.result(BOUND)) == (1, 2)
        wait_until(lambda: bool(ran))
        assert ran != [threads.submit(threading.get_ident).result(BOUND)]


def test_threads_futures_and_tasks_get_their_own_answers_at_once(served: Connect) -> None:
    call = served(batched.dynamically(lambda items: items))

    async def gather(name: str) -> Any:
        return await asyncio.gather(*[call.acall((name, number)) for number in range(50)])

    def ask(name: str) -> None:
        for number in range(50):
            assert call((name, number)) == (name, number)
        futures = [call.submit((name, number)) for number in range(50)]
        assert [each.result(BOUND) for each in futures] == [(name, n) for n in range(50)]
        assert asyncio.run(gather(name)) == [(name, n) for n in range(50)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, "abcdefgh"))
    assert call.client_stats.calls == 8 * 150
