"""Mosec: its server forms batches for worker processes."""

from __future__ import annotations

import sys
from typing import Any

import mosec

from peers.model import BATCH_SIZE, load

WAIT_MS = 5


class Embedder(mosec.Worker):  # type: ignore[misc]  # its types are not here
    def __init__(self) -> None:
        self.encode = load()

    def forward(self, data: list[dict[str, Any]]) -> list[list[list[float]]]:
        return [[row.tolist()] for row in self.encode([body["texts"][0] for body in data])]


def serve(port: int) -> None:
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    server = mosec.Server()
    server.append_worker(Embedder, max_batch_size=BATCH_SIZE, max_wait_time=WAIT_MS, route="/embed")
    server.run()
