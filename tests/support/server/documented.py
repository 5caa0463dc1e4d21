"""A server: the example of docs/servers.md, or the module that the variable EXAMPLE names.

Two paths are added: /-/state returns statistics, and /-/fill fills the queue. SIGUSR1 closes a gate
for the batch function, SIGUSR2 opens it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from pages import blocks

BOUND = 120.0
"""Seconds after which the batch function stops waiting at the gate."""
PAGE = Path(__file__).parents[3] / "docs/servers.md"
EXAMPLE = os.environ["EXAMPLE"]

names: dict[str, Any]
if EXAMPLE == "page":
    example = blocks(PAGE.read_text(), "python")[0][1]
    names = {"__name__": "example"}
    exec(example, names)
else:
    names = vars(importlib.import_module(f".{EXAMPLE}", __package__))
gate = threading.Event()
held: list[asyncio.Task[Any]] = []


def say(line: str) -> None:
    """Write `line` at once: workers share the output, and `print` may write a line in parts."""
    os.write(1, f"{line}\n".encode())


class Held(str):
    __slots__ = ()

    def upper(self) -> str:
        say("held")
        assert gate.wait(BOUND), "nobody opened the gate"
        return super().upper()


def hold(*texts: str) -> None:
    held.append(asyncio.create_task(names["shout"](list(texts))))


def close_gate() -> None:
    gate.clear()
    hold(Held("held"))


def state() -> dict[str, int]:
    stats = dataclasses.asdict(names["shout"].stats)
    counted = ("calls", "cancelled", "queue_size", "in_flight", "total_processed", "total_batches")
    return {
        "pid": os.getpid(),
        **{name: stats[name] for name in counted},
    }


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, close_gate)
        loop.add_signal_handler(signal.SIGUSR2, gate.set)
        say(f"pid {os.getpid()}")
        await names["app"](scope, receive, send)
        say("closed")  # in good order
    elif scope.get("path", "").startswith("/-/"):
        if scope["path"] == "/-/fill":
            hold(*["fill"] * names["shout"].options["max_queue_size"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(state()).encode()})
    else:
        await names["app"](scope, receive, send)
