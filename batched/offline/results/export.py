"""Export of the committed rows of a run, from its progress file alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path

import orjson

from ...errors import ResultError
from ..progress.commit import Letter
from ..progress.store import Progress
from ..sources.base import WINDOW_ROWS, Rows, RowSource
from ..types.columns import Columns
from ..uris import is_remote, without_credentials
from .merge import Merge
from .opening import open_result


def export(
    result: str | PathLike[str],
    dest: str | PathLike[str],
    *,
    progress: str | PathLike[str] | None = None,
    overwrite: bool = False,
) -> str:
    """Write the rows that a run has committed so far, in all steps. Return the path of the file.

    The file has the key column (`row`, counted from 0, if there is none) and the output columns of
    the steps, in the order of the source. Columns of the source are not in the progress file.

    Args:
        result: the destination of the run.
        dest: a file or folder, as for a run.
        progress: the progress file; next to `result` if not given.
        overwrite: whether to replace a file at `dest`.

    Raises:
        RunLocked: the run goes on.
        ResultError: the run is unknown, or the file cannot be written, or cannot hold a row.
    """
    path = progress_path(result, progress)
    if not path.exists():
        raise ResultError(f"{path} does not exist: no run has written it, or progress= names it")
    if os.path.realpath(dest) == os.path.realpath(result):
        raise ResultError(f"the export would replace the result {result} itself; name another file")
    with (
        closing(Progress(path)) as store,
        closing(open_result(dest, overwrite=overwrite, progress=f"{path}.export")) as written,
    ):
        source = _open_keys(store, store.get("key") or "row")
        columns = [Columns(step["output"]) for step in store.get("steps") or ()]
        merge = Merge(source, store, written, columns)
        for window in source.windows(None):
            merge.note_kinds(window)
        merge.write(_refuse)
        written.publish(len)
    return written.path


def _refuse(letters: Sequence[Letter]) -> None:
    for letter in letters:
        error = orjson.loads(letter.error)["error"]
        raise ResultError(f"row {letter.row}: {error}; a file that ends in .jsonl takes all rows")


def progress_path(dest: str | PathLike[str], progress: str | PathLike[str] | None) -> Path:
    """Return the absolute path of the progress file of runs to `dest`, or of `progress`."""
    if not isinstance(progress, str | PathLike | None):
        raise TypeError(f"progress must be the path of the progress file, got {progress!r}")
    name = f"{str(dest).rstrip('/')}.progress" if progress is None else str(progress)
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if is_remote(name):
        raise ResultError(
            f"the progress file cannot be at {without_credentials(name)}; it must be on a disk of "
            "this machine: say where with progress=PATH"
        )
    if str(path) == os.path.abspath(os.path.expanduser(dest)):
        raise ResultError(f"progress names the result itself, {path}; name another file")
    return path


def _open_keys(progress: Progress, column: str) -> RowSource:
    """Open the keys of the last source, as its only column."""

    def read() -> Rows:
        rows = progress.source_rows
        for first in range(0, rows, WINDOW_ROWS):
            keys = progress.keys_of_rows(first, WINDOW_ROWS)
            for row in range(first, min(first + WINDOW_ROWS, rows)):
                yield {column: keys.get(row)}

    return RowSource("the progress file", read)
