"""Demo of an offline run, `python -m batched demo --offline`. One command embeds a CSV file, is
killed half-way, and is started again.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet
from rich.console import Console

from ...offline.progress.store import Progress
from ..display import new_console
from .online import LEAST_COSINE, Vector, first_sentences, load

MODEL, COMPUTED = "BATCHED_DEMO_MODEL", "BATCHED_DEMO_COMPUTED"
"""Environment variables: the model, and the log of computed sentences."""

POLL_INTERVAL = 0.01
"""Time between two looks at the progress of the first run (s)."""


class Embedder:
    """Batch function that logs each sentence after its computation."""

    def __init__(self) -> None:
        self._encode = load(os.environ.get(MODEL))

    def __call__(self, texts: list[str]) -> Vector:
        vectors = self._encode(texts)
        with open(os.environ[COMPUTED], "a", encoding="utf-8") as computed:
            computed.writelines([f"{text}\n" for text in texts])
        return vectors


def offline_demo(model: str | None, *, sentences: int, batch_size: int) -> int:
    """Show a run that is killed and started again. Return the exit status.

    The status is 1 if a row was lost or computed twice, or if a vector is wrong; else 0.

    Raises:
        argparse.ArgumentError: there are fewer sentences than the argument asks for.
        ModuleNotFoundError: a package of the extra is missing.
    """
    console = new_console()
    texts = first_sentences()[:sentences]
    if sentences > len(texts):
        raise argparse.ArgumentError(
            None, f"the standard library has {len(texts):,} sentences to offer, not {sentences:,}"
        )
    with tempfile.TemporaryDirectory(prefix="batched-demo-") as folder, console.status("") as note:
        note.update("Embedding the sentences directly, to compare with")
        direct = load(model)(texts)
        note.stop()
        return _Story(console, Path(folder), texts, model, batch_size).tell(direct)


class _Story:
    """A run that is killed, and the run that continues it, in a temporary folder."""

    def __init__(
        self, console: Console, folder: Path, texts: list[str], model: str | None, batch_size: int
    ) -> None:
        self._console = console
        self._folder = folder
        self._texts = texts
        command = (
            f"run {__name__}:Embedder sentences.csv vectors.parquet --input text --output vector "
            f"--key id --batch-size {batch_size}"
        )
        self._command = command
        path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        if model is not None:
            here = Path(model).expanduser()
            self._environment[MODEL] = str(here.absolute()) if here.exists() else model

    def tell(self, direct: Vector) -> int:
        """Run the demo. Return the exit status."""
        say, texts = self._console.print, self._texts
        with open(self._folder / "sentences.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
        say(f"sentences.csv has {len(texts):,} sentences", style="bold")
        killed = self._start(self._command, "first")
        while killed.poll() is None and 3 * len(self._computed("first")) < len(texts):
            time.sleep(POLL_INTERVAL)
        killed.kill()
        killed.wait()
        if self._console.is_terminal:  # where the bar had no time to leave
            self._console.show_cursor()
            say()
        first, committed = self._computed("first"), self._committed()
        lost = len(set(first) - committed)
        say(
            f"Killed (SIGKILL): {len(committed):,} rows committed, {lost:,} computed but not yet "
            "committed"
        )
        if self._start("status vectors.parquet").wait():
            return 1
        if self._start(self._command, "second").wait():
            return 1
        second = self._computed("second")
        twice = len(committed & set(second))
        say(f"\nComputed in the first run {len(first):,}, in the second {len(second):,}")
        say(f"Of the {len(committed):,} committed rows, {twice:,} were computed again")
        table = pyarrow.parquet.read_table(self._folder / "vectors.parquet")
        whole = table["text"].to_pylist() == texts
        say(f"Result: {table.num_rows:,} rows, {'in the order of the CSV' if whole else 'WRONG'}")
        if not whole or twice:
            return 1
        vectors = np.array(table["vector"].to_pylist(), np.float64)
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(direct, axis=1)
        cosine = float(np.min(np.sum(vectors * direct, axis=1) / lengths))
        verdict = "equal" if cosine > LEAST_COSINE else "NOT EQUAL"
        say(f"Vectors are {verdict} to those of `encode`: smallest cosine {cosine:.6f}")
        return 0 if cosine > LEAST_COSINE else 1

    def _start(self, command: str, computed: str = "") -> subprocess.Popen[bytes]:
        """Start a command that logs the computed sentences. Return its process."""
        self._console.print(f"\n$ python -m batched {command}", style="bold")
        return subprocess.Popen(
            [sys.executable, "-m", "batched", *shlex.split(command)],
            cwd=self._folder,
            env={**self._environment, COMPUTED: str(self._folder / computed)},
        )

    def _computed(self, name: str) -> list[str]:
        """Return the sentences that a run has computed."""
        path = self._folder / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def _committed(self) -> set[str]:
        """Return the sentences with a committed vector."""
        keys = [str(number) for number in range(len(self._texts))]  # values of a CSV are strings
        with closing(Progress(self._folder / "vectors.parquet.progress")) as progress:
            found = progress.committed(keys)
        return {self._texts[int(key)] for (key, _), row in found.items() if row.status == "ok"}
