"""Disks that are full or broken, and kills, at each change of a file that a run makes.

As SQLite is tested: the n-th change below one folder fails, for every n. Then the same call runs
undisturbed, and its result must be that of a run without faults, byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("pyarrow")

import faults
from faults import DEADLY, KINDS, Fault, Kind
from trial_runs import committed_in, computed_again
from trials import Ended, Trials, trials

pytestmark = pytest.mark.once

FORMATS: Final = ("out.parquet", "out.jsonl", "out.csv", "out/")
STARTS: Final = ("fresh", "resumed", "resumed from a generator")
BEFORE: Final = 24
"""Rows of the source when the result was first made."""
ROWS: Final = 40
BAD: Final = {11: "bad", 23: "worse"}
EDITED: Final = (3, 17)
EXPECTED_ERRORS: Final = {"OSError", "ResultError", "SourceError"}
"""Errors of a run whose disk fails; `SourceError` of rows that are read from their spool."""

Listing = dict[str, bytes]
"""Bytes of the files below a folder, by relative path; none of a folder."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    library = faults.build(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("the library of faults needs a C compiler, and there is none")
    with trials(library) as server:
        yield server


def write_source(path: Path, rows: int, edited: Iterable[int] = ()) -> None:
    lines = []
    for number in range(rows):
        text = f"{BAD.get(number, 'row')} {number}{' edited' * (number in edited)}"
        lines.append(json.dumps({"id": number, "text": text}) + "\n")
    path.write_text("".join(lines))


def listing(folder: Path) -> Listing:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


class Scene:
    """One folder with a source, a destination and its progress, which can be set back."""

    def __init__(self, server: Trials, folder: Path, name: str, start: str) -> None:
        self.server = server
        self.folder = folder.resolve() / "disk"
        self.template = folder / "template"
        self.log = folder / "log"
        self.dest = f"{self.folder}/{name}"
        self.progress = Path(f"{self.dest.rstrip('/')}.progress")
        self.once = "generator" in start
        self.folder.mkdir()
        source = self.folder / "in.jsonl"
        self.edited = EDITED if start != "fresh" else ()
        if self.edited:
            write_source(source, BEFORE)
            assert self.run().how == "done"
        write_source(source, ROWS, self.edited)
        shutil.copytree(self.folder, self.template)
        self.old = self.at_dest()
        self.committed = committed_in(self.progress)
        undisturbed = self.run()
        assert undisturbed.how == "done", undisturbed.lines
        self.result = undisturbed.result
        self.new = self.at_dest()
        self.names = set(listing(self.folder))
        self.changes = undisturbed.changes

    def run(self, at: int = 0, kind: Kind = "kill") -> Ended:
        fault = Fault(str(self.folder), at, kind)
        return self.server.run(
            "two_steps",
            fault=fault,
            source=str(self.folder / "in.jsonl"),
            dest=self.dest,
            log=str(self.log),
            once=self.once,
            keep=["id"],
        )

    def reset(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder)
        self.log.unlink(missing_ok=True)

    def at_dest(self) -> Listing:
        path = Path(self.dest)
        if path.is_dir():
            return listing(path)
        return {path.name: path.read_bytes()} if path.exists() else {}

    def problems_at(self, at: int, kind: Kind) -> tuple[str, list[str]]:
        """Have change `at` fail, run again, and return its end and all problems."""
        self.reset()
        found: list[str] = []
        ended = self.run(at, kind)
        allowed = ("killed", "done") if kind in DEADLY else ("raised", "done")
        if ended.how not in allowed:
            found.append(f"it ended as {ended.how}: {ended.error}")
        elif ended.how == "raised" and not EXPECTED_ERRORS & set(ended.kinds):
            found.append(f"it raised {ended.error}\n{ended.lines}")
        elif ended.how == "done":
            found += self.problems_of_end(ended)
        dest = self.at_dest()
        in_between = self.dest.endswith("/") and not dest  # from one rename to the next
        if dest not in (self.old, self.new) and not in_between:
            found.append(f"at the destination is neither the old nor the new result: {dest.keys()}")
        committed = committed_in(self.progress)
        lost = {row for row in set(self.committed) - set(committed) if row[1] not in self.edited}
        if lost:
            found.append(f"lost: {sorted(lost)[:5]}")
        self.log.unlink(missing_ok=True)
        again = self.run()
        if again.how != "done":
            return ended.how, [*found, f"the next run {again.how}: {again.error}\n{again.lines}"]
        found += self.problems_of_end(again)
        # of an edited row either the old text or the new one may be committed
        good = {
            (step, key)
            for (step, key), status in committed.items()
            if status == "ok" and key not in self.edited
        }
        if twice := computed_again(self.log, good):
            found.append(f"computed though committed: {twice[:5]}")
        if strays := set(listing(self.folder)) ^ self.names:
            found.append(f"files left or lacking: {sorted(strays)}")
        return ended.how, found

    def problems_of_end(self, ended: Ended) -> list[str]:
        found = []
        if self.at_dest() != self.new:
            found.append("the result is not that of a run without faults")
        if ended.result["letters"] != self.result["letters"]:
            found.append(f"dead letters: {ended.result['letters']}")
        counted = sum(ended.result[name] for name in ("ok", "failed", "skipped"))
        if counted != ROWS:
            found.append(f"{counted} of {ROWS} rows are counted: {ended.result}")
        return found


def check(scene: Scene, places: Iterable[tuple[int, Kind]]) -> None:
    """Try these faults, print how the runs ended, and fail if there are problems."""
    ends: Counter[Any] = Counter()
    wrong = []
    for at, kind in places:
        how, found = scene.problems_at(at, kind)
        ends[kind, how] += 1
        wrong += [f"change {at}, {kind}: {problem}" for problem in found]
    counts = ", ".join(f"{kind} {how} {count}" for (kind, how), count in sorted(ends.items()))
    print(f"\n{scene.dest}: {ends.total()} faults tried: {counts}; {len(wrong)} problems")
    assert not wrong, "\n".join([f"{len(wrong)} problems", *wrong[:20]])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["out.parquet", "out/"])
def test_a_fault_at_any_change_of_a_file_costs_no_row(
    server: Trials, tmp_path: Path, name: str
) -> None:
    scene = Scene(server, tmp_path, name, "resumed")
    places = range(1 + FORMATS.index(name), scene.changes, 37)
    check(scene, [(at, KINDS[number % len(KINDS)]) for number, at in enumerate(places)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "start"), [*product(FORMATS, STARTS[:2]), ("out.jsonl", STARTS[2])]
)
def test_a_fault_at_each_change_of_a_file_costs_no_row(
    server: Trials, tmp_path: Path, name: str, start: str, kind: Kind
) -> None:
    scene = Scene(server, tmp_path, name, start)
    check(scene, [(at, kind) for at in range(1, scene.changes + scene.changes // 10)])
