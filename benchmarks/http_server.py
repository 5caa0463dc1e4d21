"""How many requests a second does a server with a real model answer, with and without batching?

Run: python benchmarks/http_server.py [--check] [--quick] [--save]

A client in this process keeps 64 connections over the loopback busy, with one sentence at a time
each. Every server is a process of its own with all-MiniLM-L6-v2 on the CPU and batches of 32; ours
has `length=len`. Libraries for coroutines stand behind the same FastAPI application and uvicorn.
LitServe, BentoML and Ray Serve have servers of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import h11

from batched._commands.demo import first_sentences
from contest import (
    HERE,
    ROUNDS,
    Found,
    Unavailable,
    end,
    environment,
    interpreter,
    last_line,
    version,
)
from peers import OURS_BY_LENGTH, QUEUE, UNBATCHED, Peer, compared, without
from pictures import Panel
from report import Figure, Result, conclude, options

HOST, PATH = "127.0.0.1", "/embed"
CONNECTIONS = 64
STARTING = 60.0
"""Longest time until a server answers (s)."""
RETRY = 0.2
"""Time between two attempts to reach a server (s)."""
ENOUGH = 120.0
"""Longest time for all requests (s)."""
WIDTH = 384
"""Numbers in a vector."""
LEAST_SPEED_UP = 1.5
"""Least ratio of our rate to the rate without batching. Quick runs have no bound."""


def request(sentence: str) -> bytes:
    """Return a whole HTTP request."""
    connection = h11.Connection(h11.CLIENT)
    body = json.dumps({"texts": [sentence]}).encode()
    headers = [
        ("Host", HOST),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
    ]
    parts = (
        h11.Request(method="POST", target=PATH, headers=headers),
        h11.Data(data=body),
        h11.EndOfMessage(),
    )
    return b"".join(connection.send(part) or b"" for part in parts)


async def one_answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sentence: str
) -> bytes:
    """Return the body of the answer to one request.

    Raises:
        Unavailable: The server answered with an error, or not at all.
    """
    connection = h11.Connection(h11.CLIENT)
    # so that it awaits an answer
    connection.send(h11.Request(method="GET", target=PATH, headers=[("Host", HOST)]))
    connection.send(h11.EndOfMessage())
    writer.write(request(sentence))
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.Response) and event.status_code != 200:
            raise Unavailable(f"it answered with status {event.status_code}")
        elif isinstance(event, h11.EndOfMessage):
            return body
        elif isinstance(event, h11.ConnectionClosed):
            raise Unavailable("it closed a connection")


async def load(
    port: int, sentences: Sequence[str], connections: int = CONNECTIONS
) -> tuple[float, list[float]]:
    """Return the time of all requests together, and the latency of each (s)."""
    coming, latencies = iter(sentences), list[float]()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        for sentence in coming:
            began = time.perf_counter()
            body = await one_answer(reader, writer, sentence)
            latencies.append(time.perf_counter() - began)
            [vector] = json.loads(body)
            if len(vector) != WIDTH:
                raise Unavailable(f"it answered with {len(vector)} numbers, not {WIDTH}")
        writer.close()

    began = time.perf_counter()
    await asyncio.wait_for(asyncio.gather(*(client() for _ in range(connections))), ENOUGH)
    return time.perf_counter() - began, sorted(latencies)


@contextmanager
def serving(peer: Peer, settings: dict[str, Any]) -> Iterator[int]:
    """Start the server of a peer, and yield its port.

    Raises:
        Unavailable: The server does not answer.
    """
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [
        interpreter(peer),
        "-m",
        "peers.serving",
        peer.module,
        str(port),
        json.dumps(settings),
    ]
    with tempfile.TemporaryFile("w+") as said:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        process = subprocess.Popen(
            command, cwd=HERE, env=environment(peer), start_new_session=True, **pipes
        )
        try:
            _await_start(port, process, said)
            yield port
        finally:
            end(process)


def _await_start(port: int, process: subprocess.Popen[bytes], said: TextIO) -> None:
    deadline = time.monotonic() + STARTING
    while True:
        try:
            asyncio.run(load(port, ["a first sentence"], 1))
            return
        except (OSError, Unavailable) as reason:
            if process.poll() is not None:
                said.seek(0)
                raise Unavailable(last_line(said.read())) from None
            if time.monotonic() > deadline:
                raise Unavailable(f"no answer within {STARTING:g} s: {reason}") from None
            time.sleep(RETRY)


def served(peer: Peer, settings: dict[str, Any], sentences: Sequence[str]) -> dict[str, float]:
    """Return requests per second, and percentiles of latency in milliseconds, after one request of
    each connection.
    """
    with serving(peer, settings) as port:
        asyncio.run(load(port, sentences[:CONNECTIONS]))
        took, latencies = asyncio.run(load(port, sentences))
    return {"rate": len(sentences) / took} | {
        f"p{q}": 1e3 * latencies[len(latencies) * q // 100] for q in (50, 99)
    }


def figures(found: Found, least: float | None) -> list[Figure]:
    """Return requests per second and latencies relative to no batching, ours with bounds."""
    units = {"rate": "requests/s", "p50": "ms", "p99": "ms"}
    return [
        Figure(
            row if name == "rate" else f"{row}, {name}",
            runs,
            units[name],
            Figure(UNBATCHED.name, found.runs["server", UNBATCHED.name, name], units[name]),
            at_least=least if (row, name) == (OURS_BY_LENGTH.name, "rate") else None,
        )
        for wanted in units
        for (_, row, name), runs in found.runs.items()
        if name == wanted
    ]


def panels(found: Found) -> list[Panel]:
    """Return requests a second, the best first, and latencies in the same order."""

    def median(row: str, name: str) -> float:
        return statistics.median(found.runs["server", row, name])

    ordered = sorted({row for _, row, _ in found.runs}, key=lambda row: -median(row, "rate"))
    titles = {
        "rate": "requests a second (more is better)",
        "p99": "p99 latency in ms (less is better)",
    }
    return [
        Panel(title, {row: [median(row, name)] for row in ordered})
        for name, title in titles.items()
    ]


def measured(arguments: argparse.Namespace) -> Result:
    sentences = first_sentences()[: 128 if arguments.quick else 600]
    found = Found()
    rounds = 1 if arguments.quick else 3 if arguments.check else 5
    peers = (OURS_BY_LENGTH, UNBATCHED, QUEUE, *compared(arguments, servers=True))
    for _ in range(rounds):
        for peer in peers:
            for row, settings in peer.labels().items():
                if row in found.missing:
                    continue
                try:
                    if peer.requirement:
                        found.versions[peer.package] = version(peer)
                    found.add("server", row, served(peer, dict(settings), sentences))
                except (OSError, Unavailable) as reason:
                    if not peer.requirement:
                        raise  # without ours, or the baseline, there is no result
                    found.missing[row] = str(reason) or type(reason).__name__
    return Result(
        figures(found, None if arguments.quick else LEAST_SPEED_UP),
        ("fastapi", "uvicorn", "torch", "sentence-transformers", "transformers"),
        versions=found.versions,
        missing=without(arguments, servers=True) | found.missing,
        notes=[
            ROUNDS.format(rounds),
            *(f"{peer.name}: {peer.served_by}." for peer in peers),
        ],
        panels=panels(found),
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
