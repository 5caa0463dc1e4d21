"""Functions that tests serve in model processes, imported there by name."""

from __future__ import annotations

import os
import time
from typing import Any

import batched

LOG = os.environ.get("SERVED_LOG")
"""File to which each item that is computed is appended, if there is one."""


def note(*items: object) -> None:
    if LOG is not None:
        descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, "".join(f"{item}\n" for item in items).encode())
        os.close(descriptor)


note("built")


@batched.dynamically(batch_size=16)
def double(items: list[Any]) -> list[Any]:
    note(*items)
    return [item * 2 for item in items]


@batched.dynamically(batch_size=64)
def slowly(items: list[float]) -> list[float]:
    """Sleep for the sum of the items (s)."""
    time.sleep(sum(items))
    return items


@batched.dynamically(batch_size=64)
def held(paths: list[str]) -> list[str]:
    """Return the paths once there is a file at each."""
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
    return paths


@batched.dynamically
def pids(items: list[Any]) -> list[int]:
    return [os.getpid()] * len(items)


@batched.dynamically
def same(items: list[Any]) -> list[Any]:
    return items


@batched.dynamically
def arrays(items: list[ndarray]) -> list[ndarray]:  # type: ignore[name-defined]  # numpy's  # noqa: F821
    return items


@batched.aio.dynamically
async def awaited(items: list[Any]) -> list[Any]:
    return items
