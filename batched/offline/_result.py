"""The result of a run: one file that appears when, and only when, it is whole. (What holds where an
object store has it, says `_remote.py`.)

1. The destination is tried before anything runs (`open_result`).
2. Rows are written beside it, to a name that ends in `.writing`, and come to the destination by a
   rename once they are on the disk. What a killed run left there is removed.
3. A file that no run of ours made, or that was changed since, is replaced only with `overwrite`. A
   file is known by its size and time of change, which the progress file keeps (`Writer.close`).
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from ..errors import ResultError
from ._formats import Lines, Parquet, csv_lines, json_lines

Stamp = dict[str, list[int]]
"""Size in bytes and time of change in ns of the file, or of each file of the folder, by name."""

FORMATS: Final = ".parquet, .jsonl or .csv, or '/' for a folder of Parquet files"
_URI: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]+://")  # a single letter is a drive of Windows


def is_remote(dest: str | os.PathLike[str]) -> bool:
    """True for a URI."""
    return _URI.match(os.fspath(dest)) is not None


def without_credentials(dest: str) -> str:
    """A destination as it may be shown: of a URI neither key nor secret nor query, which may hold
    some. A secret may have any character, by mistake.
    """
    scheme, mark, rest = dest.partition("://")
    if not mark:
        return dest
    before, _, after = rest.rpartition("@")
    return f"{scheme}://{after if ':' in before else rest}".partition("?")[0]


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
    result: Result
    if is_remote(given):
        from ._remote import RemoteResult  # which loads what reaches object stores

        result = RemoteResult(given, overwrite, list(known))
    else:
        result = LocalResult(given, overwrite, list(known))
    result.part_rows, result.part_bytes = part_rows, part_bytes
    result.check()
    result.try_writing()
    return result


class Result(ABC):
    """A destination, and what may be replaced there."""

    part_rows: int
    part_bytes: int

    def __init__(self, path: str, name: str, overwrite: bool, known: list[Stamp]) -> None:
        self.path = path  # as people may see it
        self.is_folder = name.endswith(("/", os.sep))
        self.suffix = "/" if self.is_folder else Path(name).suffix.lower()
        self.overwrite = overwrite
        self.known = known
        if self.suffix not in (".parquet", ".jsonl", ".csv", "/") or not Path(name).name:
            raise ResultError(f"the destination {path!r} must end in {FORMATS}")

    def check(self) -> None:
        """Raises `ResultError` if the result must not appear at the destination."""
        found, others = self.find()
        if others:
            raise ResultError(
                f"the folder {self.path} holds {others[0]!r}, which is no part of a result; name a "
                "folder that is empty or that does not exist"
            )
        if found and not self.is_known(found) and not self.overwrite:
            raise ResultError(
                f"{self.path} is there already, and no run of this progress file left it as it is; "
                "choose another destination, or replace it with overwrite=True"
            )

    def check_kind(self, is_folder: bool) -> None:
        """Raises `ResultError` for a file where a folder is to be, and the other way round."""
        if is_folder != self.is_folder:
            kind = "a folder" if is_folder else "a file"
            raise ResultError(f"the destination {self.path} is {kind}; it must end in {FORMATS}")

    @abstractmethod
    def find(self) -> tuple[Stamp, list[str]]:
        """Stamp of what is there, and names of what is no part of a result; raises `ResultError`
        if it is of the other kind.
        """

    @abstractmethod
    def is_known(self, found: Stamp) -> bool:
        """Whether runs of ours made what was found."""

    def holds(self, stamps: Iterable[Stamp]) -> bool:
        """Whether one of these is there."""
        found, _ = self.find()
        return bool(found) and found in stamps

    @abstractmethod
    def try_writing(self) -> None:
        """Raises `ResultError` if nothing can be written there."""

    @abstractmethod
    def check_space(self, needed: int) -> None:
        """Raises `ResultError` if fewer than `needed` bytes are free where the result goes."""

    @abstractmethod
    def writer(self, schema: Any, note: Callable[[Stamp], None] | None = None) -> Writer:
        """A writer of rows with this `pyarrow.Schema`, which must be closed or aborted. `note` is
        called with the stamp before anything appears, so that a run that is killed in between knows
        both files as its own.
        """


class LocalResult(Result):
    """A destination on a disk."""

    def __init__(self, given: str, overwrite: bool, known: list[Stamp]) -> None:
        self.file = Path(os.path.realpath(given))
        super().__init__(given, given, overwrite, known)
        self.path = str(self.file) + ("/" if self.is_folder else "")
        self.writing = self.file.with_name(f"{self.file.name}.writing")

    def find(self) -> tuple[Stamp, list[str]]:
        path = self.file
        if not path.exists():
            return {}, []
        self.check_kind(path.is_dir())
        others: set[str] = set()
        if path.is_dir():
            others = set(os.listdir(path)) - {part.name for part in _parts(path)}
        return _stamp(path), sorted(others)

    def is_known(self, found: Stamp) -> bool:
        return found in self.known

    def try_writing(self) -> None:
        folder = self.file.parent
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
        free = shutil.disk_usage(self.file.parent).free
        if free < needed:
            raise ResultError(
                f"the result takes about {needed / 1e6:,.0f} MB, and {self.file.parent} has "
                f"{free / 1e6:,.0f} MB left; make room and run it again, no row is computed twice"
            )

    def writer(self, schema: Any, note: Callable[[Stamp], None] | None = None) -> Writer:
        return LocalWriter(self, schema, note)


class Writer(ABC):
    """Rows on their way into the result, in order."""

    def __init__(self, result: Result, schema: Any, targets: Iterator[Any]) -> None:
        """`targets` are paths, or open files that are left open."""
        self._rows: Parquet | Lines
        if result.suffix == ".parquet":
            self._rows = Parquet(targets, schema)
        elif result.is_folder:
            self._rows = Parquet(targets, schema, result.part_rows, result.part_bytes)
        elif result.suffix == ".jsonl":
            self._rows = Lines(next(targets), schema.names, json_lines)
        else:
            self._rows = Lines(next(targets), schema.names, csv_lines)
            self._rows.write({name: [name] for name in schema.names})

    def write(self, columns: Mapping[str, Any]) -> None:
        """More rows: for each column of the schema an Arrow array or a list of values."""
        self._rows.write(columns)

    @abstractmethod
    def close(self) -> Stamp:
        """The rows, safe and at the destination."""

    @abstractmethod
    def abort(self) -> None:
        """Nothing of what was written stays."""


class LocalWriter(Writer):
    """Rows on their way to a disk."""

    def __init__(
        self, result: LocalResult, schema: Any, note: Callable[[Stamp], None] | None
    ) -> None:
        self._result = result
        self._note = note
        _remove(result.writing)
        paths = iter([result.writing])
        if result.is_folder:
            result.writing.mkdir()
            paths = (result.writing / name for name in part_names())
        super().__init__(result, schema, paths)

    def close(self) -> Stamp:
        result = self._result
        self._rows.close()
        writing, path = result.writing, result.file
        files = _parts(writing) if writing.is_dir() else [writing]
        for file in [*files, writing]:
            _sync(file)
        stamp = _stamp(writing)
        if writing.is_file():
            stamp = {path.name: stamp[writing.name]}
        result.check()
        if self._note is not None:
            self._note(stamp)
        if result.is_folder:
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
        with suppress(Exception):  # of a disk that is full, most likely
            self._rows.close()
        _remove(self._result.writing)


def part_names() -> Iterator[str]:
    """Names of the files of a folder."""
    return (f"part-{number:05}.parquet" for number in count())


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
