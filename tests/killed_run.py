"""Program that is killed: two steps over 5,000 rows, each call of which is written down."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from batched import offline

ROWS = 5000
LOG = "".join(sys.argv[2:3])


def note(step: int, keys: list[int]) -> None:
    """Writes down that a function is called for these rows; a kill does not undo it."""
    log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, "".join(f"{step} {key}\n" for key in keys).encode())
    os.close(log)


def shout(items: list[dict[str, Any]]) -> list[str]:
    note(0, [item["id"] for item in items])
    time.sleep(0.004)
    return [item["text"].upper() for item in items]


def measure(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    note(1, [item["id"] for item in items])
    time.sleep(0.004)
    if any(item["id"] % 701 == 5 for item in items):
        raise ValueError("bad row")
    return [
        {"size": len(item["loud"]), "vector": [item["id"] / 7, float(len(item["loud"]))]}
        for item in items
    ]


def source() -> list[dict[str, Any]]:
    return [{"id": key, "text": f"row {key} " + "x" * (key % 50)} for key in range(ROWS)]


def main(dest: Path, seed: int, *, processes: bool) -> None:
    chance = random.Random(seed)
    pipeline = offline.Pipeline(
        offline.Step(shout, input=["id", "text"], output="loud", version=1, processes=processes),
        offline.Step(measure, input=["id", "loud"], output=["size", "vector"], version=1),
    )
    pipeline.run(
        source(),
        dest,
        key="id",
        batch_size=chance.choice([16, 33, 64, 128]),
        workers=chance.choice([1, 2, 3]),
        watch=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]), processes="processes" in sys.argv[4:])
