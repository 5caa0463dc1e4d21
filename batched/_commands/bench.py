"""Command bench: a batch function by size of the batch, and under callers alone and batched."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import AsyncBatched, Batched, BatchedError, BatchedMethod
from .._function.batched import BatchedCallable, parts_of, preparation_of
from .._function.function import BatchFunction
from .._function.settings import Options
from .display import cores, count, format_ratio, load_table, ms, new_console, new_table
from .load import Calls, make_calls
from .reference import argument_error, describe, import_attribute
from .sample import read_items

THREADS: Final = 64
"""Callers of a plain function, unless the user says."""
COROUTINES: Final = 256
"""Callers of a coroutine function, unless the user says."""
ROUNDS = 5
"""Turns of each size and of each way to call, because a machine may be slower for a while."""
SIZE_TURN = 0.15
"""Time after which no more batches of a size begin in a turn (s)."""
CALLERS_TURN = 0.6
"""Time after which no more calls begin in a turn (s)."""
LEAST: Final = 3
"""Least calls of each caller of a batched function in a turn."""
WARM_UP: Final = 0.3
"""Share of the calls of a turn that do not count: callers need a moment to come together."""
NEAR_BEST: Final = 1.1
"""Ratio up to which another time, or rate, is as good as the best. Smaller batches are preferred,
because their callers wait less, and no decorator to one.
"""
SEED: Final = 0
"""Seed of the order of the items. In the order of a file sorted by length, small batches would have
short items only.
"""

Target: TypeAlias = Batched[Any, Any, ...] | AsyncBatched[Any, Any, ...]
Round: TypeAlias = tuple[Calls, Calls]
"""Calls unbatched, and batched."""


def bench(args: argparse.Namespace) -> int:
    """Print the speed of a batch function, and the `batch_size` that it should have. Return 0.

    Raises:
        argparse.ArgumentError: the function or the sample cannot be used, or the function raised.
    """
    items = [*read_items(args.input, args.column).values()]
    random.Random(SEED).shuffle(items)
    found = import_attribute(args.target)
    fn = as_batched(found, args.target)
    console = new_console()
    number = f"{count(len(items), 'item')} from {args.input.name}"
    console.print(f"{args.target}, {number}, {count(cores(), 'CPU core')}", style="bold")
    # all on one loop: a coroutine function may keep objects of its loop
    asyncio.run(_measure(fn, items, fn is found, args, console))
    return 0


async def _measure(
    fn: Target, items: list[Any], decorated: bool, args: argparse.Namespace, console: Console
) -> None:
    with Progress(console=console, disable=not console.is_terminal) as progress:
        times = await time_batches(fn, items, doublings(args.max_batch_size), args.target, progress)
        console.print(size_table(times))
        size = choose_size(times)
        sized = fn.with_options(
            batch_size=size, max_queue_size=None, on_full="wait", queue_timeout_ms=None
        )
        callers = args.concurrency or (COROUTINES if fn._function.coroutine else THREADS)
        rounds = await compare(sized, items, callers, args.target, progress)
    middle = rounds[len(rounds) // 2]
    title = f"{count(callers, 'caller')} with one call at a time, batch_size={size}"
    console.print(
        load_table(title, "Items", dict(zip(("unbatched", "batched"), middle, strict=True)))
    )
    if size == args.max_batch_size:
        console.print(f"Larger batches than {size} may gain more: try --max-batch-size {4 * size}.")
    console.print(advise(fn, decorated, size, callers, rounds), style="bold")


def as_batched(found: object, reference: str) -> Target:
    """Return the batched function that the user named, decorated if it is not.

    Raises:
        argparse.ArgumentError: it cannot be batched, or measured.
    """
    if isinstance(found, BatchedMethod):
        found = found.function.__wrapped__
    if isinstance(found, BatchedCallable):
        fn: Any = found
    else:
        try:
            function = BatchFunction.of(found, Options())
        except TypeError as error:
            reason = str(error).partition(";")[0]
            raise argument_error(f"cannot batch {reference}: {reason}") from error
        if function.kind == "method":
            raise argument_error(
                f"{reference} is a method; name that of an instance, as module:instance.method"
            )
        fn = (AsyncBatched if function.coroutine else Batched)(function)
    options = fn._function.options
    others = options.features or options.steps or options.unpack or fn._function.preparation
    if others or "batch_size" not in fn.options:  # which a client of a model process has not
        raise argument_error(
            f"{reference} is no function of one list in this process, which bench measures"
        )
    return fn  # type: ignore[no-any-return]


def doublings(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and at last `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


async def time_batches(
    fn: Target, items: list[Any], sizes: list[int], reference: str, progress: Progress
) -> dict[int, float]:
    """Return the median time of a batch from call to results (s), by size.

    The first batch of each size does not count.
    """
    batched = fn.with_options(
        batch_size=sizes[-1],
        max_queue_size=None,
        on_full="wait",
        queue_timeout_ms=None,
        flush="eager",
        isolate_errors=False,
        on_oom="raise",
        dedupe=False,
        length=None,  # it might cut a batch short, as might the next
        max_batch_tokens=None,
    )
    batches = {size: cycle(items) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}

    async def run_batch(size: int) -> float:
        batch = [*islice(batches[size], size)]
        began = time.perf_counter()
        with _reporting(reference, f"given a batch of {size}"):
            await batched.acall(batch)
        finish_on_gpu()
        return time.perf_counter() - began

    try:
        for size in sizes:
            await run_batch(size)
        for _ in progress.track(range(ROUNDS), description=f"batches of 1 to {sizes[-1]}"):
            for size in sizes:
                end = time.perf_counter() + SIZE_TURN
                times[size].append(await run_batch(size))
                while time.perf_counter() < end:
                    times[size].append(await run_batch(size))
    finally:
        await batched.aclose(cancel_futures=True)
    return {size: statistics.median(found) for size, found in times.items()}


async def compare(
    fn: Target, items: list[Any], callers: int, reference: str, progress: Progress
) -> list[Round]:
    """Return rounds, in which unbatched and batched callers take turns, from the least gain up.

    The first round does not count. If the function does not bear several calls at once, one caller
    alone makes unbatched calls.
    """
    single, alone_callers = alone(fn), callers
    inputs = cycle(items)
    arguments = cycle([[item] if isinstance(item, list) else item for item in items])
    rounds: list[Round] = []

    async def take_turn(call: Any, given: Iterator[Any], number: int, least: int) -> Calls:
        until = time.perf_counter() + CALLERS_TURN
        return await make_calls(
            call, given, number, finish_on_gpu, until=until, least=least, warm_up=WARM_UP
        )

    try:
        for _ in progress.track(range(1 + ROUNDS), description=count(callers, "caller")):
            with _reporting(reference, f"called by {count(alone_callers, 'caller')}"):
                try:
                    unbatched = await take_turn(single, inputs, alone_callers, 0)
                except Exception as error:
                    if alone_callers == 1:
                        raise
                    progress.console.print(
                        f"{reference} raised {describe(error)}, called by {callers} callers at "
                        "once; one caller makes the unbatched calls"
                    )
                    alone_callers = 1
                    unbatched = await take_turn(single, inputs, 1, 0)
                batched = await take_turn(fn, arguments, callers, LEAST * callers)
            rounds.append((unbatched, batched))
    finally:
        await fn.aclose(cancel_futures=True)
    return sorted(rounds[1:], key=gain)


def alone(fn: Target) -> Callable[[Any], Any]:
    """Return a function that calls the undecorated function with one item."""
    function, owner, *_ = parts_of(fn)
    func = function.func if owner is None else functools.partial(function.func, owner)
    prepare = preparation_of(fn) or (lambda item: item)

    def call(item: Any) -> Any:
        return func([prepare(item)])

    async def acall(item: Any) -> Any:
        return await func([prepare(item)])

    return acall if function.coroutine else call


def finish_on_gpu(*_: object) -> None:
    """Wait until the GPU has done all submitted work, which belongs to the call."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _reporting(reference: str, when: str) -> Iterator[None]:
    """Raise an error of the function as an error of the command line, with the time `when`."""
    try:
        yield
    except BatchedError:  # its message names the function
        raise
    except Exception as error:
        raise argument_error(f"{reference} raised {describe(error)}, {when}") from error


def choose_size(times: dict[int, float]) -> int:
    """Return the smallest size above 1 whose time per item is nearly the best."""
    per_item = {size: seconds / size for size, seconds in times.items() if size > 1}
    best = min(per_item.values())
    return next(size for size, seconds in per_item.items() if seconds <= NEAR_BEST * best)


def gain(calls: Round) -> float:
    """Return the rate of batched calls, divided by that of unbatched calls."""
    unbatched, batched = calls
    return batched.rate / unbatched.rate


def size_table(times: dict[int, float]) -> Table:
    """Return the times of batches by size."""
    table = new_table("Batches", "Batch\nsize", "A batch\nms", "An item\nms", "Items\na second")
    for size, seconds in times.items():
        item = seconds / size
        table.add_row(f"{size:,}", ms(seconds), ms(item), f"{1 / item:,.0f}")
    return table


def advise(fn: Target, decorated: bool, size: int, callers: int, rounds: list[Round]) -> str:
    """Return a comparison of the rates, and the decorator to write; rounds ascend by their gain.

    Batching is recommended if it gains in every round, and a tenth or more in most.
    """
    low, middle, high = [gain(rounds[at]) for at in (0, len(rounds) // 2, -1)]
    text = (
        f"{count(callers, 'caller')} made {format_ratio(middle)} as many items batched as "
        f"unbatched ({format_ratio(low)} to {format_ratio(high)} in {len(rounds)} rounds).\n"
    )
    if low <= 1 or middle < NEAR_BEST:
        return f"{text}Batching may not be worth it."
    if decorated:
        return f"{text}In its decorator: batch_size={size} (now {fn.options['batch_size']})"
    where = "batched.aio" if fn._function.coroutine else "batched"
    return f"{text}Decorator: @{where}.dynamically(batch_size={size})"
