"""How much time does a run over a dataset take that loses nothing? It is compared with the time of
its function, with a bare loop that reads, hashes and commits the same rows, and with libraries.

Run: python benchmarks/offline.py [--check] [--quick] [--save]

The process is warm: imports, and a first small run, are not measured. Runs of ours and of its
floors take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batched import offline
from batched._commands.demo import first_sentences
from batched.offline.identity.inputs import hash_inputs
from batched.offline.progress.commit import Commit
from batched.offline.progress.store import Progress
from batched.offline.sources.base import WINDOW_ROWS
from batched.offline.sources.keys import keys_of
from batched.offline.sources.opening import open_source
from batched.offline.types.columns import Columns
from contest import ROUNDS, Unavailable, end, environment, interpreter, last_line, version
from peers import Peer
from peers.maps import BATCH_SIZE, SECONDS, marked
from peers.model import load
from report import Figure, Result, conclude, options

HERE = Path(__file__).parent
MAPPING = 300.0
"""Longest time of a map, with the start of its process (s)."""
LOOK = 0.01
"""Time between two looks at the marks of a map that is to be killed (s)."""


@dataclass(frozen=True)
class Sizes:
    """Rows, batches and rounds of all that is measured."""

    rounds: int = 5
    sentences: int = 2_000
    batches: int = 150
    noop_rows: int = 200_000
    few_rows: int = 100_000
    many_rows: int = 1_000_000
    mapped_rows: int = 20_000
    bounded: bool = True
    """Whether runs are long enough that their start and end are a small part of them."""

    @property
    def fewer_rounds(self) -> int:
        return max(1, self.rounds // 2)


QUICK = Sizes(2, 320, 30, 40_000, 20_000, 200_000, 5_000, bounded=False)

SLEEP = 0.05
"""Time of a batch of which overhead is a share (s)."""
MEGABYTES = 40.0
"""By which the memory of a run may grow between `few_rows` and `many_rows`."""
RESUMED = 15.0
"""Time in which a finished run over `many_rows` must be found finished (s)."""

LIBRARIES: dict[str, tuple[Peer, str]] = {
    "datasets.map": (Peer("datasets", "datasets", ""), "`Dataset.map(batched=True)`"),
    "polars": (Peer("polars", "polars", ""), "`LazyFrame.map_batches` into `sink_parquet`"),
    "ray data": (
        Peer("ray data", "ray", "", "ray[serve]"),
        "`Dataset.map_batches` with one actor on a local Ray",
    ),
}
"""Libraries that map, and their calls."""

NOTES = (
    "The ideal is the time of the function: of the slowest step, and of one batch of the other.",
    "Bare loops read the file in the windows of a run, hash the texts, note the order of the keys.",
    "They commit to a progress file by the code of a run, in one thread; they write no result.",
    "Memory is the most that a process of its own had. A finished run has its result.",
    "No-op is bounded at 0.33: a run also forms batches, and writes; processes had 0.35 to 0.42.",
    "MiniLM is bounded at 0.9: a run also commits each batch; the direct call alone varies by 5 %.",
    "50 ms is bounded at 1.03: a run also opens its progress file, and writes its result.",
    "Memory is bounded at 40 MB, the highest run rounded up; what grows was not measured.",
)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="batched-offline-") as name:
        yield Path(name)


def write_rows(path: Path, texts: list[str]) -> None:
    """Write a Parquet file of texts, with ids."""
    ids = [f"row-{number:08}" for number in range(len(texts))]
    pq.write_table(pa.table({"id": ids, "text": texts}), path)


def texts(rows: int) -> list[str]:
    """Short texts of mixed length, each another one."""
    return [f"text {number} of all{' and more' * (number % 7)}" for number in range(rows)]


def timed(step: Callable[..., object], *arguments: object) -> float:
    """Time that it takes (s)."""
    began = time.perf_counter()
    step(*arguments)
    return time.perf_counter() - began


def noop(items: list[str]) -> list[str]:
    return items


def run_noop(source: Path, dest: Path) -> None:
    offline.run(
        noop,
        str(source),
        str(dest),
        input="text",
        output="result",
        key="id",
        batch_size=BATCH_SIZE,
        watch=False,
    )


def bare_loop(source: Path, dest: Path, together: int) -> int:
    """Do the least work of a run, and return the number of rows.

    The loop reads the file in the windows of a run, hashes the texts, notes the order of the keys,
    and commits each row with its text as the result, `together` rows at once. It looks nothing up,
    forms no batches, calls nothing, and writes no result.
    """
    progress = Progress(dest)
    opened = open_source(str(source), spool=dest.with_suffix(".spool"))
    columns, rows = Columns(["result"]), 0
    try:
        for window in opened.windows(["id", "text"]):
            keys = [key for key in keys_of(window, "id") if key is not None]
            hashes = hash_inputs(window, ["text"])
            progress.note_source(window.first, keys)
            values = window.values("text")
            for first in range(0, window.size, together):
                some = slice(first, first + together)
                found = columns.read(values[some])
                done = list(zip(keys[some], hashes[some], strict=True))
                progress.commit([Commit(0, done, found)])
            rows += window.size
        progress.end_source(rows)
    finally:
        progress.close()
    return rows


# a real model


def model_figures(sizes: Sizes) -> list[Figure]:
    """Measure sentences a second from Parquet to Parquet, and those of one direct call."""
    encode = load(batch_size=BATCH_SIZE)
    sentences = first_sentences()[: sizes.sentences]
    ours, direct = [], []

    def embed_all(source: Path, dest: Path) -> None:
        table = pq.read_table(source)
        vectors = encode(table["text"].to_pylist())  # it sorts them by length
        flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        pq.write_table(table.append_column("vector", flat), dest, compression="zstd")

    def embed_rows(source: Path, dest: Path) -> None:
        offline.run(
            encode,
            str(source),
            str(dest),
            input="text",
            output="vector",
            key="id",
            version=1,
            batch_size=BATCH_SIZE,
            length=len,
            watch=False,
        )

    with folder() as home:
        source = home / "sentences.parquet"
        write_rows(source, sentences[:BATCH_SIZE])
        embed_all(source, home / "warm-direct.parquet")
        embed_rows(source, home / "warm-ours.parquet")
        write_rows(source, sentences)
        for number in range(sizes.rounds):
            took = timed(embed_rows, source, home / f"ours-{number}.parquet")
            ours.append(len(sentences) / took)
            took = timed(embed_all, source, home / f"direct-{number}.parquet")
            direct.append(len(sentences) / took)
    floor = Figure(f"one direct, sorted `encode` of batches of {BATCH_SIZE}", direct, "sentences/s")
    least = 0.9 if sizes.bounded else None
    name = f"MiniLM, {len(sentences):,} sentences, Parquet to Parquet"
    return [Figure(name, ours, "sentences/s", floor, at_least=least)]


# a function that takes 50 ms


@dataclass
class Sleeper:
    """A batch function that sleeps, and knows how long."""

    seconds: float
    slept: list[float] = field(default_factory=list)

    def __call__(self, items: list[str]) -> list[str]:
        self.slept.append(timed(time.sleep, self.seconds))
        return items


def sleeping(seconds: float, **settings: Any) -> tuple[Sleeper, offline.Step]:
    sleeper = Sleeper(seconds)
    given = {"input": "text", "output": "result", "name": "sleep", "version": 1}
    return sleeper, offline.Step(sleeper, **{**given, **settings})


def run_steps(steps: Sequence[offline.Step], source: Path, dest: Path) -> None:
    pipeline = offline.Pipeline(*steps)
    pipeline.run(str(source), str(dest), key="id", batch_size=BATCH_SIZE, watch=False)


def least_time(slept: Sequence[Sequence[float]]) -> float:
    """Return the time of all batches of the slowest step, and one of each other step (s)."""
    *others, slowest = sorted(slept, key=sum)
    return sum(slowest) + sum(batches[0] for batches in others)


def overhead(
    source: Path, dest: Path, seconds: float, settings: list[dict[str, Any]]
) -> tuple[float, float]:
    """Time of a run, and the least that its function allows (s)."""
    sleepers, steps = zip(*(sleeping(seconds, **each) for each in settings), strict=True)
    took = timed(run_steps, steps, source, dest)
    return took, least_time([sleeper.slept for sleeper in sleepers])


OVERHEADS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "by length": [{"length": len}],
    "two streamed steps": [
        {"name": "first", "output": "middle"},
        {"name": "second", "input": "middle"},
    ],
}
"""Settings of the steps."""


def overhead_figures(sizes: Sizes) -> list[Figure]:
    """Measure times of runs, and the least possible times."""
    runs: dict[str, list[float]] = {name: [] for name in OVERHEADS}
    least: dict[str, list[float]] = {name: [] for name in OVERHEADS}
    with folder() as home:
        source, numbers = home / "rows.parquet", itertools.count()
        write_rows(source, texts(BATCH_SIZE))
        overhead(source, home / "warm.parquet", 0, OVERHEADS["by length"])
        write_rows(source, texts(sizes.batches * BATCH_SIZE))
        for _ in range(sizes.fewer_rounds):
            for name, settings in OVERHEADS.items():
                dest = home / f"{next(numbers)}.parquet"
                took, floor = overhead(source, dest, SLEEP, settings)
                runs[name].append(took)
                least[name].append(floor)
    most = 1.03 if sizes.bounded else None
    title = f"{sizes.batches} batches of {1e3 * SLEEP:g} ms"
    return [
        Figure(f"{title}, {name}", runs[name], "s", Figure("ideal", least[name], "s"), at_most=most)
        for name in OVERHEADS
    ]


# a function that takes no time


def noop_figures(sizes: Sizes) -> list[Figure]:
    """Return rows a second of a run, and of a bare loop."""
    ours: list[float] = []
    bare: list[float] = []
    rows = sizes.noop_rows
    with folder() as home:
        source = home / "rows.parquet"
        write_rows(source, texts(BATCH_SIZE))
        run_noop(source, home / "warm.parquet")
        write_rows(source, texts(rows))
        for number in range(sizes.rounds):
            ours.append(rows / timed(run_noop, source, home / f"{number}.parquet"))
            dest = home / f"{number}.progress"
            bare.append(rows / timed(bare_loop, source, dest, WINDOW_ROWS))
    floor = Figure(f"bare loop that commits {WINDOW_ROWS:,} at once", bare, "rows/s")
    least = 0.33 if sizes.bounded else None
    return [Figure(f"no-op, {rows:,} rows", ours, "rows/s", floor, at_least=least)]


# many rows


def in_new_process(function: str, *arguments: object) -> dict[str, float]:
    """Return the answers of a function of this module, which runs in a process of its own."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import offline; "
        "print(json.dumps(getattr(offline, sys.argv[2])(*sys.argv[3:])))"
    )
    command = [sys.executable, "-c", code, str(HERE), function, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def first_run(source: str, dest: str) -> dict[str, float]:
    """Most memory of a process that runs it (MB)."""
    run_noop(Path(source), Path(dest))
    return {"megabytes": most_memory()}


def most_memory() -> float:
    """Most memory that this process has had so far (MB)."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux `getrusage` counts the process that this one was started from
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return float(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def second_run(source: str, dest: str) -> dict[str, float]:
    """Time in which a finished run is found finished (s)."""
    return {"seconds": timed(run_noop, Path(source), Path(dest))}


def size_figures(sizes: Sizes) -> list[Figure]:
    """Growth of memory with the rows; time of a run that has nothing to do."""
    growth: list[float] = []
    resumed: list[float] = []
    few, many = sizes.few_rows, sizes.many_rows
    with folder() as home:
        for rows in few, many:
            write_rows(home / f"{rows}.parquet", texts(rows))
        for number in range(sizes.fewer_rounds):
            used = [
                in_new_process(
                    "first_run", home / f"{rows}.parquet", home / f"{number}-{rows}.parquet"
                )
                for rows in (few, many)
            ]
            growth.append(used[1]["megabytes"] - used[0]["megabytes"])
            again = in_new_process(
                "second_run", home / f"{many}.parquet", home / f"{number}-{many}.parquet"
            )
            resumed.append(again["seconds"])
    return [
        Figure(f"memory of {many:,} rows beyond {few:,}", growth, "MB", at_most=MEGABYTES),
        Figure(f"a finished run of {many:,} rows, run again", resumed, "s", at_most=RESUMED),
    ]


# other libraries


OURS = Peer("ours", "batched", "")


@contextmanager
def mapping(peer: Peer, source: Path, dest: Path, marks: Path, small: Path) -> Iterator[Any]:
    """Yield the process of a map, and end it."""
    command = [interpreter(peer), "-m", "peers.maps", peer.module, *map(str, (source, dest, marks))]
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(
        [*command, str(small)],
        cwd=HERE,
        env=environment(peer),
        text=True,
        start_new_session=True,
        **pipes,
    )
    try:
        yield process
    finally:
        end(process)


def answer_of(process: Any) -> float:
    """Return the time that the process of a map prints in the end (s).

    Raises:
        Unavailable: it fails, or takes too long.
    """
    try:
        output, errors = process.communicate(timeout=MAPPING)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"no answer within {MAPPING:g} s") from None
    if process.returncode:
        raise Unavailable(last_line(errors))
    return float(output.split()[-1])


def kept_after_kill(peer: Peer, home: Path, source: Path, small: Path, rows: int) -> float:
    """Return the number of rows that are not computed again after a kill in the middle.

    Raises:
        Unavailable: the map fails.
    """
    dest, first, second = home / "killed", home / "first-marks", home / "second-marks"
    deadline = time.perf_counter() + MAPPING
    with mapping(peer, source, dest, first, small) as process:
        while marked(first) < rows / 2:
            if process.poll() is not None or time.perf_counter() > deadline:
                answer_of(process)
                raise Unavailable("it ended before it could be killed")
            time.sleep(LOOK)
    with mapping(peer, source, dest, second, small) as process:
        answer_of(process)
    return rows - marked(second)


def peer_figures(sizes: Sizes, rounds: int) -> tuple[list[Figure], dict[str, str], dict[str, str]]:
    """Measure all libraries; return times, rows kept after a kill, missing libraries, versions."""
    rows = sizes.mapped_rows
    asked = {"ours": OURS, **{name: peer for name, (peer, _) in LIBRARIES.items()}}
    times: dict[str, list[float]] = {name: [] for name in asked}
    kept: dict[str, list[float]] = {name: [] for name in asked}
    missing: dict[str, str] = {}
    versions: dict[str, str] = {}
    with folder() as home:
        source, small = home / "rows.parquet", home / "small.parquet"
        write_rows(source, texts(rows))
        write_rows(small, texts(2 * BATCH_SIZE))
        for number in range(rounds):
            for name, peer in asked.items():
                if name in missing:
                    continue
                place = home / f"{number}-{name}"
                place.mkdir()
                try:
                    if peer.requirement:
                        versions[peer.package] = version(peer)
                    with mapping(
                        peer, source, place / "out", place / "marks-of-time", small
                    ) as run:
                        times[name].append(answer_of(run))
                    if not number:
                        kept[name].append(kept_after_kill(peer, place, source, small, rows))
                except Unavailable as reason:
                    missing[name] = str(reason)
    if "ours" in missing:  # no result without this library
        raise Unavailable(missing["ours"])
    asleep = Figure("asleep", [SECONDS * -(-rows // BATCH_SIZE)], "s")
    title = f"{rows:,} rows, {1e3 * SECONDS:g} ms a batch of {BATCH_SIZE}"
    figures = [Figure(f"{title}, ours", times["ours"], "s", asleep)]
    ours = Figure("ours", times["ours"], "s")
    figures += [
        Figure(f"{title}, {name}", times[name], "s", ours) for name in LIBRARIES if times[name]
    ]
    all_rows = Figure("all", [float(rows)], "rows")
    figures += [
        Figure(f"rows kept after a kill in the middle, {name}", found, "rows", all_rows)
        for name, found in kept.items()
        if found
    ]
    return figures, missing, versions


def measured(arguments: argparse.Namespace) -> Result:
    sizes = QUICK if arguments.quick else Sizes()
    figures = [
        *noop_figures(sizes),
        *overhead_figures(sizes),
        *model_figures(sizes),
        *size_figures(sizes),
    ]
    missing: Mapping[str, str] = {}
    versions: Mapping[str, str] = {}
    notes = [ROUNDS.format(f"{sizes.rounds}, or {sizes.fewer_rounds} of slow measurements"), *NOTES]
    packages = ["pyarrow", "torch", "sentence-transformers"]
    if not arguments.check:
        compared, missing, versions = peer_figures(sizes, sizes.fewer_rounds)
        figures += compared
        packages += ["datasets", "polars"]
        notes += [f"{name}: {how}." for name, (_, how) in LIBRARIES.items()]
    return Result(figures, packages, versions=versions, missing=missing, notes=notes)


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
