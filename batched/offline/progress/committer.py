"""Group commit: one thread commits in one transaction all commits that wait for it.

The disk sets the pace: with a slow disk more rows share a transaction. The queue is bounded, and so
is a transaction, which takes the whole queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from .commit import Commit
from .store import Progress

QUEUE_ROWS: Final = 16_384
"""Rows that may wait to be committed."""
QUEUE_BYTES: Final = 8 * 2**20
"""Bytes of outputs that may wait to be committed; a larger commit waits alone."""


class Committer:
    """A thread that commits in the order of submission.

    `on_error` gets the error that ended the thread, on that thread. Commits that were in the queue
    then are lost.
    """

    def __init__(self, progress: Progress, on_error: Callable[[BaseException], None]) -> None:
        self._progress = progress
        self._on_error = on_error
        self._changed = threading.Condition()  # guards the next fields
        self._queue: deque[Commit] = deque()
        self._rows = 0  # in the queue
        self._bytes = 0
        self._closing = False
        self._error: BaseException | None = None  # that ended the thread
        self._thread = threading.Thread(target=self._work, name="batched-committer", daemon=True)
        self._thread.start()

    def submit(self, commit: Commit) -> None:
        """Queue a commit, once there is room; raise the error that ended the thread, if any."""
        rows, size = commit.size, commit.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._fits(rows, size))
            if self._error is not None:
                raise self._error
            self._queue.append(commit)
            self._rows += rows
            self._bytes += size
            self._changed.notify_all()

    def close(self) -> None:
        """Commit the queue, and end the thread; raise the error that ended it, if any."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _fits(self, rows: int, size: int) -> bool:
        return not self._queue or (
            self._rows + rows <= QUEUE_ROWS and self._bytes + size <= QUEUE_BYTES
        )

    def _work(self) -> None:
        try:
            while commits := self._take():
                self._progress.commit(commits)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._on_error(error)

    def _take(self) -> list[Commit]:
        """Return the whole queue once it is not empty; nothing after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            commits = list(self._queue)
            self._queue.clear()
            self._rows = self._bytes = 0
            self._changed.notify_all()
        return commits
