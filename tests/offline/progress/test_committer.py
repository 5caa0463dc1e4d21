"""Group commit: waiting commits share transactions, in order, within bounds, until an error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched.offline.progress.commit import Commit
from batched.offline.progress.committer import WAITING, Committer
from progress_files import done
from stage import wait_until


class Gated:
    """A committer of a stand-in for a progress file, whose transactions wait for the gate."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.transactions: list[list[Commit]] = []
        self.errors: list[BaseException] = []
        self._error = error
        progress: Any = self
        self.committer = Committer(progress, self.errors.append)

    def commit(self, commits: Sequence[Commit]) -> None:
        self.begun.release()
        assert self.gate.acquire(timeout=10)
        if self._error:
            raise self._error
        self.transactions.append(list(commits))


def test_few_commits_wait_and_all_that_wait_share_a_transaction_in_order() -> None:
    gated = Gated()
    commits = [done([number]) for number in range(3 * WAITING + 1)]
    gated.committer.submit(commits[0])
    assert gated.begun.acquire(timeout=10)
    submitted: list[Commit] = []

    def submit() -> None:
        for commit in commits[1:]:
            gated.committer.submit(commit)
            submitted.append(commit)

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: len(submitted) == WAITING)
    gated.gate.release(1000)
    thread.join(10)
    gated.committer.close()
    assert gated.transactions[:2] == [commits[:1], commits[1 : 1 + WAITING]]
    assert list(chain.from_iterable(gated.transactions)) == commits
    assert gated.errors == []


def test_an_error_is_told_once_and_ends_it() -> None:
    error = OSError("no room")
    gated = Gated(error)
    gated.committer.submit(done(["a"]))
    assert gated.begun.acquire(timeout=10)
    gated.committer.submit(done(["b"]))
    gated.gate.release(1000)
    wait_until(lambda: bool(gated.errors))
    gated.committer.submit(done(["c"]))
    with pytest.raises(OSError, match="no room"):
        gated.committer.close()
    assert gated.errors == [error]
    assert gated.transactions == []
