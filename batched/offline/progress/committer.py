"""Group commit: one thread commits in one transaction all commits that wait for it.

The disk sets the pace: with a slow disk more rows share a transaction. The queue is bounded, and so
is a transaction, which takes the whole queue.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from .commit import Commit
from .store import Progress

WAITING: Final = 16
"""Commits that may wait, and most commits of one transaction."""


class Committer:
    """A thread that commits in the order of submission.

    `on_error` gets the error that ended the thread, on that thread. Later commits are lost.
    """

    def __init__(self, progress: Progress, on_error: Callable[[BaseException], None]) -> None:
        self._progress = progress
        self._on_error = on_error
        self._queue: queue.Queue[Commit | None] = queue.Queue(WAITING)  # None: the end
        self._error: BaseException | None = None  # of the thread, which then commits no more
        self._thread = threading.Thread(target=self._work, name="batched-committer", daemon=True)
        self._thread.start()

    def submit(self, commit: Commit) -> None:
        """Queue a commit, once there is room."""
        self._queue.put(commit)

    def close(self) -> None:
        """Commit the queue, and end the thread; raise its error, if any."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        ended = False
        while not ended:
            commits = [self._queue.get()]
            while len(commits) < WAITING and not self._queue.empty():
                commits.append(self._queue.get())
            ended = None in commits
            try:
                if self._error is None:
                    self._progress.commit([each for each in commits if each is not None])
            except BaseException as error:
                self._error = error
                self._on_error(error)
