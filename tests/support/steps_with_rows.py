"""Functions that work in steps, in a module that a process can import."""

from __future__ import annotations

import asyncio

import batched
from batched import Rows

PLACES = 4
sizes: list[int] = []
"""Live rows of each step in this process."""


def advance(rows: Rows[int, int], left: list[int], scale: int) -> list[int]:
    """Do one step of rows of `abs(item)` steps each. A negative item fails alone."""
    left += [abs(row.item) for row in rows.join()]
    sizes.append(len(rows))
    for place, row in enumerate(rows):
        left[place] -= 1
        if row.item == 666:
            raise ZeroDivisionError(str(row.item))
        if left[place] < 1 and row.item < 0:
            row.fail(ValueError(f"row {row.item}"))
        elif left[place] < 1:
            row.finish(row.item * scale)
    places = rows.leave()
    return [steps for place, steps in enumerate(left) if place not in places]


@batched.continuously(batch_size=PLACES)
def scaled(rows: Rows[int, int], scale: int = 1) -> None:
    left: list[int] = []
    while rows:
        left = advance(rows, left, scale)


@batched.aio.continuously(batch_size=PLACES)
async def scaled_on_a_loop(rows: Rows[int, int], scale: int = 1) -> None:
    left: list[int] = []
    while rows:
        left = advance(rows, left, scale)
        await asyncio.sleep(0)


def weight(item: int) -> int:
    return abs(item)


@batched.continuously(batch_size=PLACES)
def heavy(rows: Rows[int, int]) -> None:
    left: list[int] = []
    while rows:
        left = advance(rows, left, 1)
        if len(rows) > 2:
            raise MemoryError


@batched.continuously(batch_size=PLACES)
def company(rows: Rows[int, int]) -> None:
    """Finish each row with the number of rows that are live with it."""
    while rows:
        rows.join()
        live = len(rows)
        for row in rows:
            row.finish(live)
        rows.leave()
