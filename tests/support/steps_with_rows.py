"""Functions that work in steps, in a module that a process can import."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from countdowns import steps

import batched
from batched import Rows

PLACES = 4
sizes: list[int] = []
"""Live rows of each step in this process."""


def noted(rows: Rows[int, str, int], scale: int = 1) -> Iterator[None]:
    """Work in steps, and note the size of each."""
    for _ in steps(rows, scale):
        sizes.append(len(rows))
        if any(row.item == 666 for row in rows):
            raise ZeroDivisionError("666")
        yield


@batched.continuously(batch_size=PLACES)
def scaled(rows: Rows[int, str, int], scale: int = 1) -> None:
    for _ in noted(rows, scale):
        pass


@batched.aio.continuously(batch_size=PLACES)
async def scaled_on_a_loop(rows: Rows[int, str, int], scale: int = 1) -> None:
    for _ in noted(rows, scale):
        await asyncio.sleep(0)


@batched.continuously(batch_size=PLACES)
def heavy(rows: Rows[int, str, int]) -> None:
    for _ in noted(rows):
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
