"""Export of the committed rows of a run, from its progress file alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path

from ...errors import ResultError
from ..progress.store import Progress
from ..sources.base import WINDOW_ROWS, Rows, RowSource
from ..types.columns import Columns, Kinds
from ..types.values import read_column
from ..uris import is_remote, without_credentials
from .merge import Merge
from .opening import Stamp, open_result


def export(
    result: str | PathLike[str],
    dest: str | PathLike[str] | None = None,
    *,
    progress: str | PathLike[str] | None = None,
    overwrite: bool = False,
) -> str:
    """Write the rows that a run has committed so far, in all steps. Return the path of the file.

    The file has the key column (`row`, counted from 0, if there is none) and the output columns of
    the steps, in the order of the source. Columns of the source are not in the progress file.

    Args:
        result: the destination of the run.
        dest: a file or folder, as for a run; `<result>.partial` with the suffix of the result if
            not given.
        progress: the progress file; next to `result` if not given.
        overwrite: whether to replace a file at `dest` that no export of this run has written.

    Raises:
        RunLocked: the run goes on.
        ResultError: the run is unknown, or the file cannot be written.
    """
    path = progress_path(result, progress)
    if not path.exists():
        raise ResultError(f"{path} does not exist: no run has written it, or progress= names it")
    if dest is None:
        if is_remote(result):
            raise ResultError("the result is named by a URI; name a file for the export")
        base, suffix = os.path.splitext(os.fspath(result).rstrip("/"))
        dest = f"{base}.partial{suffix or '/'}"
    if os.path.realpath(dest) == os.path.realpath(result):
        raise ResultError(f"the export would replace the result {result} itself; name another file")
    with closing(Progress(path)) as store:
        written = open_result(
            dest,
            overwrite=overwrite,
            known=store.get("exports") or [],
            progress=f"{path}.export",
        )

        def note(stamps: Sequence[Stamp]) -> None:
            store.put_all({"exports": stamps})

        key = store.get("key") or "row"
        source = _open_keys(store, key)
        kinds = Kinds()
        for window in source.windows(None):
            kinds.add(read_column(window.values(key))[1])
        columns = [Columns(step["output"]) for step in store.get("steps") or ()]
        note(Merge(source, store, columns).write(written, {key: kinds}, len, note))
    return written.path


def progress_path(dest: str | PathLike[str], progress: str | PathLike[str] | None) -> Path:
    """Return the absolute path of the progress file of runs to `dest`, or of `progress`."""
    if progress is not None and is_remote(progress):
        raise ResultError(
            "progress must be a path on a disk of this machine, got "
            f"{without_credentials(str(progress))!r}"
        )
    if progress is None and is_remote(dest):
        raise ResultError(
            f"the result {without_credentials(str(dest))} is named by a URI, and its progress file "
            "must be on a disk of this machine; say where with progress=PATH"
        )
    name = f"{str(dest).rstrip('/')}.progress" if progress is None else progress
    return Path(os.path.abspath(name))


def _open_keys(progress: Progress, column: str) -> RowSource:
    """Open the keys of the last source, as its only column."""

    def read() -> Rows:
        rows = progress.source_rows
        for first in range(0, rows, WINDOW_ROWS):
            keys = progress.keys_of_rows(first, WINDOW_ROWS)
            for row in range(first, min(first + WINDOW_ROWS, rows)):
                yield {column: keys.get(row)}

    return RowSource("the progress file", read)
