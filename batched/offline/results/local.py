"""The result of a run: a file or folder that appears when, and only when, it is whole.

1. The destination is tried before anything runs (`opening.open_result`).
2. Rows are written to a hidden path that ends in `.writing`: next to the destination or, if that is
   remote, next to the progress file. The next run removes the leftovers of a killed one.
3. A file that no run of this progress file wrote, or that was changed since, is replaced only with
   `overwrite`. A file is known by its size and time of change, which the progress file keeps.
4. A source is never replaced by its own result, by any name of the file or link to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from ...errors import ResultError
from .formats import Lines, Parquet

Stamp = dict[str, list[int]]
"""Size in bytes and time of change in ns of the file, or of each file of the folder, by name."""

KNOWN: Final = 16
"""Results, the latest ones, that a progress file knows: runs may have several destinations."""

FORMATS: Final = ".parquet, .jsonl or .csv, or '/' for a folder of Parquet files"


class Result:
    """A destination on a disk, and the rules for replacing a file there."""

    overwrite = False
    known: list[Stamp]

    def __init__(self, given: str, file: str, shown: str | None = None) -> None:
        """Take a destination: its path on a disk, or for a remote one the path of its local copy.

        `shown` is a remote destination without its secrets.
        """
        self.is_folder = given.endswith(("/", os.sep))
        self.suffix = "/" if self.is_folder else Path(given).suffix.lower()
        self.file = Path(file)
        self.path = shown or file + "/" * self.is_folder
        self.writing = self.file.with_name(f"{self.file.name}.writing")
        if self.suffix not in (".parquet", ".jsonl", ".csv", "/") or not Path(given).name:
            raise ResultError(f"the destination {shown or given!r} must end in {FORMATS}")

    @property
    def is_typed(self) -> bool:
        """Whether each column has one Arrow type: Parquet; text takes values as they are."""
        return self.suffix in (".parquet", "/")

    def check(self) -> None:
        """Raise `ResultError` if the result must not appear at the destination."""
        found, others = self.find()
        if others:
            raise ResultError(
                f"the folder {self.path} holds {others[0]!r}, which is no part of a result; name a "
                "folder that is empty or that does not exist"
            )
        if not self.overwrite and not all(map(self._is_known, found.items())):
            raise ResultError(
                f"{self.path} is there already, and no run of this progress file left it as it is; "
                "choose another destination, or replace it with overwrite=True"
            )

    def _is_known(self, found: tuple[str, list[int]]) -> bool:
        name, now = found
        return any(name in stamp and stamp[name] == now[: len(stamp[name])] for stamp in self.known)

    def check_kind(self, is_folder: bool) -> None:
        """Raise `ResultError` for a file where a folder is to be, or a folder for a file."""
        if is_folder != self.is_folder:
            kind = "a folder" if is_folder else "a file"
            raise ResultError(f"the destination {self.path} is {kind}; it must end in {FORMATS}")

    def find(self) -> tuple[Stamp, list[str]]:
        """Return the stamp of the result that is there, and names of foreign files in a folder."""
        file = self.file
        if not file.exists():
            return {}, []
        self.check_kind(file.is_dir())
        found = _stamp(file)
        return found, sorted(set(os.listdir(file)) - found.keys()) if self.is_folder else []

    def replaces(self, path: str) -> bool:
        """Return whether the result would replace this file of the source."""
        read = os.path.dirname(os.path.abspath(path)) if self.is_folder else path
        there = self.file.exists() and os.path.exists(read)
        return there and os.path.samefile(read, self.file)

    def try_writing(self) -> None:
        """Raise `ResultError` if no file can be written next to the destination."""
        try:
            remove(self.writing)
            self.writing.write_bytes(bytes(4096))  # a full disk may take fewer
            _sync(self.writing)
        except OSError as error:
            raise ResultError(
                f"no file can be written to the destination's folder {self.file.parent}: "
                f"{error.strerror}"
            ) from error
        finally:
            if self.writing.is_file():
                self.writing.unlink()

    def create(self, columns: Any) -> Parquet | Lines:
        """Return a writer of rows that are hidden until `publish`.

        `columns` is a `pyarrow.Schema` if the result is typed, else the names of the columns.
        """
        writing = self.writing
        remove(writing)
        if self.is_folder:
            writing.mkdir()
            names = (f"part-{number:05}.parquet" for number in count())
            return Parquet((writing / name for name in names), columns)
        if self.is_typed:
            return Parquet(iter([writing]), columns)
        return Lines(writing, list(columns), is_json=self.suffix == ".jsonl")

    def publish(self, note: Callable[[Sequence[Stamp]], object]) -> list[Stamp]:
        """Publish the result once its writer is closed. Return the stamps of known results.

        The last stamp belongs to this result. `note` gets the stamps before the result appears, so
        that a run killed in between knows the old result and the new one.
        """
        for file in [*_parts(self.writing), self.writing]:
            _sync(file)
        self.check()
        stamp = self.move(_stamp(self.writing), lambda stamp: note([*self.known, stamp]))
        whole = [known for known in self.known if all(known.values())]
        return [*whole, stamp][-KNOWN:]

    def abort(self) -> None:
        """Remove the rows that are hidden."""
        remove(self.writing)

    def move(self, stamp: Stamp, note: Callable[[Stamp], object]) -> Stamp:
        """Move the hidden rows to the destination, once `note` has the stamp."""
        file = self.file
        if not self.is_folder:
            stamp = {file.name: stamp[self.writing.name]}
        note(stamp)
        if self.is_folder:
            old = file.with_name(f"{file.name}.replaced")
            if file.is_dir():
                remove(old)
                file.rename(old)
            self.writing.rename(file)
            remove(old)
        else:
            self.writing.replace(file)
        _sync(file.parent)
        return stamp


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _stamp(path: Path) -> Stamp:
    """Return the stamp of a file or a folder."""
    files = _parts(path) if path.is_dir() else [path]
    stats = {file.name: file.stat() for file in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def remove(path: Path) -> None:
    """Remove a file, or a folder that holds nothing but parts."""
    if path.is_dir():
        for part in _parts(path):
            part.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
