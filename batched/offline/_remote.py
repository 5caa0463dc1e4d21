"""Results in an object store, or wherever else `pyarrow.fs` writes: what holds there.

1. An object is there once its upload is completed, and then it is whole. There is no rename.
2. pyarrow has no way to give an upload up. It completes that of a stream that is collected, and
   hangs where this happens as Python ends. So no stream is collected (`_begin`). What was uploaded
   and not completed stays in the store, unseen, until a rule of its bucket removes it.
3. The files of a folder are completed one after another, after the old ones have been removed, and
   last of all the empty `_SUCCESS`: with it the folder is whole.
4. The time of an object is known too late: a run that is killed meanwhile knows it by its size.
5. Elsewhere than in `AT_ONCE` a file is there from its first byte on, and known by its name alone
   until it is whole.
6. A URI may hold secrets: only `path` is shown.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from ..errors import ResultError
from ._result import Result, Stamp, Writer, part_names, without_credentials

WHOLE: Final = "_SUCCESS"
"""Name by which Hadoop and Spark mark a folder that is whole; readers of Parquet pass over it."""
AT_ONCE: Final = ("s3", "gcs")
"""Filesystems, by pyarrow's names, where a file appears once it is whole."""
TRIED: Final = ".writing"
"""End of the name of the object by which a destination is tried."""


class RemoteResult(Result):
    """A destination that a URI names."""

    def __init__(self, uri: str, overwrite: bool, known: list[Stamp]) -> None:
        path = without_credentials(uri)
        self.filesystem, self.key = _open(uri, path)
        # the key says how the URI was understood, but not whether it ended in a slash
        super().__init__(path, f"{self.key}/" if path.endswith("/") else self.key, overwrite, known)

    def find(self) -> tuple[Stamp, list[str]]:
        with self.refuse(pa.ArrowException):
            info = self.filesystem.get_file_info(self.key)
            if info.type == fs.FileType.NotFound:
                return {}, []
            self.check_kind(info.type == fs.FileType.Directory)
            infos = [info]
            if self.is_folder:
                infos = self.filesystem.get_file_info(fs.FileSelector(self.key))
        found: Stamp = {}
        others = []
        for info in infos:
            name = info.base_name
            if not self.is_folder or name == WHOLE or fnmatchcase(name, "part-*.parquet"):
                found[name] = [info.size, info.mtime_ns or 0]
            elif name != TRIED:
                others.append(name)
        return found, sorted(others)

    def is_known(self, found: Stamp) -> bool:
        return all(
            any(name in stamp and stamp[name] == now[: len(stamp[name])] for stamp in self.known)
            for name, now in found.items()
        )

    def try_writing(self) -> None:
        tried = self.locate(TRIED) if self.is_folder else self.key + TRIED
        with self.refuse(pa.ArrowException):
            with self.filesystem.open_output_stream(tried, compression=None) as stream:
                stream.write(b"tried")
            self.filesystem.delete_file(tried)

    def check_space(self, needed: int) -> None:
        pass  # of a store nobody can tell

    def writer(self, schema: Any, note: Callable[[Stamp], None] | None = None) -> Writer:
        return RemoteWriter(self, schema, note)

    def locate(self, name: str) -> str:
        """Where an object of this name is, as the filesystem knows it."""
        return f"{self.key}/{name}" if self.is_folder else self.key

    def clear(self) -> None:
        """Removes all files of the folder, first what says that it is whole."""
        found, _ = self.find()
        for name in sorted(found):  # `WHOLE` comes before the parts
            self.filesystem.delete_file(self.locate(name))

    @contextmanager
    def refuse(self, also: type[Exception] = OSError) -> Iterator[None]:
        """Errors of the store as `ResultError`."""
        try:
            yield
        except (OSError, also) as error:
            raise ResultError(
                f"the destination {self.path} cannot be used: {_first_line(error)}"
            ) from error


class RemoteWriter(Writer):
    """Rows on their way into a store."""

    def __init__(
        self, result: RemoteResult, schema: Any, note: Callable[[Stamp], None] | None
    ) -> None:
        self._result = result
        self._note = note
        self._stream: Any = None  # of the upload that is not completed yet
        self._name = ""  # of its object
        self._stamp: Stamp = {}  # sizes of what has appeared, or is just about to
        result.known.append(self._stamp)
        with result.refuse():
            super().__init__(result, schema, self._uploads())

    def write(self, columns: Mapping[str, Any]) -> None:
        with self._result.refuse():
            super().write(columns)

    def _uploads(self) -> Iterator[Any]:
        """A stream for each file, in order, the one before being completed."""
        names = part_names() if self._result.is_folder else [self._result.key.rpartition("/")[2]]
        for name in names:
            if self._stream is not None:
                self._complete()
            self._start(name)
            yield self._stream

    def _start(self, name: str) -> None:
        filesystem = self._result.filesystem
        self._name = name
        if filesystem.type_name not in AT_ONCE:
            self._announce([])
        self._stream = _begin(filesystem, self._result.locate(name))

    def _complete(self) -> None:
        if self._result.filesystem.type_name in AT_ONCE:
            self._announce([self._stream.tell()])
        self._stream.close()

    def _announce(self, stamp: list[int]) -> None:
        """Does what must be done before the file appears."""
        is_first = not self._stamp
        self._result.check()
        self._stamp[self._name] = stamp
        if self._note is not None:
            self._note(dict(self._stamp))
        if self._result.is_folder and is_first:
            self._result.clear()

    def close(self) -> Stamp:
        with self._result.refuse():
            self._rows.close()
            self._complete()
            if self._result.is_folder:
                self._start(WHOLE)
                self._complete()
        return self._result.find()[0]

    def abort(self) -> None:
        """Nothing more appears; files of a folder that are there will be replaced by the next
        run.
        """
        with suppress(Exception):  # of a store that is out of reach, most likely
            self._rows.close()


def _begin(filesystem: Any, key: str) -> Any:
    """A stream that is never collected, which would complete its upload."""
    kept: list[Any] = []
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    # in one call, after which an interrupt finds the stream in the list already
    kept.extend(map(partial(filesystem.open_output_stream, compression=None), [key]))
    return kept[0]


def _open(uri: str, path: str) -> tuple[Any, str]:
    """The filesystem of a URI, and the place in it; `path` is what may be shown of the URI."""
    try:
        filesystem, key = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, ImportError, pa.ArrowException) as error:
        why = _first_line(error).replace(uri, path)
    else:
        if filesystem.type_name == "local":
            raise ResultError(f"the destination {path} is on this machine; give it as a path")
        return filesystem, key
    # raised outside, as nobody is to see the error with the whole URI
    secrets = re.split("[:/]", uri.partition("://")[2].rpartition("@")[0])
    secrets += re.findall("=([^&]+)", uri)
    shown = [secret for secret in secrets if secret and (secret in why or unquote(secret) in why)]
    if shown or (uri != path and "parse URI" in why):
        why = "pyarrow.fs cannot read that URI; of a key, special characters must be %-encoded"
    raise ResultError(f"the destination {path} cannot be used: {why}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
