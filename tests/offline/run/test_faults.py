"""Disks that are full or broken, and kills, at each change of a file that a run makes.

As SQLite is tested: the n-th change below one folder fails, for every n. Then the same call runs
undisturbed, and its result must be that of a run without faults, byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Final

import pytest

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


def listing(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the files below a folder, by relative path; none of a folder."""
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

    def at_dest(self) -> dict[str, bytes]:
        path = Path(self.dest)
        if path.is_dir():
            return listing(path)
        return {path.name: path.read_bytes()} if path.exists() else {}

    def check(self, at: int, kind: Kind) -> None:
        """Have change `at` fail, run again, and look at both ends."""
        print(f"{kind} at change {at} of {self.changes}")
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder)
        self.log.unlink(missing_ok=True)
        ended = self.run(at, kind)
        if ended.how == "done":
            self.check_end(ended)
        elif kind in DEADLY:
            assert ended.how == "killed", ended.lines
        else:
            assert ended.how == "raised", ended.how
            assert EXPECTED_ERRORS & set(ended.kinds), ended.lines
        dest = self.at_dest()
        if dest or not self.dest.endswith("/"):  # or from one rename to the next
            is_known = dest in (self.old, self.new)
            assert is_known, f"neither the old nor the new result: {dest.keys()}"
        committed = committed_in(self.progress)
        # of an edited row either the old text or the new one may be committed
        lost = {row for row in set(self.committed) - set(committed) if row[1] not in self.edited}
        assert not lost
        good = {row for row, status in committed.items() if status == "ok"}
        self.log.unlink(missing_ok=True)
        self.check_end(self.run())
        again = computed_again(self.log, {row for row in good if row[1] not in self.edited})
        assert not again, "computed though committed"
        assert set(listing(self.folder)) == self.names

    def check_end(self, ended: Ended) -> None:
        assert ended.how == "done", f"{ended.error}\n{ended.lines}"
        is_right = self.at_dest() == self.new
        assert is_right, "the result is not that of a run without faults"
        assert ended.result["letters"] == self.result["letters"]
        assert sum(ended.result[name] for name in ("ok", "failed", "skipped")) == ROWS


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["out.parquet", "out/"])
def test_a_fault_at_any_change_of_a_file_costs_no_row(
    server: Trials, tmp_path: Path, name: str
) -> None:
    scene = Scene(server, tmp_path, name, "resumed")
    for number, at in enumerate(range(1 + FORMATS.index(name), scene.changes, 37)):
        scene.check(at, KINDS[number % len(KINDS)])


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
    for at in range(1, scene.changes + scene.changes // 10):
        scene.check(at, kind)
