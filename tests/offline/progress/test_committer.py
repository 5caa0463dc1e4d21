"""Group commit: waiting commits share transactions, in order, within bounds, until an error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched.offline.progress.commit import Commit
from batched.offline.progress.committer import WAITING, Committer
from progress_files import done
from stage import wait_until


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


class Gated:
    """A committer of a gated file, and its errors."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.progress = GatedProgress(error)
        self.errors: list[BaseException] = []
        progress: Any = self.progress
        self.committer = Committer(progress, self.errors.append)

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


def test_the_queue_is_bounded() -> None:
    gated = Gated()
    gated.committer.submit(done([0]))
    assert gated.progress.begun.acquire(timeout=10)
    submitted: list[int] = []

    def submit() -> None:
        for number in range(3 * WAITING):
            gated.committer.submit(done([number]))
            submitted.append(number)

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: len(submitted) == WAITING)
    gated.open()
    thread.join(10)
    gated.committer.close()
    sizes = [len(commits) for commits in gated.progress.transactions]
    assert sum(sizes) == 3 * WAITING + 1
    assert max(sizes) == WAITING


def test_an_error_is_told_once_and_ends_it() -> None:
    error = OSError("no room")
    gated = Gated(error)
    gated.committer.submit(done(["a"]))
    assert gated.progress.begun.acquire(timeout=10)
    gated.committer.submit(done(["b"]))
    gated.open()
    wait_until(lambda: bool(gated.errors))
    gated.committer.submit(done(["c"]))
    with pytest.raises(OSError, match="no room"):
        gated.committer.close()
    assert gated.errors == [error]
    assert gated.progress.transactions == []
