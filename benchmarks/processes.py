"""How much does a call to a model process cost, and how much memory does one model process save?

Run: python benchmarks/processes.py [--check] [--quick] [--save] [--servers]

A function that returns its items is called through `batched.connect` and within this process, in
turns, so that only the way of a call is measured. A caller that is alone is measured on all cores
and on one, where its time depends little on other processes and on the placement of threads.

`--servers` (Linux) also measures a FastAPI application with all-MiniLM-L6-v2 on the CPU, one thread
of torch in each process. Uvicorn runs it with 1, 2 and 4 workers, which connect to one model
process, or load a copy of the model each. Clients in this process keep 128 connections busy with
one sentence at a time each. The baseline is one process with its own copy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

import batched
from report import Figure, Result, conclude, parser
from traffic import async_spans, by_coroutines, by_threads, rate, spans

HERE = Path(__file__).parent
LOCALLY = "in this process"

BATCH_SIZE = 64
CALLERS = 64
"""Threads or coroutines that call again as soon as they are answered."""
WARM_UP, CALLS = 20, 200
"""Calls of each of these callers: before the measurement, and in it."""
LONE_WARM_UP, LONE_CALLS = 200, 2000
"""Calls of a caller that is alone: before the measurement, and in it."""
TEXT = "How long does a call take that does nothing?"
ARRAY = 150_000
"""Bytes of an array: a small picture."""
CALLERS_WITH_ARRAYS = (16, 64)
CALLS_WITH_ARRAYS, WARM_UP_WITH_ARRAYS = 4096, 4
"""Calls of all callers, and calls of each that do not count."""

MOST_ROUND_TRIP = 7
"""Most time of a call on one core, as a multiple of a call within the process."""
LEAST_OF_THREADS, LEAST_OF_COROUTINES = 0.4, 0.2
"""Least calls a second of all callers, as a share of their calls within the process."""

HOST = "127.0.0.1"
WORKERS = (1, 2, 4)
CLIENTS = 128
LEAST_SHARE = 0.95
"""Least requests a second with a model process, as a share of one process with its own copy."""
STARTING = 120.0
"""Longest time until all workers serve (s)."""
STARTED = "Application startup complete"
"""Line that uvicorn writes for each worker that serves."""
SPEED_UP = 3.0
"""Time of the clients before the measurement (s)."""

EMBEDDER = """\
import batched
import torch
from peers.model import BATCH_SIZE, load

torch.set_num_threads(1)
embed = batched.aio.dynamically(batch_size=BATCH_SIZE, length=len)(load(batch_size=BATCH_SIZE))
"""
APP = """\
import contextlib
import os

import batched
from fastapi import FastAPI

if CONNECTED:
    embed = batched.aio.connect("embedder:embed")
else:
    from embedder import embed


@contextlib.asynccontextmanager
async def lifespan(app):
    async with embed:
        await embed("warm up")
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/embed")
async def endpoint(text: str) -> list[float]:
    return (await embed(text)).tolist()


@app.get("/stats")
def stats():  # in a thread, because the model process is asked
    found = embed.stats
    process = "model process" if CONNECTED else os.getpid()
    return {"process": process, "items": found.total_processed, "batches": found.total_batches}
"""

Call = Callable[[Any], Any]
AsyncCall = Callable[[Any], Awaitable[Any]]
Case = tuple[int, bool]
"""Number of workers, and whether they are connected to one model process."""


def identity(items: list[str | np.ndarray]) -> list[Any]:
    return items


same = batched.dynamically(batch_size=BATCH_SIZE)(identity)


@contextmanager
def model_process() -> Iterator[str]:
    """Serve `same` in a process, and yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "same.socket"))
        command = [sys.executable, "-m", "batched", "serve", "processes:same", "--socket", path]
        with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                if not process.stdout.readline():  # it writes a line once it listens
                    raise RuntimeError("the model process has ended")
                yield f"unix:{path}"
            finally:
                process.kill()


def lone_thread(call: Call) -> float:
    """Return the median time of a call (us)."""
    taken = list(spans(lambda: call(TEXT), LONE_WARM_UP + LONE_CALLS))
    return 1e6 * statistics.median(taken[LONE_WARM_UP:])


def lone_coroutine(call: AsyncCall) -> float:
    """Return the median time of a call (us)."""
    taken = asyncio.run(async_spans(lambda: call(TEXT), LONE_WARM_UP + LONE_CALLS))
    return 1e6 * statistics.median(taken[LONE_WARM_UP:])


def many_threads(call: Call) -> float:
    """Return the calls a second of threads."""
    texts = [TEXT] * (CALLERS * (WARM_UP + CALLS + 1))
    return rate(by_threads(call, CALLERS, texts), CALLERS, WARM_UP)


def many_coroutines(call: AsyncCall) -> float:
    """Return the calls a second of coroutines."""
    texts = [TEXT] * (CALLERS * (WARM_UP + CALLS + 1))
    return rate(asyncio.run(by_coroutines(call, CALLERS, texts)), CALLERS, WARM_UP)


def with_arrays(callers: int, call: AsyncCall) -> float:
    """Return the calls a second of coroutines with one of 64 arrays at a time each."""
    arrays = [np.full(ARRAY, number, np.uint8) for number in range(64)] * (CALLS_WITH_ARRAYS // 64)
    answers = asyncio.run(by_coroutines(call, callers, arrays))
    return rate(answers, callers, WARM_UP_WITH_ARRAYS)


def floors(rounds: int) -> list[Figure]:
    """Measure the calls of a function that does nothing."""
    steps: list[tuple[Figure, Callable[[], float]]] = []

    def step(name: str, unit: str, measure: Callable[[], float], **rest: Any) -> Figure:
        steps.append((Figure(name, [], unit, **rest), measure))
        return steps[-1][0]

    from overhead import one_core  # here, because the model process needs none of its packages

    with ExitStack() as end:
        with one_core():
            beside = end.enter_context(model_process())
        shared = end.enter_context(model_process())

        def pair(connect: Any, address: str, decorate: Any) -> tuple[Any, Any]:
            """Return the same function in the process at `address` and in this process."""
            connected = connect(address)
            end.callback(connected.shutdown)
            return connected, decorate(batch_size=BATCH_SIZE)(identity)

        def within(place: Callable[[], Any], measure: Callable[[Any], float], call: Any) -> float:
            with place():
                return measure(call)

        figures: list[Figure] = []
        for kind, lone, many, connect, decorate, least in (
            (
                "thread",
                lone_thread,
                many_threads,
                batched.connect,
                batched.dynamically,
                LEAST_OF_THREADS,
            ),
            (
                "coroutine",
                lone_coroutine,
                many_coroutines,
                batched.aio.connect,
                batched.aio.dynamically,
                LEAST_OF_COROUTINES,
            ),
        ):
            for name, address, place, most in (
                (f"round trip of a {kind}, one core", beside, one_core, MOST_ROUND_TRIP),
                (f"round trip of a {kind}", shared, nullcontext, None),
            ):
                connected, local = pair(connect, address, decorate)
                here = step(LOCALLY, "us", partial(within, place, lone, local))
                there = partial(within, place, lone, connected)
                figures.append(step(name, "us", there, baseline=here, at_most=most))
            measures: dict[str, tuple[Callable[[Any], float], float | None]] = {
                f"{CALLERS} {kind}s": (many, least)
            }
            if kind == "coroutine":
                for callers in CALLERS_WITH_ARRAYS:
                    name = f"{callers} coroutines with arrays of {ARRAY // 1000} kB"
                    measures[name] = partial(with_arrays, callers), None
            for name, (measure, share) in measures.items():
                connected, local = pair(connect, shared, decorate)
                here = step(LOCALLY, "calls/s", partial(measure, local))
                there = partial(measure, connected)
                figures.append(step(name, "calls/s", there, baseline=here, at_least=share))
        for _ in range(rounds):
            for figure, take in steps:
                figure.runs.append(take())
    return figures


def title(case: Case) -> str:
    workers, connected = case
    how = "connected" if connected else "a copy each"
    return f"{workers} worker{'s' * (workers > 1)}, {how}"


@contextmanager
def serving(case: Case) -> Iterator[tuple[int, int]]:
    """Run the application until all workers serve. Yield its port and its process.

    Raises:
        RuntimeError: it does not serve.
    """
    workers, connected = case
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "embedder.py").write_text(EMBEDDER)
        Path(folder, "app.py").write_text(f"CONNECTED = {connected}\n{APP}")
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([folder, str(HERE), str(HERE.parent)]),
            "TMPDIR": folder,  # of the socket of the model process
        }
        command = [sys.executable, "-m", "uvicorn", "app:app", "--host", HOST, "--port", str(port)]
        command += ["--workers", str(workers), "--no-access-log"]
        log = Path(folder, "log")
        with (
            log.open("w") as said,
            subprocess.Popen(command, cwd=folder, env=environment, stderr=said) as process,
        ):
            try:
                deadline = time.monotonic() + STARTING
                while log.read_text().count(STARTED) < workers:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(
                            f"{title(case)}: the server did not start: {log.read_text()}"
                        )
                    time.sleep(0.1)
                yield port, process.pid
            finally:
                for pid in tree(process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def tree(root: int) -> list[int]:
    """Return a process and the processes that it started, and so on."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


def memory(processes: list[int]) -> tuple[float, int]:
    """Return the memory of the processes (MB), and the number of loaded models.

    Memory that several processes share counts once.
    """
    size, models = 0, 0
    for pid in processes:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        size += int(re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[0])
        models += "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return size * 1024 / 1e6, models


async def answer(link: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str) -> bytes:
    """Return the body of the answer to one request.

    Raises:
        RuntimeError: the answer is an error.
    """
    reader, writer = link
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    [length] = re.findall(rb"content-length: (\d+)", head)
    body = await reader.readexactly(int(length))
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(f"{path} was answered by {body!r}")
    return body


async def load(port: int, seconds: float) -> dict[str, float]:
    """Keep all connections busy. Return requests a second and the mean size of batches."""
    from batched._commands.demo import first_sentences  # it needs packages of the demo

    links = [await asyncio.open_connection(HOST, port) for _ in range(CLIENTS)]
    paths = [f"/embed?text={quote(sentence)}" for sentence in first_sentences()]
    begin = time.perf_counter() + SPEED_UP
    end = begin + seconds
    answered = 0

    async def client(number: int) -> None:
        nonlocal answered
        for path in itertools.cycle(paths[number:] + paths[:number]):
            await answer(links[number], path)
            now = time.perf_counter()
            answered += begin <= now < end
            if now >= end:
                return

    await asyncio.gather(*map(client, range(CLIENTS)))
    found = [json.loads(await answer(link, "/stats")) for link in links]
    batchers = {each["process"]: each for each in found}.values()
    for _, writer in links:
        writer.close()
    mean = sum(each["items"] for each in batchers) / sum(each["batches"] for each in batchers)
    return {"requests/s": answered / seconds, "items": mean}


def served(rounds: int, seconds: float) -> list[Figure]:
    """Measure the application in all cases, in turns."""
    alone = 1, False
    cases = [alone, *((n, True) for n in WORKERS), *((n, False) for n in WORKERS[1:])]
    runs: dict[tuple[Case, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for case in cases:
            with serving(case) as (port, process):
                found = asyncio.run(load(port, seconds))
                found["MB"], found["models"] = memory(tree(process))
            for unit, value in found.items():
                runs[case, unit].append(value)
    titles = {"requests/s": "", "items": ", mean batch", "MB": ", memory", "models": ", loaded"}
    return [
        Figure(
            f"{title(case)}{about}",
            runs[case, unit],
            unit,
            Figure(title(alone), runs[alone, unit], unit),
            at_least=LEAST_SHARE if case[1] and unit == "requests/s" else None,
        )
        for unit, about in titles.items()
        for case in cases
    ]


def measured(arguments: argparse.Namespace) -> Result:
    rounds = 5 if arguments.quick else 15
    figures = floors(rounds)
    notes = [f"Calls that do nothing: medians of {rounds} rounds, in which all took their turns."]
    if not arguments.servers:
        return Result(figures, ["numpy"], notes=notes)
    rounds, seconds = (2, 5.0) if arguments.quick else (5, 10.0)
    notes += [
        f"Servers: medians of {rounds} rounds of {seconds:g} s, in which all took their turns.",
        "The memory is the sum of the proportional set sizes (PSS) of all processes.",
    ]
    packages = ["numpy", "fastapi", "uvicorn", "torch", "sentence-transformers", "transformers"]
    return Result([*figures, *served(rounds, seconds)], packages, notes=notes)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--servers", action="store_true", help="also servers with a real model")
    arguments = made.parse_args()
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
