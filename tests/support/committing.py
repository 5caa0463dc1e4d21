"""Program that commits rows of two steps, and writes each committed row to its output.

`python committing.py FILE ROWS SIZE`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from batched.offline.progress.commit import Commit, Key
from batched.offline.progress.committer import Committer
from batched.offline.progress.store import Progress
from progress_files import done, failed


class TellingProgress(Progress):
    def commit(self, commits: Sequence[Commit]) -> None:
        super().commit(commits)
        rows = [(row[0], each.step) for each in commits for row in [*each.rows, *each.failed]]
        print(*[f"{key} {step}" for key, step in rows], sep="\n", flush=True)


def main(path: Path, rows: int, size: int) -> None:
    progress = TellingProgress(path)
    committer = Committer(progress, lambda error: sys.exit(repr(error)))
    for first in range(0, rows, size):
        numbers = range(first, min(first + size, rows))
        progress.order.note(first, [*numbers])
        committed = progress.committed([*numbers])
        bad = {number for number in numbers if number % 7 == 6}
        for step in (0, 1):
            good: list[Key] = [n for n in numbers if n not in bad and (n, step) not in committed]
            if good:
                committer.submit(done(good, step))
        if new := [number for number in bad if (number, 0) not in committed]:
            committer.submit(failed([*new]))
    progress.order.end(rows)
    committer.close()
    progress.close()
    print("end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
