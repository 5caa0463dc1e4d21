"""Episodes with batched functions that call each other. Circles are refused, without a deadlock."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from typing import Any

import anyio

import batched
from soak.books import Books, Report
from soak.episodes import Crowd, bounded, until, workers
from soak.faults import CIRCLE, Faults
from soak.tasks import LOOPS

Item = tuple[int, int]
"""Number of the call, and number of further functions that it goes through."""


class Ring:
    """Batched functions that call the next one; the last function calls the first."""

    def __init__(self, rng: random.Random, name: str, *, coroutines: bool) -> None:
        self.books = Books(Faults())
        # whether the function at a place was refused by the next one, by thread of its event loop
        self.refused: dict[tuple[object, int], set[bool]] = {}
        self.functions: list[Any] = []
        for place in range(rng.choice([1, 2, 2, 3])):
            settings: dict[str, Any] = {
                "batch_size": rng.choice([1, 2, 8]),
                "max_concurrent_batches": rng.choice([1, 1, 2]),
                "name": f"{name}-{place}",
            }
            library: Any = batched.aio if coroutines else batched
            body = self._awaiting if coroutines else self._blocking
            self.functions.append(library.dynamically(**settings)(functools.partial(body, place)))

    def next(self, place: int) -> Any:
        return self.functions[(place + 1) % len(self.functions)]

    def _blocking(self, place: int, items: list[Item]) -> list[int]:
        for number, way in items:
            if way:
                try:
                    self.next(place)((number, way - 1))
                except RuntimeError as error:
                    self._note(None, place, error)
                else:
                    self._note(None, place)
        return [number for number, _ in items]

    async def _awaiting(self, place: int, items: list[Item]) -> list[int]:
        loop = threading.current_thread()  # each loop has queues of its own, with an order
        for number, way in items:
            if way:
                try:
                    await self.next(place)((number, way - 1))
                except RuntimeError as error:
                    self._note(loop, place, error)
                else:
                    self._note(loop, place)
        return [number for number, _ in items]

    def _note(self, loop: object, place: int, error: RuntimeError | None = None) -> None:
        self.refused.setdefault((loop, place), set()).add(error is not None)
        if error is not None:
            self.books.faults.injected.append(CIRCLE)
            if type(error) is not RuntimeError:
                self.books.blame("wrong", f"a function in a circle got {error!r}")

    def check(self) -> None:
        """Check that functions have an order: a wait is always refused or never."""
        for loop in {loop for loop, _ in self.refused}:
            answers = [self.refused.get((loop, each)) for each in range(len(self.functions))]
            if {True, False} in answers or answers == [{False}] * len(answers):
                self.books.blame("wrong", f"refusals of functions in a circle: {answers}")

    def calls(self, rng: random.Random, count: int) -> list[tuple[Any, Any, int]]:
        """Return calls, each with its function and the number of functions that it goes through."""
        return [
            (
                self.books.begin(),
                rng.choice(self.functions),
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
    ring.check()
    report = ring.books.close(None, list(ring.books.open.values()) if hung else [])
    waiting = [fn.stats for fn in ring.functions if fn.stats.queue_size or fn.stats.in_flight]
    if waiting and not hung:
        report.blame("wrong", f"after functions called each other: {waiting}")
    return report


def _block(ring: Ring, todo: list[tuple[Any, Any, int]]) -> None:
    for burst in itertools.groupby(todo, key=lambda each: each[0].number // 4):
        pending = [(call, fn.submit((call.number, way))) for call, fn, way in burst[1]]
        for call, future in pending:
            answer = future.result()
            ring.books.answered(call, answer == call.number, answer)


async def _await_all(ring: Ring, todo: list[tuple[Any, Any, int]]) -> None:
    async def one(call: Any, fn: Any, way: int) -> None:
        answer = await fn((call.number, way))
        ring.books.answered(call, answer == call.number, answer)

    async with anyio.create_task_group() as group:
        for each in todo:
            group.start_soon(one, *each)
