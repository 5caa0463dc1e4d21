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
    """Loops that stop, are closed or are left with calls pending: these end, and the next loop is
    served.
    """
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
    """Futures that nobody will answer while the gate is shut, and coroutines; the batcher's turn is
    over for all of them.
    """
    caller.books.turns += 1  # they may be told that it was closed
    held = caller.new(tagged=False)
    caller.subject.held.add(held.items.start)
    rest = [caller.new(tagged=False) for _ in range(caller.rng.randint(0, 20))]
    submitted = [(call, caller.submit(call)) for call in (held, *rest)]
    # a full queue may have refused the others
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
    except GeneratorExit:  # whenever its loop is collected; who closes that one enters it
        raise
    except BaseException as error:
        caller.failed(call, error)
    else:
        caller.answered(call, answer)


async def _begun(caller: Caller, tasks: dict[asyncio.Task[None], Call]) -> list[tuple[Call, Any]]:
    """Has calls pending on this loop, in `tasks`, whose batch has begun or not; their futures."""
    futures, waiting = _pending(caller)
    tasks.update(
        {asyncio.ensure_future(_await_on_asyncio(caller, *each)): each[0] for each in waiting}
    )
    for _ in range(caller.rng.choice([1, 3, 5])):  # tasks begin in the first turn
        await asyncio.sleep(0)
    return futures


def _left(caller: Caller) -> None:
    """`asyncio.run` cancels what its main coroutine leaves behind."""
    caller.faults.injected.append("loop left with calls pending")
    run = caller.rng.choice([asyncio.run, uvloop.run])
    _settled(caller, run(_begun(caller, {})))


def _new_loop(caller: Caller) -> asyncio.AbstractEventLoop:
    loop = caller.rng.choice([asyncio.new_event_loop, uvloop.new_event_loop])()
    loop.set_exception_handler(lambda *_: None)  # to which pending tasks are reported
    return loop


def _closed(caller: Caller) -> None:
    """A loop that is closed without cancelling anything."""
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
    """A loop that stops for good, and a shutdown that must not wait for it."""
    caller.faults.injected.append("loop stopped with calls pending")
    loop = _new_loop(caller)
    tasks: dict[asyncio.Task[None], Call] = {}
    try:
        futures = loop.run_until_complete(_begun(caller, tasks))
        if not caller.subject.coroutine:
            caller.subject.gate.set()  # else a shutdown rightly waits for ever
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
    """`trio.run` ends with the calls of its tasks cancelled."""
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
    """Every future of a loop that has ended must be told so; those of a plain function are
    answered, for threads go on.
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
    """A new loop, on which everything is answered."""
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
