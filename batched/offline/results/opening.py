"""The result of a run: a file or folder that appears when, and only when, it is whole.

1. The destination is tried before anything runs (`open_result`).
2. Rows are written to a hidden path that ends in `.writing`: next to the destination or, if that is
   remote, next to the progress file. The next run removes the leftovers of a killed one.
3. A file that no run of this progress file wrote, or that was changed since, is replaced only with
   `overwrite`. A file is known by its size and time of change, which the progress file keeps; while
   it is published, by its name alone.
4. A source is never replaced by its own result, by any name of the file or symbolic link to it.
5. One call of pyarrow uploads a file, and no exception of Python can end that call: pyarrow would
   complete the upload of a stream that is given up. So Ctrl-C takes effect after the file.
6. The files of a remote folder are uploaded one after another, after the old files have been
   removed, and last of all the empty `_SUCCESS`: with it the folder is whole.
7. A URI may hold secrets: only `path` is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs

from ...errors import ResultError
from ..uris import is_remote, open_filesystem, without_credentials
from .formats import Lines, Parquet

Stamp = dict[str, list[int]]
"""Size in bytes and time of change in ns of the file, or of each file of the folder, by name."""

KNOWN: Final = 16
"""Results, the latest ones, that a progress file knows: runs may have several destinations."""
WHOLE: Final = "_SUCCESS"
"""Name by which Hadoop and Spark mark a folder that is whole; readers of Parquet pass over it."""
TRIED: Final = ".writing"
"""End of the name of the object by which a destination is tried."""
FORMATS: Final = ".parquet, .jsonl or .csv, or '/' for a folder of Parquet files"


def open_result(
    dest: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    known: Iterable[Stamp] = (),
    source_paths: Iterable[str] = (),
    progress: str | os.PathLike[str] = "",
) -> Result:
    """Return the destination once it is tried.

    Its format is known, its folder exists and can be written to, it is none of `source_paths`, and
    no other file is in the way. `known` are the stamps of earlier results. A remote result is
    written next to the file `progress` first.
    """
    result = Result(os.path.expanduser(dest), os.fspath(progress))
    result.overwrite, result.known = overwrite, list(known)
    for path in filter(result.replaces, source_paths):
        raise ResultError(
            f"the result {result.path} would replace {without_credentials(path)!r}, which the "
            "source reads; name another destination"
        )
    result.check()
    result.try_writing()
    return result


class Result:
    """A destination, and the rules for replacing a file there."""

    overwrite = False
    known: list[Stamp]

    def __init__(self, dest: str, progress: str) -> None:
        """Take a path or URI. A remote result is written next to the file `progress` first."""
        self.path = without_credentials(dest)
        self.is_folder = self.path.endswith(("/", os.sep))
        self.suffix = "/" if self.is_folder else Path(self.path).suffix.lower()
        if self.suffix not in (".parquet", ".jsonl", ".csv", "/") or not Path(self.path).name:
            raise ResultError(f"the destination {self.path!r} must end in {FORMATS}")
        self._is_remote = is_remote(dest)
        if self._is_remote:
            try:
                self._filesystem, self._key = open_filesystem(dest)
            except ValueError as error:
                raise ResultError(f"the destination {self.path} cannot be used: {error}") from None
            if self._filesystem.type_name == "local":
                raise ResultError(
                    f"the destination {self.path} is on this machine; give it as a path"
                )
            self.writing = Path(f"{progress}.result.writing")
        else:
            self._filesystem, self._key = fs.LocalFileSystem(), _real(dest)
            self.path = self._key + "/" * self.is_folder
            self.writing = Path(f"{self._key}.writing")

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

    def find(self) -> tuple[Stamp, list[str]]:
        """Return the stamp of the result that is there, and names of foreign files in a folder."""
        with self._refuse():
            info = self._filesystem.get_file_info(self._key)
            if info.type == fs.FileType.NotFound:
                return {}, []
            infos = [info]
            if info.type == fs.FileType.Directory:
                infos = self._filesystem.get_file_info(fs.FileSelector(self._key))
        if (info.type == fs.FileType.Directory) != self.is_folder:
            kind = "a file" if self.is_folder else "a folder"
            raise ResultError(f"the destination {self.path} is {kind}; it must end in {FORMATS}")
        found: Stamp = {}
        foreign = []
        for info in infos:
            name = info.base_name
            is_part = fnmatchcase(name, "part-*.parquet") or (self._is_remote and name == WHOLE)
            if is_part or not self.is_folder:
                found[name] = [info.size, info.mtime_ns or 0]
            elif name != TRIED:
                foreign.append(name)
        return found, foreign

    def replaces(self, path: str) -> bool:
        """Return whether the result would replace this file of the source."""
        key = without_credentials(path).rpartition("://")[2] if self._is_remote else _real(path)
        return key == self._key or (self.is_folder and key.startswith(f"{self._key}/"))

    def try_writing(self) -> None:
        """Raise `ResultError` if no file can be written at the destination."""
        try:
            remove(self.writing)
            self.writing.write_bytes(bytes(4096))  # a full disk may take fewer
            _sync(self.writing)
        except OSError as error:
            raise ResultError(
                f"no file can be written to the folder {self.writing.parent}: {error.strerror}"
            ) from error
        finally:
            remove(self.writing)
        if self._is_remote:
            tried = self._locate(TRIED) if self.is_folder else self._key + TRIED
            with self._refuse():
                with self._filesystem.open_output_stream(tried, compression=None) as stream:
                    stream.write(b"tried")
                self._filesystem.delete_file(tried)

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

        The last stamp belongs to this result. `note` gets stamps before the result appears, so that
        a run killed in between knows the old result, and the new one by its name.
        """
        files = _parts(self.writing) or [self.writing]
        for path in [*files, self.writing]:
            _sync(path)
        self.check()
        names = [Path(self._key).name]
        if self.is_folder:
            names = [*[file.name for file in files], WHOLE]
        note([*self.known, {name: [] for name in names}])
        if self._is_remote:
            self._upload(files)
        else:
            self._rename()
        whole = [known for known in self.known if all(known.values())]
        return [*whole, self.find()[0]][-KNOWN:]

    def close(self) -> None:
        """Remove the rows that are hidden."""
        remove(self.writing)

    def _rename(self) -> None:
        """Move the hidden rows to the destination."""
        file = Path(self._key)
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

    def _upload(self, files: Sequence[Path]) -> None:
        """Upload the hidden rows."""
        with self._refuse():
            for name in self.find()[0] if self.is_folder else ():  # `WHOLE` comes before the parts
                self._filesystem.delete_file(self._locate(name))
            for file in files:
                there = self._locate(file.name)
                fs.copy_files(str(file), there, destination_filesystem=self._filesystem)
            if self.is_folder:
                self._filesystem.open_output_stream(self._locate(WHOLE), compression=None).close()

    def _locate(self, name: str) -> str:
        """Return the key of an object of this name."""
        return f"{self._key}/{name}" if self.is_folder else self._key

    @contextmanager
    def _refuse(self) -> Iterator[None]:
        """Raise errors of the filesystem as `ResultError`."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            why, *_ = str(error).split("\n")
            raise ResultError(f"the destination {self.path} cannot be used: {why}") from error


def _real(path: str) -> str:
    return Path(os.path.realpath(path)).as_posix()


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


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
