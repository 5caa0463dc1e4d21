"""The report of a run, and its dead letters."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from batched.offline.progress.commit import Commit, Key, Letter, letter_text
from batched.offline.progress.store import Progress
from batched.offline.report import dead_letters

pytestmark = pytest.mark.once


def test_dead_letters_hold_no_lock_while_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    error = letter_text("inference", "ValueError: no")
    failed: list[tuple[Key, int, str | None]] = [(f"k{n:05}", 0, error) for n in range(2500)]
    with closing(Progress(path)) as progress:
        progress.put_all({"steps": [{"name": "embed"}]})
        progress.commit([Commit(0, ended=failed)])
        progress.note_source(0, [None, *[key for key, *_ in failed]])
        progress.end_source(2501)
        progress.add_letters("source", [Letter(0, None, letter_text("source", "no JSON"))])
    found = []
    for letter in dead_letters(path):
        found.append((letter["key"], letter["step"], letter["phase"]))
        if len(found) % 700 == 1:
            Progress(path).close()  # no run has locked it
    assert found[0] == (0, "", "source")
    assert found[1:] == [(key, "embed", "inference") for key, *_ in failed]
