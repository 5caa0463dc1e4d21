"""A function that works in steps, begun one by one by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import batched
from batched import Rows


class Gate:
    """Steps of a function, each begun by the test. An open gate lets all further steps begin."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._begun = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._open = is_open
        self.sizes: list[int] = []
        """Live rows of each step."""

    def step(self, size: int) -> None:
        self.sizes.append(size)
        self._begun.release()
        if not self._open:
            assert self._allowed.acquire(timeout=30)

    def wait_for_step(self) -> None:
        """Wait until one more step stands at the gate, with its rows joined."""
        assert self._begun.acquire(timeout=30)

    def allow(self) -> None:
        self._allowed.release()

    def open(self) -> None:
        self._open = True
        self._allowed.release(100)


def steps(rows: Rows[int, str, int], scale: int, gate: Gate | None = None) -> Iterator[None]:
    """Yield in each step of rows, which emit the numbers of steps that they have left."""
    left: list[int] = []
    while rows:
        left += [abs(row.item) for row in rows.join()]
        if gate is not None:
            gate.step(len(rows))
        yield
        for place, row in enumerate(rows):
            left[place] -= 1
            row.emit(left[place] * scale)
            if left[place] < 1 and row.item < 0:
                row.fail(ValueError(f"row {row.item}"))
            elif left[place] < 1:
                row.finish(f"{row.item} x {scale}")
        places = set(rows.leave())
        left = [each for place, each in enumerate(left) if place not in places]


def countdown(gate: Gate | None = None, **settings: Any) -> Any:
    """Return a function of numbers of steps. A negative item fails alone after as many steps."""

    def count(rows: Rows[int, str, int], scale: int = 1) -> None:
        for _ in steps(rows, scale, gate):
            pass

    return batched.continuously(**settings)(count)


def countdown_on_a_loop(pause: Any, **settings: Any) -> Any:
    """Return `countdown` as a coroutine function, which awaits `pause()` in each step."""

    async def count(rows: Rows[int, str, int], scale: int = 1) -> None:
        for _ in steps(rows, scale):
            await pause()

    return batched.aio.continuously(**settings)(count)


def stepwise(step: Any, **settings: Any) -> Any:
    """Return a function that works in steps and calls `step(rows)` in each."""

    def work(rows: Rows[Any, Any, Any]) -> None:
        while rows:
            rows.join()
            step(rows)
            rows.leave()

    return batched.continuously(**settings)(work)


def finish_all(rows: Rows[Any, Any, Any]) -> None:
    for row in rows:
        row.finish(row.item)
