"""Command demo --offline: one command embeds a CSV file, is killed half-way, and runs once more."""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet

from ...offline import export
from ..display import new_console
from .online import Vector, choose_sentences, compare, load

POLL_INTERVAL = 0.01
"""Time between two looks at the progress of the first run (s)."""


class Embedder:
    """Batch function that appends each computed sentence to a file."""

    def __init__(self, model: str | None, computed: str) -> None:
        self._encode = load(model)
        self._computed = computed

    def __call__(self, texts: list[str]) -> Vector:
        vectors = self._encode(texts)
        with open(self._computed, "a", encoding="utf-8") as computed:
            computed.writelines([f"{text}\n" for text in texts])
        return vectors


def offline_demo(args: argparse.Namespace) -> int:
    """Show a run that is killed and started again. Return the exit status.

    The status is 1 if a row was lost or computed twice, or if a vector is wrong; else 0.

    Raises:
        argparse.ArgumentError: there are fewer sentences than the argument asks for.
        ModuleNotFoundError: a package of the extra is missing.
    """
    console = new_console()
    texts = choose_sentences(args.sentences)
    with console.status("Embedding the sentences directly, to compare with"):
        direct = load(args.model)(texts)
    with tempfile.TemporaryDirectory(prefix="batched-demo-") as name:
        source, result, log = [Path(name, file) for file in ("in.csv", "out.parquet", "computed")]
        with open(source, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
        log.touch()
        arguments = shlex.quote(json.dumps([args.model, str(log)]))
        command = (
            f"run {__name__}:Embedder {source} {result} --input text --output vector --key id "
            f"--batch-size {args.batch_size} --args {arguments}"
        )

        def start(command: str) -> subprocess.Popen[bytes]:
            console.print(f"\n$ python -m batched {command}", style="bold")
            return subprocess.Popen([sys.executable, "-m", "batched", *shlex.split(command)])

        def computed() -> list[str]:
            return log.read_text(encoding="utf-8").splitlines()

        killed = start(command)
        while killed.poll() is None and 3 * len(computed()) < len(texts):
            time.sleep(POLL_INTERVAL)
        killed.kill()
        killed.wait()
        if console.is_terminal:  # the run had no time to remove its bar
            console.show_cursor()
            console.print()
        first = computed()
        keys = pyarrow.parquet.read_table(export(result))["id"].to_pylist()
        committed = {texts[int(key)] for key in keys}
        console.print(
            f"Killed (SIGKILL): {len(committed):,} rows committed, "
            f"{len(set(first) - committed):,} computed but not yet committed"
        )
        if start(f"status {result}").wait() or start(command).wait():
            return 1
        second = computed()[len(first) :]
        table = pyarrow.parquet.read_table(result)
    twice = len(committed & set(second))
    console.print(
        f"\nComputed in the first run {len(first):,}, in the second {len(second):,}\n"
        f"Of the {len(committed):,} committed rows, {twice:,} were computed again"
    )
    whole = table["text"].to_pylist() == texts
    order = "in the order of the CSV" if whole else "WRONG"
    console.print(f"Result: {table.num_rows:,} rows, {order}")
    vectors = np.array(table["vector"].to_pylist(), np.float32)
    equal = whole and compare(console, "Vectors of the result and of `encode`", vectors, direct)
    return 0 if equal and not twice else 1
