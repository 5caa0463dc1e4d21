"""Random trials of functions that work in steps, against one item at a time."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

import batched
from batched import Rows

PLACES = 5
CALLERS = 12


@dataclass(frozen=True)
class Item:
    """A row of `steps` steps, which fails alone at its end if `fails`."""

    number: int
    steps: int
    fails: bool

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Pieces that the row emits: its number, and the number of the step."""
        return [(self.number, step) for step in range(self.steps)]


class Machine:
    """Function that works in steps, and checks what it sees."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.wrong: list[str] = []
        self.finished: Counter[int] = Counter()
        self.told: set[int] = set()  # items of streams that have emitted a piece
        self.crashes: Counter[str] = Counter()
        self.steps = 0

    def run(self, rows: Rows[Item, tuple[int, str], tuple[int, int]], group: str) -> Iterator[None]:
        """Work step by step; a step ends with a `yield`."""
        state: list[list[int]] = []  # number and step of each row
        while rows:
            limit = self._random.choice([None, None, 1, 3])
            for row in rows.join(limit):
                if row.item.number in self.told:
                    self.wrong.append(f"{row.item} begins again after a reader got its pieces")
                state.append([row.item.number, 0])
            self._check(rows, state)
            yield
            self.steps += 1
            chance = self._random.random()
            if chance < 0.01:
                self.crashes["error"] += 1
                raise ZeroDivisionError(group)
            if chance < 0.02:
                self.crashes["memory"] += 1
                raise MemoryError(group)
            for row, place in zip(rows, state, strict=True):
                if row.ended:
                    continue
                row.emit((row.item.number, place[1]))
                if row.emitted:
                    self.told.add(row.item.number)
                place[1] += 1
                if place[1] >= row.item.steps and row.item.fails:
                    row.fail(ValueError(str(row.item.number)))
                elif place[1] >= row.item.steps:
                    self.finished[row.item.number] += not row.given_up
                    row.finish((row.item.number, group))
            if self._random.random() < 0.9 or all(row.ended for row in rows):
                for place_left in reversed(rows.leave()):
                    del state[place_left]

    def _check(self, rows: Any, state: list[list[int]]) -> None:
        if [row.item.number for row in rows] != [number for number, _ in state]:
            self.wrong.append(f"the state does not follow the rows: {state}")
        if len(rows) > PLACES:
            self.wrong.append(f"{len(rows)} rows are live")


class Caller:
    """Caller that makes random calls, and checks their outcomes."""

    def __init__(self, number: int, seed: int) -> None:
        self._random = random.Random(1000 * seed + number)
        self._numbers = iter(range(number * 100_000, (number + 1) * 100_000))
        self.wrong: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def item(self) -> Item:
        draw = self._random
        return Item(next(self._numbers), draw.choice([1, 2, 3, 5, 9, 30]), draw.random() < 0.1)

    def plan(self) -> tuple[str, str, float]:
        """Return the kind of a call, its group, and a random number."""
        draw = self._random
        kinds = ["call", "call", "list", "cancel", "stream", "partial", "unread"]
        return draw.choice(kinds), draw.choice("aab"), draw.random()

    def check(self, items: list[Item], group: str, outcome: Any) -> None:
        """Check the outcome of a call."""
        if isinstance(outcome, BaseException):
            self.outcomes[type(outcome).__name__] += 1
            expected = isinstance(outcome, ZeroDivisionError | MemoryError | CancelledError)
            own = isinstance(outcome, ValueError) and str(outcome) in [
                str(item.number) for item in items if item.fails
            ]
            if not (expected or own):
                self.wrong.append(f"{items} ended with {outcome!r}")
            if isinstance(outcome, ZeroDivisionError | MemoryError) and str(outcome) != group:
                self.wrong.append(f"{items} of {group} got an error of {outcome}")
            return
        self.outcomes["result"] += 1
        if outcome != [(item.number, group) for item in items] or any(i.fails for i in items):
            self.wrong.append(f"{items} got {outcome}")

    def check_pieces(self, item: Item, pieces: list[Any], *, complete: bool) -> None:
        """Check the pieces of a stream."""
        expected = item.pieces if complete else item.pieces[: len(pieces)]
        if pieces != expected:
            self.wrong.append(f"{item} has the pieces {pieces}")

    def work(self, function: Any, until: float) -> None:
        """Make calls from a thread."""
        while time.monotonic() < until:
            kind, group, chance = self.plan()
            items = [self.item() for _ in range(1 + int(9 * chance) if kind == "list" else 1)]
            try:
                if kind in ("call", "list"):
                    outcome: Any = function(items if kind == "list" else items[0], group)
                    outcome = outcome if kind == "list" else [outcome]
                elif kind == "cancel":
                    future = function.submit(items[0], group)
                    time.sleep(chance * 0.01)
                    future.cancel()
                    outcome = [future.result(60)]
                else:
                    self._read(function.stream(items[0], group), items[0], kind, chance)
                    continue
            except BaseException as error:
                outcome = error
            self.check(items, group, outcome)

    def _read(self, stream: Any, item: Item, kind: str, chance: float) -> None:
        pieces: list[Any] = []
        try:
            for piece in stream:
                pieces.append(piece)
                if kind == "partial" and chance < 0.3:
                    break
                if kind == "unread":
                    time.sleep(chance * 0.01)
                    break
        except (ZeroDivisionError, MemoryError):
            self.check_pieces(item, pieces, complete=False)
        except ValueError:
            self.check_pieces(item, pieces, complete=True)
        else:
            self.check_pieces(item, pieces, complete=kind == "stream")
        self.outcomes["stream"] += 1

    async def work_async(self, function: Any, until: float) -> None:
        """Make calls from a coroutine."""
        while time.monotonic() < until:
            kind, group, chance = self.plan()
            items = [self.item() for _ in range(1 + int(9 * chance) if kind == "list" else 1)]
            try:
                if kind in ("call", "list"):
                    outcome: Any = await function.acall(
                        items if kind == "list" else items[0], group
                    )
                    outcome = outcome if kind == "list" else [outcome]
                elif kind == "cancel":
                    task = asyncio.ensure_future(function.acall(items[0], group))
                    await asyncio.sleep(chance * 0.01)
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        self.check(items, group, [await task])
                    continue
                else:
                    await self._read_async(function.stream(items[0], group), items[0], kind)
                    continue
            except Exception as error:
                outcome = error
            self.check(items, group, outcome)

    async def _read_async(self, stream: Any, item: Item, kind: str) -> None:
        pieces: list[Any] = []
        try:
            async for piece in stream:
                pieces.append(piece)
                if kind != "stream" and len(pieces) > 2:
                    break
        except (ZeroDivisionError, MemoryError):
            self.check_pieces(item, pieces, complete=False)
        except ValueError:
            self.check_pieces(item, pieces, complete=True)
        else:
            self.check_pieces(item, pieces, complete=kind == "stream")
        self.outcomes["stream"] += 1


def machine_in_threads(machine: Machine, **settings: Any) -> Any:
    decorate: Any = batched.continuously(batch_size=PLACES, **settings)

    @decorate  # type: ignore[untyped-decorator]
    def work(rows: Rows[Item, tuple[int, str], tuple[int, int]], group: str) -> None:
        for _ in machine.run(rows, group):
            time.sleep(0.0002)

    return work


def machine_on_a_loop(machine: Machine) -> Any:
    @batched.aio.continuously(batch_size=PLACES)
    async def work(rows: Rows[Item, tuple[int, str], tuple[int, int]], group: str) -> None:
        for _ in machine.run(rows, group):
            await asyncio.sleep(0)

    return work


def check(machine: Machine, callers: list[Caller], function: Any) -> None:
    assert machine.wrong == []
    assert [wrong for caller in callers for wrong in caller.wrong] == []
    twice = [number for number, count in machine.finished.items() if count > 1]
    assert twice == [], "rows have finished twice"
    counts = sum((caller.outcomes for caller in callers), Counter())
    assert counts["result"] > 0
    assert counts["stream"] > 0
    function.shutdown()
    stats = function.stats
    assert (stats.queue_size, stats.in_flight, stats.blocked) == (0, 0, 0)
    assert sum(stats.row_endings.values()) >= stats.total_processed - counts["MemoryError"]


def trial_of_threads(seed: int, seconds: float, **settings: Any) -> Machine:
    machine = Machine(seed)
    function = machine_in_threads(machine, **settings)
    callers = [Caller(number, seed) for number in range(CALLERS)]
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=each.work, args=(function, until)) for each in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a caller hangs"
    check(machine, callers, function)
    return machine


def trial_on_a_loop(seed: int, seconds: float, *, coroutine: bool) -> Machine:
    machine = Machine(seed)
    function = machine_on_a_loop(machine) if coroutine else machine_in_threads(machine)
    callers = [Caller(number, seed) for number in range(CALLERS)]

    async def main() -> None:
        until = time.monotonic() + seconds
        async with asyncio.timeout(120):
            await asyncio.gather(*[each.work_async(function, until) for each in callers])
        await function.aclose()

    asyncio.run(main())
    check(machine, callers, function)
    return machine


@pytest.mark.parametrize("settings", [{}, {"max_queue_size": 8}], ids=["no limit", "full queue"])
def test_random_calls_of_threads(settings: dict[str, Any]) -> None:
    trial_of_threads(1, 1.5, **settings)


@pytest.mark.parametrize("coroutine", [False, True], ids=["thread", "coroutine"])
def test_random_calls_of_coroutines(coroutine: bool) -> None:
    trial_on_a_loop(2, 1.5, coroutine=coroutine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 30))
def test_random_calls_at_length(seed: int) -> None:
    trial_of_threads(seed, 5, max_concurrent_batches=1)
    trial_on_a_loop(seed, 5, coroutine=False)
    machine = trial_on_a_loop(seed, 5, coroutine=True)
    assert machine.crashes["error"] > 0
    assert machine.crashes["memory"] > 0
