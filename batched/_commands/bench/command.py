"""The command: measures, says what it found, and draws it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress
from rich.table import Table

from ..display import (
    add_bar,
    check_writable,
    cores,
    new_console,
    new_table,
    progress_bars,
    save,
)
from ..load import Calls
from .advice import Advice, Fit, advise, fit, format_ratio, ms
from .measuring import ROUNDS, Load, Timing, doublings, measure_load, time_batches
from .picture import draw
from .target import Target, load_target


class Plan(NamedTuple):
    """Extent of the measurements."""

    max_batch_size: int
    """Items of the largest batch, at least 2."""
    batch_size: int | None
    """Setting under load; None is the recommended one."""
    concurrency: int
    """Most callers."""
    seconds: float
    """Time for each number of callers."""


class Findings(NamedTuple):
    """Measurements, and what follows from them."""

    timings: list[Timing]
    fit: Fit
    advice: Advice
    batch_size: int  # under load
    loads: list[Load]

    @property
    def best(self) -> Load:
        """Load of the most items per second."""
        return max(self.loads, key=lambda each: each.rate)

    @property
    def gain(self) -> float:
        """Items per second at best, as a multiple of those one by one."""
        return self.best.rate / self.timings[0].rate


def bench(reference: str, sample: Path, *, plan: Plan, output: Path, began: float) -> int:
    """Shows how fast a batch function is, and what `batch_size` it should have; returns 0. `began`
    is of `perf_counter`.

    Raises:
        argparse.ArgumentError: the function or the sample cannot be used, or the function raised.
    """
    check_writable(output)
    console = new_console()
    with console.status(f"Importing {reference}"):
        target = load_target(reference, sample)
    with progress_bars(console) as progress:
        found = asyncio.run(measure(target, plan, progress))
    items = f"{_plural(len(target.items), 'item')} from {sample.name}"
    title = f"{reference}, {items}, {_plural(cores(), 'CPU core')}"
    console.print(title, style="bold")
    console.print(batch_table(found))
    console.print(f"{found.fit}\n")
    loads: dict[str, Any] = {f"{each.callers:,}": each for each in found.loads}
    console.print(
        load_table(
            f"Callers with one call at a time, batch_size={found.batch_size}",
            "Items",
            {"one by one": found.timings[0], **loads},
        )
    )
    console.print(summarize(found, coroutine=target.batched._function.coroutine))
    console.print(target.suggestion(found.advice.batch_size if found.gain > 1 else 1), style="bold")
    figure = draw(found.timings, found.fit, found.advice, found.loads, found.batch_size, title)
    save(figure, output, console, began)
    return 0


async def measure(target: Target, plan: Plan, progress: Progress) -> Findings:
    """Measures everything, on one event loop: what a coroutine function keeps may belong to the one
    that it first ran on.
    """
    sizes, callers = doublings(plan.max_batch_size), doublings(plan.concurrency)
    timings = await time_batches(
        target, sizes, add_bar(progress, f"batches of 1 to {sizes[-1]}", ROUNDS)
    )
    medians = [timing.median for timing in timings]
    advice = advise(medians)
    batch_size = plan.batch_size or advice.batch_size
    advance = add_bar(progress, f"1 to {_plural(callers[-1], 'caller')}", len(callers))
    loads = []
    for number in callers:
        loads.append(await measure_load(target, number, batch_size, plan.seconds))
        advance()
    return Findings(timings, fit(medians), advice, batch_size, loads)


def summarize(found: Findings, *, coroutine: bool) -> str:
    """Sentences about the recommended size, and what batching is worth under load."""
    rate, callers = f"{found.best.rate:,.0f} items a second", _plural(found.best.callers, "caller")
    if found.gain <= 1:
        best = f"at best {format_ratio(found.gain)}, {rate} with {callers}"
        worth = f"Through batched, calls are never faster than directly one by one: {best}."
        # of a size at which a batch gains something, but less than calls cost
        return worth if found.advice.batch_size > 1 else f"{found.advice.reason}\n{worth}"
    more = f"{format_ratio(found.gain)} as many as directly one by one"
    beside = " Unbatched coroutines can run side by side, too: compare with that." * coroutine
    worth = f"With batch_size={found.batch_size} and {callers} it is {rate}, {more}.{beside}"
    return f"{found.advice.reason}\n{worth}"


def batch_table(found: Findings) -> Table:
    """Times of batches by size."""
    heads = "Batch\nsize", "Calls", "A batch\nms", "An item\nms", "Items\na second", "a + b n\nms"
    table = new_table("Direct calls", *heads)
    for timing in found.timings:
        median = timing.median
        table.add_row(
            f"{timing.size:,}",
            f"{len(timing.seconds):,}",
            ms(median.seconds),
            ms(median.per_item),
            f"{1 / median.per_item:,.0f}",
            ms(found.fit.at(timing.size)),
            style="bold" if timing.size == found.advice.batch_size else "",
        )
    return table


def load_table(title: str, items: str, *sections: Mapping[str, Timing | Calls[Any, Any]]) -> Table:
    """Rates and latencies of callers. The first row of a section is what its others are compared
    with.
    """
    rate = f"{items}\na second"
    table = new_table(title, "Callers", rate, "Speed-up", "p50\nms", "p99\nms", "Mean\nbatch")
    for section in sections:
        alone, *_ = section.values()
        for callers, calls in section.items():
            table.add_row(
                callers,
                f"{calls.rate:,.0f}",
                format_ratio(calls.rate / alone.rate),
                ms(calls.percentile(50)),
                ms(calls.percentile(99)),
                f"{calls.mean_batch:.1f}",
                style="" if calls is alone else "bold",
            )
        table.add_section()
    return table


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
