"""Power cuts: each commit is in the file whole, or no part of it is."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from batched.offline.progress.commit import Key
from batched.offline.progress.store import Progress
from progress_files import done, failed, log_of, outputs, query, value

pytestmark = pytest.mark.once

ROWS = 3000
ALL: list[Key] = list(range(ROWS))


def check(progress: Progress, keys: list[Key]) -> None:
    """Check that all committed rows are whole."""
    committed = progress.committed(keys)
    found = outputs(progress, keys)
    assert found == {(key, step): value(key, step) for key, step in found}
    bad = {at for at, row in committed.items() if row.status == "failed"}
    assert set(found) | bad == set(committed)
    assert {letter["key"] for letter in progress.dead_letters()} == {key for key, _ in bad}
    assert all((key, 0) in found for key, step in found if step == 1)  # in the order of steps
    used = query(progress, "select count(distinct chunk) from rows where chunk is not null")
    assert used == query(progress, "select count(*) from chunks")


def written(path: Path, commits: int) -> list[set[tuple[Key, int]]]:
    """Return the rows that each commit adds, of a run that is not closed."""
    progress = Progress(path)
    progress.put_all({"steps": [{"name": "clean"}, {"name": "embed"}]})
    added: list[set[tuple[Key, int]]] = []
    for number in range(commits):
        keys: list[Key] = [*range(8 * number, 8 * number + 8)]
        bad: list[Key] = [1000 + number, 2000 + number]
        progress.commit([done(keys), done(keys, 1), failed(bad)])
        added.append({(key, step) for key in keys for step in (0, 1)} | {(key, 0) for key in bad})
        if number == commits // 3:
            query(progress, "pragma wal_checkpoint(restart)")  # the log begins anew
    for file in path.parent.iterdir():
        shutil.copy(file, path.parent.with_name("cut") / file.name)
    progress.close()
    return added


def tear(log: Path, chance: random.Random) -> None:
    """Damage a log as a power cut may: cut off its end, or empty one page."""
    data = bytearray(log.read_bytes())
    place = chance.randrange(len(data))
    match chance.randrange(3):
        case 0:
            del data[place:]
        case 1:
            data[place : place + 4096] = bytes(len(data[place : place + 4096]))
        case 2:
            data[place:] = chance.randbytes(len(data) - place)
    log.write_bytes(data)


@pytest.mark.parametrize("cuts", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_torn_log_ends_with_a_whole_commit(tmp_path: Path, cuts: int) -> None:
    chance = random.Random(1)
    before, cut, torn = tmp_path / "run", tmp_path / "cut", tmp_path / "torn"
    before.mkdir()
    cut.mkdir()
    added = written(before / "progress", 40)
    kept: set[int] = set()
    keys: list[Key] = [key for commit in added for key, _ in commit]
    for _ in range(cuts):
        shutil.copytree(cut, torn)
        tear(log_of(torn / "progress"), chance)
        with closing(Progress(torn / "progress")) as progress:
            found = set(progress.committed(keys))
            here = [commit for commit in added if commit <= found]
            assert here == added[: len(here)]  # the first commits
            assert found == set().union(*here)  # and no part of a later commit
            check(progress, ALL)
            progress.commit([done(["more"])])
            assert ("more", 0) in progress.committed(["more"])
        kept.add(len(here))
        shutil.rmtree(torn)
    assert min(kept) >= 40 // 3  # rows that a checkpoint had written
    assert len(kept) > min(cuts, 20) // 2
