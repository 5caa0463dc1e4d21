"""Command bench: measures a function, and prints tables and a recommendation."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import dataclass

from rich.progress import Progress
from rich.table import Table

from ..display import (
    cores,
    count,
    format_ratio,
    load_table,
    ms,
    new_console,
    new_table,
    progress_bars,
)
from ..load import Calls
from .advice import Advice, BatchTime, advise, fit
from .measuring import doublings, measure_load, time_batches
from .target import Target, load_target


@dataclass(frozen=True)
class Findings:
    """Measurements, and the advice that follows from them."""

    times: list[BatchTime]
    alone: Calls
    """Direct calls with one item each, one after another."""
    advice: Advice
    batch_size: int
    """Setting under load."""
    loads: list[Calls]
    """Calls by number of callers."""

    @property
    def best(self) -> Calls:
        """Load of the most items per second."""
        return max(self.loads, key=lambda each: each.rate)

    @property
    def gain(self) -> float:
        """Items per second at best, as a multiple of direct calls one by one."""
        return self.best.rate / self.alone.rate


def bench(args: argparse.Namespace) -> int:
    """Print the speed of a batch function, and the `batch_size` that it should have. Return 0.

    Raises:
        argparse.ArgumentError: the function or the sample cannot be used, or the function raised.
    """
    console = new_console()
    with console.status(f"Importing {args.target}"):
        target = load_target(args.target, args.input)
    with progress_bars(console) as progress:
        found = asyncio.run(measure(target, args, progress))
    items = f"{count(len(target.items), 'item')} from {args.input.name}"
    console.print(f"{args.target}, {items}, {count(cores(), 'CPU core')}", style="bold")
    console.print(batch_table(found))
    console.print(f"{fit(found.times)}\n")
    title = f"Callers with one call at a time, batch_size={found.batch_size}"
    loads = {f"{each.callers:,}": each for each in found.loads}
    console.print(load_table(title, "Items", {"one by one": found.alone, **loads}))
    console.print(summarize(found, coroutine=target.batched._function.coroutine))
    console.print(target.suggestion(found.advice.batch_size if found.gain > 1 else 1), style="bold")
    return 0


async def measure(target: Target, args: argparse.Namespace, progress: Progress) -> Findings:
    """Measure everything on one event loop: a coroutine function may keep objects of its loop."""
    measured = await time_batches(target, doublings(args.max_batch_size), progress)
    times = [BatchTime(size, statistics.median(seconds)) for size, seconds in measured.items()]
    advice = advise(times)
    batch_size = args.batch_size or advice.batch_size
    loads = [
        await measure_load(target, callers, batch_size, args.seconds)
        for callers in progress.track(
            doublings(args.concurrency), description=f"1 to {count(args.concurrency, 'caller')}"
        )
    ]
    return Findings(times, Calls(1, sum(measured[1]), measured[1]), advice, batch_size, loads)


def summarize(found: Findings, *, coroutine: bool) -> str:
    """Return sentences about the recommended size, and about the gain of batching under load."""
    rate, callers = f"{found.best.rate:,.0f} items a second", count(found.best.callers, "caller")
    if found.gain <= 1:
        best = f"at best {format_ratio(found.gain)}, {rate} with {callers}"
        worth = f"Through batched, calls are never faster than directly one by one: {best}."
        # the gain of a larger batch may be less than the cost of the calls
        return worth if found.advice.batch_size > 1 else f"{found.advice.reason}\n{worth}"
    more = f"{format_ratio(found.gain)} as many as directly one by one"
    unbatched = " Unbatched coroutines can run side by side, too: compare with that." * coroutine
    worth = f"With batch_size={found.batch_size} and {callers} it is {rate}, {more}.{unbatched}"
    return f"{found.advice.reason}\n{worth}"


def batch_table(found: Findings) -> Table:
    """Return the median times of batches by size."""
    table = new_table(
        "Direct calls", "Batch\nsize", "A batch\nms", "An item\nms", "Items\na second"
    )
    for time in found.times:
        table.add_row(
            f"{time.size:,}",
            ms(time.seconds),
            ms(time.per_item),
            f"{1 / time.per_item:,.0f}",
            style="bold" if time.size == found.advice.batch_size else "",
        )
    return table
