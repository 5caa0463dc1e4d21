"""Random trials of functions that work in steps, against one item at a time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from typing import Any, NamedTuple

import pytest

import batched
from batched import Future, Rows, Stream
from batched._execution.attempts import finish_now

PLACES = 5
CALLERS = 12


class Item(NamedTuple):
    """A row of `steps` steps, which fails alone at its end if `fails`."""

    number: int
    steps: int
    fails: bool


class Call(NamedTuple):
    """A call of a caller, who reads at most `most` pieces of a stream."""

    kind: str
    group: str
    items: list[Item]
    most: int


def random_calls(seed: int, caller: int) -> Iterator[Call]:
    draw, numbers = random.Random(f"{seed} {caller}"), count(caller * 100_000)
    for _ in range(25):
        kind = draw.choice(["one", "one", "list", "cancel", "stream", "part"])
        size = {"list": draw.randint(1, 9), "cancel": 2}.get(kind, 1)
        items = [
            Item(next(numbers), draw.choice([1, 2, 3, 5, 9, 30]), draw.random() < 0.1)
            for _ in range(size)
        ]
        yield Call(kind, draw.choice("aab"), items, draw.randint(0, 3) if kind == "part" else 99)


class Machine:
    """Function that works in steps, and checks what it sees."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.finished: Counter[int] = Counter()
        self._emitted: set[int] = set()  # items of streams that have emitted a piece

    def run(self, rows: Rows[Item, Any, Any], group: str) -> Iterator[None]:
        """Work step by step; a step ends with a `yield`."""
        state: list[list[int]] = []  # number and step of each row
        while rows:
            limit = self._random.choice([PLACES, 1, 3])
            new = [row.item.number for row in rows.join(limit)]
            assert self._emitted.isdisjoint(new), "a row with pieces begins again"
            state += [[number, 0] for number in new]
            assert [row.item.number for row in rows] == [number for number, _ in state]
            assert len(rows) <= PLACES
            assert len(new) <= limit
            yield
            for error, chance in ((ZeroDivisionError, 0.01), (MemoryError, 0.01)):
                if self._random.random() < chance:
                    raise error(group)
            for row, place in zip(rows, state, strict=True):
                place[1] += 1
                if not row.ended:
                    self._advance(row, place[1], group)
            if self._random.random() < 0.9 or all(row.ended for row in rows):
                for left in reversed(rows.leave()):
                    del state[left]

    def _advance(self, row: Any, step: int, group: str) -> None:
        number, steps, fails = row.item
        row.emit((number, step))
        if row.emitted:
            self._emitted.add(number)
        if step >= steps and fails:
            row.fail(ValueError(str(number)))
        elif step >= steps:
            self.finished[number] += not row.given_up
            row.finish((number, group))


async def wait_in_thread(function: Any, what: Any) -> Any:
    """Return the next piece of a stream, or the results of a call. Never suspend."""
    if isinstance(what, Stream):
        return next(what, None)
    return what.result(60) if isinstance(what, Future) else function(*what)


async def wait_on_loop(function: Any, what: Any) -> Any:
    if isinstance(what, Stream):
        return await anext(what, None)
    return await (what if isinstance(what, Future) else function.acall(*what))


async def make(function: Any, call: Call, pieces: list[Any], wait: Any) -> Any:
    """Make a call, and return the results; None if it was given up."""
    kind, group, items, most = call
    if kind == "list":
        return await wait(function, (items, group))
    if kind == "one":
        return [await wait(function, (items[0], group))]
    if kind == "cancel":
        futures = [function.submit(item, group) for item in items]
        result = await wait(function, futures[0])
        futures[1].cancel()
        return [result]
    with function.stream(items[0], group) as stream:
        while len(pieces) < most and (piece := await wait(function, stream)) is not None:
            pieces.append(piece)
        return [stream.result()] if kind == "stream" else None


def check(call: Call, outcome: Any, pieces: list[Any]) -> str:
    """Check the outcome of a call; return its kind."""
    items = call.items[:1] if call.kind == "cancel" else call.items
    every = [(items[0].number, 1 + step) for step in range(items[0].steps)]
    assert pieces == every[: len(pieces)]
    if isinstance(outcome, ZeroDivisionError | MemoryError):
        assert str(outcome) == call.group
        return "crash"
    if isinstance(outcome, ValueError):
        assert str(outcome) in [str(item.number) for item in items if item.fails]
    elif isinstance(outcome, BaseException):
        raise outcome
    elif outcome is not None:
        assert outcome == [(item.number, call.group) for item in items]
        assert not any(item.fails for item in items)
    if call.kind == "stream":
        assert pieces == every
    return f"{call.kind}: {type(outcome).__name__}"


async def work(function: Any, seed: int, caller: int, wait: Any) -> list[str]:
    """Make the calls of one caller, and return the kinds of their outcomes."""
    endings = []
    for call in random_calls(seed, caller):
        pieces: list[Any] = []
        try:
            outcome = await make(function, call, pieces, wait)
        except Exception as error:
            outcome = error
        endings.append(check(call, outcome, pieces))
    return endings


def trial(seed: int, *, on_loop: bool = False, coroutine: bool = False, **settings: Any) -> None:
    machine = Machine(seed)

    def plain(rows: Rows[Item, Any, Any], group: str) -> None:
        for _ in machine.run(rows, group):
            pass

    async def suspends(rows: Rows[Item, Any, Any], group: str) -> None:
        for _ in machine.run(rows, group):
            await asyncio.sleep(0)

    module: Any = batched.aio if coroutine else batched
    function = module.continuously(batch_size=PLACES, **settings)(suspends if coroutine else plain)

    wait = wait_on_loop if on_loop else wait_in_thread
    works = [work(function, seed, caller, wait) for caller in range(CALLERS)]

    async def main() -> list[list[str]]:
        found = await asyncio.gather(*works)
        await function.aclose()
        return found

    if on_loop:
        found = asyncio.run(main())
    else:
        with ThreadPoolExecutor(CALLERS) as pool:
            found = [*pool.map(finish_now, works)]
        function.shutdown()
    assert {"one: list", "list: list", "stream: list", "cancel: list"} <= set(chain(*found))
    assert max(machine.finished.values()) == 1, "a row has finished twice"
    stats = function.stats
    assert (stats.queue_size, stats.in_flight, stats.blocked, stats.lost) == (0, 0, 0, 0)
    assert sum(stats.row_endings.values()) == stats.total_processed == stats.total_batches


ON_LOOP = {"on_loop": True}
SETTINGS: Any = [{}, {"max_queue_size": 8}, ON_LOOP, {**ON_LOOP, "coroutine": True}]
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 30))]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_get_their_own_results(settings: dict[str, Any], seed: int) -> None:
    trial(seed, **settings)
