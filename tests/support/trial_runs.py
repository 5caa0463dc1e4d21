"""Offline runs of the trials. Each call of a function is logged outside of the run's folder."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray_steps

from batched import offline

_calls_left = [0]
"""Calls until SIGKILL; 0: none comes."""


def note(log: str, step: int, keys: list[int]) -> None:
    """Write down one call of a function; a kill does not undo it."""
    if _calls_left[0]:
        _calls_left[0] -= 1
        if not _calls_left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    ray_steps.note(log, step, *keys)


def calls_in(log: Path) -> list[tuple[int, list[int]]]:
    return [(int(step), [*map(int, keys)]) for step, *keys in ray_steps.notes(log)]


def computed_again(log: Path, committed: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the rows, by step and key, that were computed although they are committed.

    One row of each step does not count if it was called alone: the sample, a row known to be good,
    tells whether the step works.
    """
    known = set(committed)
    calls = calls_in(log)
    alone = {step: keys[0] for step, keys in calls if len(keys) == 1 and (step, keys[0]) in known}
    return sorted(
        (step, key)
        for step, keys in calls
        for key in keys
        if (step, key) in known and not (len(keys) == 1 and alone[step] == key)
    )


def committed_in(progress: Path) -> dict[tuple[int, int], str]:
    """Return the status of the rows, by step and key, that a power cut now would leave.

    The progress file itself is not touched.
    """
    if not progress.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "progress"
        for suffix in ("", "-wal", "-journal"):
            file = Path(f"{progress}{suffix}")
            if file.exists():
                Path(f"{copy}{suffix}").write_bytes(file.read_bytes())
        connection = sqlite3.connect(copy)
        try:
            if not connection.execute("select 1 from sqlite_master where name = 'rows'").fetchall():
                return {}
            found = connection.execute("select step, key, status from rows").fetchall()
        finally:
            connection.close()
    return {(step, key): status for step, key, status in found}


def shout(items: list[dict[str, Any]], log: str) -> list[str]:
    """First step: upper case; a text that begins with "bad" has no result."""
    note(log, 0, [item["id"] for item in items])
    if any(item["text"].startswith("bad") for item in items):
        raise ValueError("bad text")
    return [item["text"].upper() for item in items]


def measure(items: list[dict[str, Any]], log: str, version: int) -> list[dict[str, Any]]:
    """Second step: size and share of the text; one that holds "WORSE" has none."""
    note(log, 1, [item["id"] for item in items])
    if any("WORSE" in item["loud"] for item in items):
        raise ValueError("worse text")
    return [
        {"size": len(item["loud"]), "share": len(item["loud"]) / (6 + version)} for item in items
    ]


def is_kept(loud: str) -> bool:
    """Predicate on the result of the first step."""
    return not loud.startswith("DROP")


def told(report: offline.Report) -> dict[str, Any]:
    letters = [(each["key"], each["step"], each["phase"]) for each in report.dead_letters()]
    return {
        "ok": report.ok,
        "failed": report.failed,
        "skipped": report.skipped,
        "filtered": report.filtered,
        "letters": sorted(letters, key=str),
    }


def two_steps(
    source: Any,
    dest: str,
    log: str,
    *,
    version: int = 1,
    kill_at_call: int = 0,
    once: bool = False,
    **settings: Any,
) -> Mapping[str, Any]:
    """Run both steps over `source`, a path or rows; SIGKILL comes with that call of a function.

    With `once` the rows of a JSONL file come from a generator, which can be read only once.
    """
    _calls_left[0] = kill_at_call
    if once:
        source = (json.loads(line) for line in Path(source).read_text().splitlines())
    steps = offline.Pipeline(
        offline.Step(
            shout, args=(log,), input=["id", "text"], output="loud", where=is_kept, version=1
        ),
        offline.Step(
            measure,
            args=(log, version),
            input=["id", "loud"],
            output=["size", "share"],
            version=version,
        ),
    )
    known: dict[str, Any] = {"key": "id", "watch": False, "batch_size": 8, "workers": 1}
    return told(steps.run(source, dest, **{**known, **settings}))


ODD: Final = 77
"""Key of the one row with a result of another type than all other rows."""
WITHOUT: Final = 100
"""Key of the one row without a result."""


def kinds(items: list[int], log: str = "") -> list[dict[str, Any]]:
    """First step: results of many kinds."""
    note(log, 0, items)
    if WITHOUT in items:
        raise ValueError("bad row")
    return [
        {
            "number": "many" if key == ODD else key if key % 3 else key / 4,
            "maybe": f"text {key}" if key % 5 == 0 else None,
            "fields": dict.fromkeys("abc"[: key % 4], key) | {"all": [key, None]},
            "array": np.full(key % 4, key / 8, np.float32),
            "grid": np.full((2, 1 + key % 3), key, np.int16),
            "yes": key % 2 == 0,
        }
        for key in items
    ]


async def kinds_awaited(items: list[int], log: str = "") -> list[dict[str, Any]]:
    """First step, as a coroutine function."""
    return kinds(items, log)


def describe(items: list[dict[str, Any]], log: str = "") -> list[str]:
    """Second step: its inputs as text, with their types."""
    note(log, 1, [item["id"] for item in items])
    return [" ".join(map(_description, item.values())) for item in items]


def _description(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tolist()}"
    return f"{type(value).__name__}:{value!r}"


def of_kinds(
    count: int,
    dests: list[str],
    progress: str,
    log: str,
    *,
    batch_size: int,
    workers: int = 1,
    place: str = "threads",
    kill_at_call: int = 0,
) -> Any:
    """Run both steps over `count` rows, the function being computed at `place`, and write all
    destinations.
    """
    _calls_left[0] = kill_at_call
    pipeline = offline.Pipeline(
        offline.Step(
            kinds_awaited if place == "coroutine" else kinds,
            args=(log,),
            name="kinds",
            input="id",
            output=["number", "maybe", "fields", "array", "grid", "yes"],
            version=1,
            processes=place == "processes",
        ),
        offline.Step(
            describe,
            args=(log,),
            input=["id", "number", "maybe", "fields", "array", "grid", "yes"],
            output="seen",
            version=1,
        ),
    )
    source = [{"id": key, "text": f"row {key}"} for key in range(count)]
    began = time.perf_counter()
    if place == "ray":
        ray_steps.start_ray()
    started = time.perf_counter() - began
    for dest in dests:
        report = pipeline.run(
            source,
            dest,
            key="id",
            batch_size=batch_size,
            workers=workers,
            engine=offline.Ray(num_cpus=0.25) if place == "ray" else None,
            progress=progress,
            overwrite=True,  # of several destinations, the progress file knows the last one
            watch=False,
        )
    return {**told(report), "started_s": started}
