"""Command bench: measures a function, and prints tables and a recommendation."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence

from rich.progress import Progress
from rich.table import Table

from ..display import cores, count, ms, new_console, new_table, progress_bars
from .advice import AT_ONCE, BatchTime, Way, choose_size, choose_way, fit, summarize
from .measuring import doublings, measure_loads, time_batches, ways_to_call
from .target import Target, load_target

THREADS, COROUTINES = 64, 256
"""Callers at once of a plain function and of a coroutine function, unless the user says."""


def bench(args: argparse.Namespace) -> int:
    """Print the speed of a batch function, and the settings that it should have. Return 0.

    Raises:
        argparse.ArgumentError: the function or the sample cannot be used, or the function raised.
    """
    console = new_console()
    with console.status(f"Importing {args.target}"):
        target = load_target(args.target, args.input, args.column)
    with progress_bars(console) as progress:
        times, batch_size, ways = asyncio.run(measure(target, args, progress))
    items = f"{count(len(target.items), 'item')} from {args.input.name}"
    console.print(f"{args.target}, {items}, {count(cores(), 'CPU core')}", style="bold")
    console.print(batch_table(times))
    console.print(f"{fit(times)}\n")
    alone, unbatched, _, *batched = ways
    # calls one by one, if the function cannot run several times at once
    compared = [unbatched if unbatched.rounds else alone, *filter(lambda way: way.rounds, batched)]
    chosen = choose_way(compared)
    console.print(way_table(batch_size, [way for way in ways if way.rounds], chosen))
    for way in ways:
        if way.error:
            console.print(way.error)
    if chosen.settings is not None and not args.batch_size:
        console.print(choose_size(times)[1])
    console.print(summarize(compared, chosen))
    console.print(target.suggestion(chosen.settings), style="bold")
    return 0


async def measure(
    target: Target, args: argparse.Namespace, progress: Progress
) -> tuple[list[BatchTime], int, list[Way]]:
    """Return the times of batches, a size, and the ways to call with it.

    Everything is measured on one event loop: a coroutine function may keep objects of its loop.
    """
    measured = await time_batches(target, doublings(args.max_batch_size), progress)
    times = [BatchTime(size, statistics.median(seconds)) for size, seconds in measured.items()]
    callers = args.concurrency or (COROUTINES if target.batched._function.coroutine else THREADS)
    batch_size = args.batch_size or choose_size(times)[0]
    ways = ways_to_call(target, callers, batch_size)
    await measure_loads(target, ways, args.seconds, progress)
    return times, batch_size, ways


def batch_table(times: list[BatchTime]) -> Table:
    """Return the median times of batches by size."""
    table = new_table(
        "Direct calls", "Batch\nsize", "A batch\nms", "An item\nms", "Items\na second"
    )
    for time in times:
        item = time.per_item
        table.add_row(f"{time.size:,}", ms(time.seconds), ms(item), f"{1 / item:,.0f}")
    return table


def way_table(batch_size: int, ways: Sequence[Way], chosen: Way) -> Table:
    """Return the rates and latencies of each way to call, from the round with its median rate."""
    title = f"Callers with one call at a time, batch_size={batch_size}"
    heads = ("Callers", "Batches\nat once", "Items\na second", "Lowest to\nhighest")
    table = new_table(title, *heads, "p50\nms", "p99\nms", "Mean\nbatch")
    for way in ways:
        calls, rates, how = way.median, [calls.rate for calls in way.rounds], "unbatched"
        if way.settings is not None:
            how = f"{way.settings[AT_ONCE]}{', length' * ('length' in way.settings)}"
        table.add_row(
            f"{way.callers:,}",
            how,
            f"{calls.rate:,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            ms(calls.percentile(50)),
            ms(calls.percentile(99)),
            f"{calls.mean_batch:.1f}",
            style="bold" if way is chosen else "",
        )
    return table
