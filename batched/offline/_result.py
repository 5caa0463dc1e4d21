"""The result of a run: one file that appears when, and only when, it is whole.

1. The destination is tried before anything runs (`open_result`).
2. Rows are written beside it, to a name that ends in `.writing`, and come to the destination by a
   rename once they are on the disk. What a killed run left there is removed.
3. A file that no run of ours made, or that was changed since, is replaced only with `overwrite`. A
   file is known by its size and time of change, which the progress file keeps (`Writer.close`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import ResultError
from ._formats import Lines, Parquet, csv_lines, json_lines

Stamp = dict[str, list[int]]
"""Size in bytes and time of change in ns of the file, or of each file of the folder, by name."""

FORMATS = ".parquet, .jsonl or .csv, or '/' for a folder of Parquet files"


def open_result(
    dest: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    known: Iterable[Stamp] = (),
    part_rows: int = 1_000_000,
    part_bytes: int = 1 << 30,
) -> Result:
    """The destination, tried: the format is known, its folder is there and can be written to, and
    nothing is in the way. `known` are the stamps of what runs of ours made; the files of a folder
    have up to `part_rows` rows, and fewer beyond `part_bytes` before compression.
    """
    given = os.fspath(dest)
    folder = given.endswith(("/", os.sep))
    suffix = "/" if folder else Path(given).suffix.lower()
    if suffix not in (".parquet", ".jsonl", ".csv", "/") or not Path(given).name:
        raise ResultError(f"the destination {given!r} must end in {FORMATS}")
    result = Result(Path(os.path.realpath(given)), suffix, overwrite, list(known))
    result.part_rows, result.part_bytes = part_rows, part_bytes
    result.check()
    result.try_writing()
    return result


class Result:
    """A destination, and what may be replaced there."""

    part_rows: int
    part_bytes: int

    def __init__(self, path: Path, suffix: str, overwrite: bool, known: list[Stamp]) -> None:
        self.path = path
        self.suffix = suffix
        self.writing = path.with_name(f"{path.name}.writing")
        self._overwrite = overwrite
        self._known = known

    def check(self) -> None:
        """Raises `ResultError` if the result must not appear at the destination."""
        path = self.path
        if not path.exists():
            return
        if path.is_dir() != (self.suffix == "/"):
            kind = "a folder" if path.is_dir() else "a file"
            raise ResultError(f"the destination {path} is {kind}; it must end in {FORMATS}")
        if path.is_dir():
            foreign = sorted(set(os.listdir(path)) - {part.name for part in _parts(path)})
            if foreign:
                raise ResultError(
                    f"the folder {path} holds {foreign[0]!r}, which is no part of a result; name "
                    "a folder that is empty or that does not exist"
                )
        found = _stamp(path)
        if found and found not in self._known and not self._overwrite:
            raise ResultError(
                f"{path} is there already, and no run of this progress file left it as it is; "
                "choose another destination, or replace it with overwrite=True"
            )

    def holds(self, stamps: Iterable[Stamp]) -> bool:
        """Whether one of these is there."""
        return self.path.exists() and _stamp(self.path) in stamps

    def try_writing(self) -> None:
        """Raises `ResultError` if the folder of the destination takes no file."""
        folder = self.path.parent
        if not folder.is_dir():
            raise ResultError(f"the destination's folder {folder} does not exist; create it first")
        try:
            _remove(self.writing)
            with open(self.writing, "wb") as file:
                file.write(bytes(4096))  # less may fit where nothing else does
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ResultError(
                f"no file can be written to the destination's folder {folder}: {error.strerror}"
            ) from error
        finally:
            if self.writing.is_file():
                self.writing.unlink()

    def check_space(self, needed: int) -> None:
        """Raises `ResultError` if fewer than `needed` bytes are free where the result goes."""
        free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise ResultError(
                f"the result takes about {needed / 1e6:,.0f} MB, and {self.path.parent} has "
                f"{free / 1e6:,.0f} MB left; make room and run it again, no row is computed twice"
            )

    def writer(self, schema: Any) -> Writer:
        """A writer of rows with this `pyarrow.Schema`, which must be closed or aborted."""
        return Writer(self, schema)


class Writer:
    """Rows on their way into the result, in order."""

    def __init__(self, result: Result, schema: Any) -> None:
        self._result = result
        _remove(result.writing)
        self._rows: Parquet | Lines
        if result.suffix == ".parquet":
            self._rows = Parquet(iter([result.writing]), schema)
        elif result.suffix == "/":
            result.writing.mkdir()
            names = (result.writing / f"part-{number:05}.parquet" for number in count())
            self._rows = Parquet(names, schema, result.part_rows, result.part_bytes)
        elif result.suffix == ".jsonl":
            self._rows = Lines(result.writing, schema.names, json_lines)
        else:
            self._rows = Lines(result.writing, schema.names, csv_lines)
            self._rows.write({name: [name] for name in schema.names})

    def write(self, columns: Mapping[str, Any]) -> None:
        """More rows: for each column of the schema an Arrow array or a list of values."""
        self._rows.write(columns)

    def close(self, note: Callable[[Stamp], None] | None = None) -> Stamp:
        """The rows on the disk and at the destination; `note` is called with the stamp just before,
        so that a run that is killed in between knows both files as its own.
        """
        result = self._result
        self._rows.close()
        writing, path = result.writing, result.path
        files = _parts(writing) if writing.is_dir() else [writing]
        for file in [*files, writing]:
            _sync(file)
        stamp = _stamp(writing)
        if writing.is_file():
            stamp = {path.name: stamp[writing.name]}
        result.check()
        if note is not None:
            note(stamp)
        if result.suffix == "/":
            old = path.with_name(f"{path.name}.replaced")
            _remove(old)
            if path.is_dir():
                path.rename(old)
            writing.rename(path)
            _remove(old)
        else:
            writing.replace(path)
        _sync(path.parent)
        return stamp

    def abort(self) -> None:
        """Nothing of what was written stays."""
        with suppress(Exception):  # of a disk that is full, most likely
            self._rows.close()
        _remove(self._result.writing)


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _stamp(path: Path) -> Stamp:
    files = _parts(path) if path.is_dir() else [path]
    stats = {file.name: file.stat() for file in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _remove(path: Path) -> None:
    """Removes a file, or a folder that holds nothing but parts."""
    if path.is_dir():
        for part in _parts(path):
            part.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """What the file holds, or the names in the folder, on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
