"""Group commit: waiting commits share transactions, in order, within bounds, until an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched.offline.progress import committer as _committer
from batched.offline.progress.commit import Commit, Key
from batched.offline.progress.committer import Committer
from progress_files import done, failed


class GatedProgress:
    """Stand-in for a progress file: each transaction waits for the gate."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.transactions: list[list[Commit]] = []
        self._error = error

    def commit(self, commits: Sequence[Commit]) -> None:
        self.begun.release()
        assert self.gate.acquire(timeout=10)
        if self._error:
            raise self._error
        self.transactions.append(list(commits))


class Watched(Committer):
    """A committer that tells when a thread waits for room."""

    def __init__(self, full: threading.Event, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._full = full

    def _fits(self, rows: int, size: int) -> bool:
        room = super()._fits(rows, size)
        if not room:
            self._full.set()
        return room


class Gated:
    """A committer of a gated file, and its errors."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.progress = GatedProgress(error)
        self.errors: list[BaseException] = []
        progress: Any = self.progress
        self.full = threading.Event()  # a thread waits for room
        self.committer = Watched(self.full, progress, self.errors.append)

    def open(self) -> None:
        self.progress.gate.release(1000)


def test_all_that_waits_shares_a_transaction_in_order() -> None:
    gated = Gated()
    commits = [done([n]) for n in range(6)]
    gated.committer.submit(commits[0])
    assert gated.progress.begun.acquire(timeout=10)
    for commit in commits[1:]:
        gated.committer.submit(commit)
    gated.open()
    gated.committer.close()
    assert gated.progress.transactions == [commits[:1], commits[1:]]
    assert gated.errors == []


@pytest.mark.parametrize("make", [done, failed])
def test_the_queue_is_bounded_by_rows(make: Callable[[list[Key]], Commit]) -> None:
    check_bound(make(list(range(_committer.QUEUE_ROWS // 4))), 4)


def test_the_queue_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = done(["a"], note="x" * 1000)
    monkeypatch.setattr(_committer, "QUEUE_BYTES", 3 * commit.nbytes)
    check_bound(commit, 3)


def check_bound(commit: Commit, most: int) -> None:
    """Assert that at most `most` commits of that size wait."""
    gated = Gated()
    gated.committer.submit(commit)
    assert gated.progress.begun.acquire(timeout=10)
    submitted: list[int] = []

    def submit() -> None:
        for number in range(3 * most):
            gated.committer.submit(commit)
            submitted.append(number)

    thread = threading.Thread(target=submit)
    thread.start()
    assert gated.full.wait(10)
    assert len(submitted) == most
    gated.open()
    thread.join(10)
    gated.committer.close()
    sizes = [len(commits) for commits in gated.progress.transactions]
    assert sum(sizes) == 3 * most + 1
    assert max(sizes) == most


def test_a_commit_beyond_all_bounds_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_committer, "QUEUE_ROWS", 2)
    gated = Gated()
    gated.open()
    for _ in range(3):
        gated.committer.submit(done([1, 2, 3]))
    gated.committer.close()
    assert [len(commits) for commits in gated.progress.transactions] == [1, 1, 1]


def test_an_error_is_told_once_and_ends_it() -> None:
    error = OSError("no room")
    gated = Gated(error)
    gated.committer.submit(done(["a"]))
    assert gated.progress.begun.acquire(timeout=10)
    gated.committer.submit(done(["b"]))
    gated.open()
    gated.committer._thread.join(10)
    with pytest.raises(OSError, match="no room"):
        gated.committer.submit(done(["c"]))
    with pytest.raises(OSError, match="no room"):
        gated.committer.close()
    assert gated.errors == [error]
    assert gated.progress.transactions == []


def test_an_error_reaches_those_who_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated(OSError("no room"))
    monkeypatch.setattr(_committer, "QUEUE_ROWS", 1)
    gated.committer.submit(done(["a"]))
    assert gated.progress.begun.acquire(timeout=10)
    gated.committer.submit(done(["b"]))
    raised: list[OSError] = []

    def submit() -> None:
        try:
            gated.committer.submit(done(["c"]))
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    assert gated.full.wait(10)
    gated.open()
    thread.join(10)
    assert raised == gated.errors
    assert len(raised) == 1
