"""Episodes with batched functions that call each other. Circles are refused, without a deadlock."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import anyio

import batched
from soak.books import Books, Report
from soak.episodes import Crowd, bounded, until, workers
from soak.faults import CIRCLE, Faults
from soak.tasks import LOOPS

Answer = tuple[int, bool]
"""Number of the call, and whether a call on the way was refused as a circle."""


class Ring:
    """Batched functions that call the next one; the last function calls the first."""

    def __init__(self, rng: random.Random, name: str, *, coroutines: bool) -> None:
        self.books = Books(Faults())
        # callers call all functions, not only the first: two may wait for each other by chance
        self.mixed = rng.random() < 0.5
        self.functions: list[Any] = []
        self.alone = True  # whether each function has one worker
        for place in range(rng.choice([1, 2, 2, 3])):
            settings: dict[str, Any] = {
                "batch_size": rng.choice([1, 2, 8]),
                "max_concurrent_batches": rng.choice([1, 1, 2]),
                "prefetch": 0 if coroutines else rng.choice([0, 0, 1]),
                "name": f"{name}-{place}",
            }
            decorate: Any = (
                batched.aio.dynamically(**settings)
                if coroutines
                else batched.dynamically(**settings)
            )
            self.alone = self.alone and settings["max_concurrent_batches"] == 1
            self.functions.append(
                decorate(functools.partial(self._awaiting if coroutines else self._blocking, place))
            )

    def next(self, place: int) -> Any:
        return self.functions[(place + 1) % len(self.functions)]

    def _blocking(self, place: int, items: list[tuple[int, int]]) -> list[Answer]:
        answers: list[Answer] = []
        for number, way in items:
            try:
                answers.append(self.next(place)((number, way - 1)) if way else (number, False))
            except RuntimeError as error:
                answers.append(self._refused(number, error))
        return answers

    async def _awaiting(self, place: int, items: list[tuple[int, int]]) -> list[Answer]:
        answers: list[Answer] = []
        for number, way in items:
            try:
                answers.append(
                    await self.next(place)((number, way - 1)) if way else (number, False)
                )
            except RuntimeError as error:
                answers.append(self._refused(number, error))
        return answers

    def _refused(self, number: int, error: RuntimeError) -> Answer:
        if type(error) is RuntimeError:
            self.books.faults.injected.append(CIRCLE)
        else:
            self.books.blame("wrong", f"a function in a circle got {error!r}")
        return number, True

    def check(self, call: Any, way: int, answer: object) -> None:
        """Enter `answer` of a call through `way` functions.

        A call that comes back to a waiting batcher without a free worker must be refused.
        """
        round_trip = way >= len(self.functions)
        # no circle refuses the call
        right = answer == (call.number, True) and (round_trip or self.mixed or not self.alone)
        right = right or (answer == (call.number, False) and not (round_trip and self.alone))
        self.books.answered(call, right, answer)

    def calls(self, rng: random.Random, count: int) -> list[tuple[Any, Any, int]]:
        """Return calls, each with its function and the number of functions that it goes through."""
        places = len(self.functions) if self.mixed else 1
        return [
            (
                self.books.begin(),
                rng.choice(self.functions[:places]),
                rng.randint(0, len(self.functions) + 2),
            )
            for _ in range(count)
        ]


# as every episode
def circles(rng: random.Random, name: str, calls: int) -> Report:
    """Call functions that call each other, from several callers at once."""
    coroutines = rng.random() < 0.5
    ring = Ring(rng, name, coroutines=coroutines)
    crowd = Crowd(ring.books)
    for _ in range(rng.choice([1, 2, 4])):
        todo = ring.calls(rng, 20)
        if coroutines:
            crowd.start(
                functools.partial(
                    anyio.run, _await_all, ring, todo, **LOOPS[rng.choice(list(LOOPS))]
                )
            )
        else:
            crowd.start(functools.partial(_block, ring, todo))
    hung = not crowd.join(f"functions that call each other: {ring.functions}")
    for fn in ring.functions:
        hung = hung or not bounded(ring.books, f"shutdown of {fn}", fn.shutdown)
    if not hung and not until(
        lambda: not any(workers(f"{name}-{place}") for place in range(len(ring.functions)))
    ):
        ring.books.blame("hung", f"threads of {ring.functions}")
    report = ring.books.close(None, list(ring.books.open.values()) if hung else [])
    waiting = [fn.stats for fn in ring.functions if fn.stats.queue_size or fn.stats.in_flight]
    if waiting and not hung:
        report.blame("wrong", f"after functions called each other: {waiting}")
    return report


def _block(ring: Ring, todo: list[tuple[Any, Any, int]]) -> None:
    for burst in itertools.groupby(todo, key=lambda each: each[0].number // 4):
        pending = [(call, way, fn.submit((call.number, way))) for call, fn, way in burst[1]]
        for call, way, future in pending:
            ring.check(call, way, future.result())


async def _await_all(ring: Ring, todo: list[tuple[Any, Any, int]]) -> None:
    async def one(call: Any, fn: Any, way: int) -> None:
        ring.check(call, way, await fn((call.number, way)))

    async with anyio.create_task_group() as group:
        for each in todo:
            group.start_soon(one, *each)
