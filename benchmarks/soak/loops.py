"""Episodes of a soak about event loops that end with calls pending."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import random
from collections.abc import Iterable
from typing import Any

import anyio
import trio
import uvloop

from soak.books import Call, Report
from soak.callers import BOUND, Caller
from soak.episodes import bounded, concluded
from soak.subject import Subject
from soak.tasks import LOOPS


# as every episode
def loops_end(rng: random.Random, name: str, calls: int) -> Report:
    """End loops with pending calls in several ways. The calls end, and the next loop is served."""
    subject = Subject(rng, name, features=False)
    subject.books.exact = False
    for _ in range(3):
        caller = Caller(subject, rng, 0.0)
        ending = rng.choice([_left, _closed, _closed, _stopped, _trio_left])
        subject.gate.clear()
        if not bounded(
            subject.books, f"{ending.__name__} of {subject}", functools.partial(ending, caller)
        ):
            break
        bounded(
            subject.books,
            f"after {ending.__name__} of {subject}",
            functools.partial(_serves, caller),
        )
    return concluded(subject)


def _pending(caller: Caller) -> tuple[list[tuple[Call, Any]], list[tuple[Call, Any]]]:
    """Return pending futures and coroutines, which have no answer while the gate is shut."""
    caller.books.turns += 1  # the calls may end because the batcher was closed
    held = caller.new(tagged=False)
    caller.subject.held.add(held.items.start)
    rest = [caller.new(tagged=False) for _ in range(caller.rng.randint(0, 20))]
    submitted = [(call, caller.submit(call)) for call in (held, *rest)]
    # a full queue may have refused calls
    futures = [(call, future) for call, future in submitted if future is not None]
    fn = caller.subject.fn
    calls = [caller.new(tagged=False) for _ in range(caller.rng.randint(0, 5))]
    waiting = [
        (call, caller.called(call, fn.acall if caller.subject.kind == "threads" else fn))
        for call in calls
    ]
    return futures, waiting


async def _await_on_asyncio(caller: Caller, call: Call, awaitable: Any) -> None:
    try:
        answer = await awaitable
    except asyncio.CancelledError:
        caller.books.abandoned(call)
        raise
    except GeneratorExit:  # the loop is collected; its closer enters the call
        raise
    except BaseException as error:
        caller.failed(call, error)
    else:
        caller.answered(call, answer)


async def _begun(caller: Caller, tasks: dict[asyncio.Task[None], Call]) -> list[tuple[Call, Any]]:
    """Make pending calls in `tasks` on this loop, of batches that run or wait. Return futures."""
    futures, waiting = _pending(caller)
    tasks.update(
        {asyncio.ensure_future(_await_on_asyncio(caller, *each)): each[0] for each in waiting}
    )
    for _ in range(caller.rng.choice([1, 3, 5])):  # tasks begin in the first turn
        await asyncio.sleep(0)
    return futures


def _left(caller: Caller) -> None:
    """End a loop by `asyncio.run`, which cancels the tasks that are left."""
    caller.faults.injected.append("loop left with calls pending")
    run = caller.rng.choice([asyncio.run, uvloop.run])
    _settled(caller, run(_begun(caller, {})))


def _new_loop(caller: Caller) -> asyncio.AbstractEventLoop:
    loop = caller.rng.choice([asyncio.new_event_loop, uvloop.new_event_loop])()
    loop.set_exception_handler(lambda *_: None)  # asyncio reports pending tasks there
    return loop


def _closed(caller: Caller) -> None:
    """Close a loop without cancelling its tasks."""
    caller.faults.injected.append("loop closed with calls pending")
    loop = _new_loop(caller)
    tasks: dict[asyncio.Task[None], Call] = {}
    futures = loop.run_until_complete(_begun(caller, tasks))
    loop.close()
    for call in [call for task, call in tasks.items() if not task.done()]:
        caller.books.abandoned(call)
    del loop
    tasks.clear()
    gc.collect()  # ends the tasks
    _settled(caller, futures)


def _stopped(caller: Caller) -> None:
    """Stop a loop for ever. A shutdown must not wait for it."""
    caller.faults.injected.append("loop stopped with calls pending")
    loop = _new_loop(caller)
    tasks: dict[asyncio.Task[None], Call] = {}
    try:
        futures = loop.run_until_complete(_begun(caller, tasks))
        if not caller.subject.coroutine:
            caller.subject.gate.set()  # with a shut gate the shutdown would wait for ever
        caller.subject.fn.shutdown()
        caller.subject.fn.__enter__()
        _settled(caller, futures)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(_all_done(tasks))
        loop.close()


async def _all_done(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _trio_left(caller: Caller) -> None:
    """End a loop by `trio.run`, with the calls of its tasks cancelled."""
    caller.faults.injected.append("trio loop left with calls pending")
    futures: list[tuple[Call, Any]] = []

    async def one(call: Call, awaitable: Any) -> None:
        try:
            answer = await awaitable
        except trio.Cancelled:
            caller.books.abandoned(call)
            raise
        except BaseException as error:
            caller.failed(call, error)
        else:
            caller.answered(call, answer)

    async def main() -> None:
        pending, waiting = _pending(caller)
        futures.extend(pending)
        async with trio.open_nursery() as nursery:
            for each in waiting:
                nursery.start_soon(one, *each)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    trio.run(main)
    _settled(caller, futures)


def _settled(caller: Caller, futures: list[tuple[Call, Any]]) -> None:
    """Check that every future of an ended loop has ended.

    A plain function answers its calls, because its threads go on.
    """
    caller.subject.gate.set()
    for call, future in futures:
        try:
            future.exception(BOUND)
        except concurrent.futures.CancelledError:
            pass
        caller.enter(call, future)
    caller.books.turns += 1


def _serves(caller: Caller) -> None:
    """Make calls on a new loop, which all get answers."""
    loop = caller.rng.choice(list(LOOPS))

    async def main() -> None:
        fn = caller.subject.fn
        for _ in range(5):
            call = caller.new()
            try:
                answer = await caller.called(
                    call, fn.acall if caller.subject.kind == "threads" else fn
                )
            except BaseException as error:
                caller.failed(call, error)
            else:
                caller.answered(call, answer)

    anyio.run(main, **LOOPS[loop])
