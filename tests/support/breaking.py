"""Breaks in on the library wherever a signal, or a failing allocation, can: `python breaking.py
PLACE [setting=value ...]`.

The interpreter looks for signals when a Python function begins and when one written in C has
returned. At each of these moments, one after another, an exception is raised in the library once;
then nothing breaks in any more, and who is left waiting is printed. A program of its own, since it
needs the profile functions of all threads.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import faulthandler
import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import batched
from batched._runtime import thread, wakers

LIBRARY = str(Path(batched.__file__).parent)
UNREACHED: set[CodeType] = {
    wakers._wake_each.__code__,
    thread._work.__code__,
    thread._call.__code__,
}
"""What nobody can answer for if it does not even begin: a loop forgets such a callback, and threads
handle no signals.
"""
PATIENCE = 10.0
"""Seconds after which a wait counts as a hang."""


class Break(KeyboardInterrupt):
    """What a signal handler raises."""


class Breaking:
    """Counts the moments, and raises at one of them."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._moments = itertools.count(1)
        self.where = ""  # it raised
        self.moments = 0  # so far
        self.on = True

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if (
            not self.on
            or event not in ("call", "c_return")
            or not code.co_filename.startswith(LIBRARY)
        ):
            return
        if event == "call" and code in UNREACHED:
            return
        self.moments = moment = next(self._moments)
        if moment == self._at:
            place = f"{code.co_filename[len(LIBRARY) + 1 :]}:{frame.f_lineno}, {code.co_name}"
            self.where = f"{place}, {event} {getattr(arg, '__name__', '')}"
            raise Break


def _plain(items: list[int]) -> list[Any]:
    return [ValueError(f"{item}") if item == 3 else item for item in items]


async def _coroutine(items: list[int]) -> list[Any]:
    await asyncio.sleep(0)
    return _plain(items)


def _decorated(decorator: Any, function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return decorator(**{"batch_size": 3, "max_queue_size": 5, **settings})(function)


def _attempt(function: Callable[[], Any], breaking: Breaking) -> Any:
    """Return the result of `function`, which is interrupted, or None if it raises."""
    try:
        sys.setprofile(breaking)
        try:
            return function()
        finally:
            sys.setprofile(None)
    except (Exception, Break, concurrent.futures.CancelledError, asyncio.CancelledError):
        return None


def _problems(fn: Any, futures: list[Any], threads: list[threading.Thread]) -> list[str]:
    """Return the faults that are left after the interruptions."""
    found = []
    for each in threads:
        each.join(PATIENCE)
        if each.is_alive():
            found.append("a thread is blocked")
    if concurrent.futures.wait(futures, PATIENCE).not_done:
        found.append("callers wait for ever")
    served: list[Any] = []

    def use() -> None:
        with fn:
            for _ in range(2):  # the first may be told that a worker failed just now
                try:
                    served.append(fn(5))
                except batched.BatcherClosed:
                    served.append(None)

    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(PATIENCE)
    if served[1:] != [5]:
        found.append("the next call is not served")
    if user.is_alive():
        found.append("shutdown hangs")
    return found + _miscounted(fn)


def _miscounted(fn: Any) -> list[str]:
    left = (fn.stats.queue_size, fn.stats.blocked, fn.stats.in_flight)
    return [f"counted as waiting, blocked and in flight: {left}"] if any(left) else []


def callers(breaking: Breaking, **settings: Any) -> list[str]:
    """In the thread that calls, submits, cancels, maps, closes and opens, while others call too."""
    fn = _decorated(batched.dynamically, _plain, settings)
    futures = [fn.submit(item) for item in range(3)]

    def crowd() -> None:
        try:
            for item in range(4):
                futures.append(fn.submit(10 + item))
        except batched.BatcherClosed:
            pass

    threads = [threading.Thread(target=crowd, daemon=True) for _ in range(2)]
    for each in threads:
        each.start()
    attempt = functools.partial(_attempt, breaking=breaking)
    attempt(lambda: fn(6))
    attempt(lambda: fn([1, 2, 3, 4]))
    for then in (
        lambda future: future.cancel(),
        lambda future: future.result(),
        lambda _: list(fn.map(range(4))),
    ):
        future = attempt(lambda: fn.submit(7))
        if future is not None:
            futures.append(future)
            attempt(functools.partial(then, future))
    attempt(lambda: fn.stats.avg_batch_size)
    attempt(lambda: fn.shutdown(wait=False, cancel_futures=True))
    attempt(fn.__enter__)
    return _problems(fn, futures, threads)


def workers(breaking: Breaking, **settings: Any) -> list[str]:
    """In the threads that run batches."""
    threading.setprofile(breaking)
    fn = _decorated(batched.dynamically, _plain, settings)
    futures: list[Any] = []

    def crowd(first: int) -> None:
        sys.setprofile(None)
        futures.extend(fn.submit(first + item) for item in range(4))

    threads = [threading.Thread(target=crowd, args=(first,), daemon=True) for first in (0, 10)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    concurrent.futures.wait(futures, PATIENCE)
    breaking.on = False
    threading.setprofile(None)
    return _problems(fn, futures, threads)


def loop(function: Callable[..., Any], breaking: Breaking, **settings: Any) -> list[str]:
    """In the thread of an event loop that goes on afterwards: callers, workers of coroutine
    functions, and callbacks.
    """
    fn = _decorated(batched.aio.dynamically, function, settings)
    tasks: list[Any] = []
    futures: list[Any] = []
    found = []

    async def told() -> None:
        pending = [*tasks, *(asyncio.wrap_future(future) for future in futures)]
        if (await asyncio.wait(pending, timeout=PATIENCE))[1]:
            found.append("callers wait for ever")

    async def calling() -> None:
        tasks.extend(asyncio.ensure_future(fn(item)) for item in (0, 1, [2, 3, 4, 5], 6, 7, [8]))
        await asyncio.sleep(0)
        futures.append(fn.submit(9))
        futures.append(fn.submit(10))
        tasks[4].cancel()
        futures[0].cancel()
        await asyncio.sleep(0)
        async for _ in fn.map(range(3)):
            pass
        await asyncio.wait(tasks, timeout=PATIENCE)
        futures.extend([fn.submit(item) for item in range(11, 15)])
        for future in futures[:-4:-1]:  # most of those that wait, behind one that stays
            future.cancel()

    async def use() -> None:
        served = []
        for _ in range(2):
            try:
                served.append(await asyncio.wait_for(fn(5), PATIENCE))
            except (TimeoutError, batched.BatcherClosed):  # as above
                served.append(None)
        if served[1] != 5:
            found.append("the next call is not served")
        try:
            await asyncio.wait_for(fn.aclose(), PATIENCE)
        except TimeoutError:
            found.append("aclose hangs")

    running = asyncio.new_event_loop()
    running.set_exception_handler(lambda *_: None)
    task = running.create_task(calling())
    while not task.done():  # the loop stops at a KeyboardInterrupt, and goes on
        _attempt(lambda: running.run_until_complete(task), breaking)
    breaking.on = False
    running.stop()
    running.run_forever()  # once: that task may have stopped it just when something broke in
    for coroutine in (told(), use()):
        running.run_until_complete(coroutine)
    for each in (task, *tasks):
        if not each.done():
            each.cancel()
        elif not each.cancelled():
            each.exception()
    running.run_until_complete(running.shutdown_asyncgens())
    running.close()
    return found + _miscounted(fn)


PLACES: dict[str, Callable[..., list[str]]] = {
    "callers": callers,
    "workers": workers,
    "loop": functools.partial(loop, _plain),
    "loop-coroutine": functools.partial(loop, _coroutine),
}


def main() -> None:
    place = PLACES[sys.argv[1]]
    settings = {
        name: ast.literal_eval(value)
        for name, _, value in (setting.partition("=") for setting in sys.argv[2:])
    }
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None
    sys.unraisablehook = lambda _: None
    for moment in itertools.count(1):
        faulthandler.dump_traceback_later(20 * PATIENCE, exit=True)
        breaking = Breaking(moment)
        found = place(breaking, **settings)
        if found:
            print(f"{moment}: {breaking.where}: {', '.join(found)}", flush=True)
        if breaking.moments < moment:  # the end was reached before
            print(f"{moment} moments", flush=True)
            os._exit(0)  # threads may be left that would be waited for


if __name__ == "__main__":
    main()
