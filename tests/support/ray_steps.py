"""Batch functions for actors, in a module that they can import."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any


def note(log: str, *words: object) -> None:
    """Append a line to the log; a kill does not undo it."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


def notes(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def start_ray(**settings: Any) -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        **settings,
    )


class Shout:
    """A model: it notes each time that it is built, and each row, once so many are built."""

    def __init__(self, log: str, pause: float = 0.0, count: int = 1) -> None:
        self.log, self.pause, self.count = log, pause, count
        note(log, "built", os.getpid())

    def __call__(self, items: list[dict[str, Any]]) -> list[str]:
        while len(notes(Path(self.log))) < self.count:
            time.sleep(0.01)
        note(self.log, "rows", os.getpid(), *(item["id"] for item in items))
        time.sleep(self.pause)
        return [item["text"].upper() for item in items]


def measure(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for item in items:
        match item["loud"]:
            case "BAD":
                raise ValueError("bad row")
            case "EXIT":
                os._exit(0)
            case "HANG":
                time.sleep(1e6)
            case "SYS.EXIT":
                raise SystemExit(3)
    return [{"size": len(item["loud"]), "vector": [item["id"] / 7, 1.0]} for item in items]


async def wait(items: list[str]) -> list[int]:
    await asyncio.sleep(0)
    return [os.getpid()] * len(items)


class Broken:
    def __init__(self) -> None:
        raise FileNotFoundError("no model.bin")

    def __call__(self, items: list[Any]) -> list[Any]:
        return items


class Dying:
    def __init__(self) -> None:
        os._exit(1)

    def __call__(self, items: list[Any]) -> list[Any]:
        return items
