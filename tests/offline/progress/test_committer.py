"""Group commit: waiting commits share transactions, in order, within bounds, until an error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from batched.offline.progress.commit import Commit
from batched.offline.progress.committer import WAITING, Committer
from progress_files import done
from stage import wait_until


def test_few_commits_wait_and_all_that_wait_share_a_transaction_in_order() -> None:
    gate, begun = threading.Semaphore(0), threading.Semaphore(0)
    transactions: list[list[Commit]] = []

    def commit(commits: Sequence[Commit]) -> None:
        begun.release()
        assert gate.acquire(timeout=10)
        transactions.append(list(commits))

    progress: Any = SimpleNamespace(commit=commit)
    committer = Committer(progress, print)
    commits = [done([number]) for number in range(3 * WAITING + 1)]
    committer.submit(commits[0])
    assert begun.acquire(timeout=10)
    with ThreadPoolExecutor(1) as thread:
        submitted = [thread.submit(committer.submit, each) for each in commits[1:]]
        wait_until(lambda: sum(each.done() for each in submitted) == WAITING)
        gate.release(1000)
    committer.close()
    assert transactions[:2] == [commits[:1], commits[1 : 1 + WAITING]]
    assert list(chain.from_iterable(transactions)) == commits


def test_an_error_is_told_once_and_ends_it() -> None:
    error, errors = OSError("no room"), list[BaseException]()

    def commit(_: Sequence[Commit]) -> None:
        raise error

    progress: Any = SimpleNamespace(commit=commit)
    committer = Committer(progress, errors.append)
    committer.submit(done(["a"]))
    wait_until(lambda: bool(errors))
    committer.submit(done(["b"]))
    with pytest.raises(OSError, match="no room"):
        committer.close()
    assert errors == [error]
