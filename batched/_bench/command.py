"""The command: measures, says what it found, and draws it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .._display import blank_table, check_writable, cores, progress_on
from .advice import Advice, Fit, advise, fit, fold, ms
from .measuring import ROUNDS, Load, Timing, batch_times, doublings, load
from .picture import draw
from .subject import Subject, subject


class Plan(NamedTuple):
    """What is to be measured."""

    max_batch_size: int
    """The largest batch, at least 2 items."""
    batch_size: int | None
    """Under load; None is the recommended one."""
    concurrency: int
    """Most callers."""
    seconds: float
    """For each number of callers."""


class Findings(NamedTuple):
    """What was measured, and what follows."""

    timings: list[Timing]
    fit: Fit
    advice: Advice
    batch_size: int  # under load
    loads: list[Load]

    @property
    def best(self) -> Load:
        """Of the most items per second."""
        return max(self.loads, key=lambda each: each.rate)

    def speed_up(self, load: Load) -> float:
        """Items per second, as a multiple of those one by one."""
        return load.rate / self.timings[0].rate

    @property
    def gain(self) -> float:
        """The best speed-up."""
        return self.speed_up(self.best)


def bench(target: str, sample: Path, *, plan: Plan, output: Path, began: float) -> int:
    """Shows how fast a batch function is, and what `batch_size` it should have; returns 0. `began`
    is of `perf_counter`.

    Raises:
        argparse.ArgumentError: the function or the sample cannot be used, or the function raised.
    """
    check_writable(output)
    console = Console()
    with console.status(f"Importing {target}"):
        measured = subject(target, sample)
    with progress_on(console) as progress:
        found = asyncio.run(measure(measured, plan, progress))
    items = f"{_count(len(measured.items), 'item')} from {sample.name}"
    title = f"{target}, {items}, {_count(cores(), 'CPU core')}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(batch_table(found))
    console.print(f"{found.fit}\n", highlight=False, soft_wrap=True)
    console.print(load_table(found))
    console.print(f"{found.advice.reason}\n{outcome(found)}", highlight=False, soft_wrap=True)
    console.print(
        measured.paste(found.advice.batch_size if found.gain > 1 else 1),
        style="bold",
        highlight=False,
        markup=False,
    )
    draw(found.timings, found.fit, found.advice, found.loads, found.batch_size, title, output)
    console.print(
        f"Picture: {output}",
        f"Total time: {time.perf_counter() - began:.1f} s",
        sep="\n",
        soft_wrap=True,
        highlight=False,
    )
    return 0


async def measure(measured: Subject, plan: Plan, progress: Progress) -> Findings:
    """Everything, on one event loop: what a coroutine function keeps may belong to the one that it
    first ran on.
    """
    sizes, callers = doublings(plan.max_batch_size), doublings(plan.concurrency)
    timings = await batch_times(
        measured, sizes, _bar(progress, f"batches of 1 to {sizes[-1]}", ROUNDS)
    )
    medians = [timing.median for timing in timings]
    advice = advise(medians)
    batch_size = plan.batch_size or advice.batch_size
    advance = _bar(progress, f"1 to {_count(callers[-1], 'caller')}", len(callers))
    loads = []
    for number in callers:
        loads.append(await load(measured, number, batch_size, plan.seconds))
        advance()
    return Findings(timings, fit(medians), advice, batch_size, loads)


def outcome(found: Findings) -> str:
    """What batching is worth under load, in one sentence."""
    rate, callers = f"{found.best.rate:,.0f} items a second", _count(found.best.callers, "caller")
    if found.gain <= 1:
        best = f"at best {fold(found.gain)}, {rate} with {callers}"
        return f"Through batched, calls are never faster than directly one by one: {best}."
    more = f"{fold(found.gain)} as many as directly one by one"
    return f"With batch_size={found.batch_size} and {callers} it is {rate}, {more}."


def batch_table(found: Findings) -> Table:
    """The times of batches by size."""
    made = blank_table("Direct calls")
    for head in (
        "Batch\nsize",
        "Calls",
        "A batch\nms",
        "An item\nms",
        "Items\na second",
        "a + b n\nms",
    ):
        made.add_column(head, justify="right", no_wrap=True)
    for timing in found.timings:
        median = timing.median
        made.add_row(
            f"{timing.size:,}",
            f"{len(timing.seconds):,}",
            ms(median.seconds),
            ms(median.per_item),
            f"{1 / median.per_item:,.0f}",
            ms(found.fit.at(timing.size)),
            style="bold" if timing.size == found.advice.batch_size else "",
        )
    return made


def load_table(found: Findings) -> Table:
    """What callers get, beside direct calls one by one."""
    made = blank_table(f"Callers with one call at a time, batch_size={found.batch_size}")
    for head in ("Callers", "Items\na second", "Speed-up", "p50\nms", "p99\nms", "Mean\nbatch"):
        made.add_column(head, justify="right", no_wrap=True)
    alone = found.timings[0]
    one_by_one = (
        "one by one",
        f"{alone.rate:,.0f}",
        "1.0x",
        ms(alone.percentile(50)),
        ms(alone.percentile(99)),
        "1.0",
    )
    made.add_row(*one_by_one, end_section=True)
    for each in found.loads:
        figures = (
            f"{each.rate:,.0f}",
            fold(found.speed_up(each)),
            ms(each.latency(50) / 1e3),
            ms(each.latency(99) / 1e3),
        )
        made.add_row(f"{each.callers:,}", *figures, f"{each.mean_batch:.1f}", style="bold")
    return made


def _bar(progress: Progress, description: str, total: int) -> Callable[[], object]:
    """What moves a new bar on by one."""
    task = progress.add_task(description, total=total)
    return lambda: progress.advance(task)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
