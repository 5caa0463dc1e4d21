"""A server: the example of docs/servers.md, and two paths of its own.

/-/state returns statistics, and /-/fill fills the queue. SIGUSR1 closes a gate for the batch
function, SIGUSR2 opens it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import threading
from typing import Any

from pages import ROOT, blocks

BOUND = 120.0
"""Seconds after which the batch function stops waiting at the gate."""

example = next(iter(blocks((ROOT / "docs/servers.md").read_text(), "python")))[1]
namespace: dict[str, Any] = {"__name__": "example"}
exec(example, namespace)
gate = threading.Event()
held: list[asyncio.Task[Any]] = []


class Held(str):
    __slots__ = ()

    def upper(self) -> str:
        print("held", flush=True)
        assert gate.wait(BOUND), "nobody opened the gate"
        return super().upper()


def hold(*texts: str) -> None:
    held.append(asyncio.create_task(namespace["shout"](list(texts))))


def close_gate() -> None:
    gate.clear()
    hold(Held("held"))


def state() -> dict[str, int]:
    stats = dataclasses.asdict(namespace["shout"].stats)
    counted = ("calls", "cancelled", "queue_size", "in_flight", "total_processed")
    return {name: stats[name] for name in counted}


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, close_gate)
        loop.add_signal_handler(signal.SIGUSR2, gate.set)
        await namespace["app"](scope, receive, send)
        print("closed", flush=True)  # in good order
    elif scope.get("path", "").startswith("/-/"):
        if scope["path"] == "/-/fill":
            hold(*["fill"] * namespace["shout"].options["max_queue_size"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(state()).encode()})
    else:
        await namespace["app"](scope, receive, send)
