"""Results in an object store, or in any other filesystem of `pyarrow.fs`.

1. The result is written next to the progress file, and uploaded once it is whole: that disk needs
   room for all of it.
2. One call of pyarrow uploads a file, and no exception of Python can end that call: pyarrow would
   complete the upload of a stream that is given up. So Ctrl-C takes effect after the file.
3. The files of a folder are uploaded one after another, after the old files have been removed, and
   last of all the empty `_SUCCESS`: with it the folder is whole.
4. Until its upload has ended, an object is known by its name alone.
5. A URI may hold secrets: only `path` is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Final

import pyarrow as pa
from pyarrow import fs

from ...errors import ResultError
from ..uris import open_filesystem, without_credentials
from .local import Result, Stamp, remove

WHOLE: Final = "_SUCCESS"
"""Name by which Hadoop and Spark mark a folder that is whole; readers of Parquet pass over it."""
TRIED: Final = ".writing"
"""End of the name of the object by which a destination is tried."""


class RemoteResult(Result):
    """A destination that a URI names."""

    def __init__(self, uri: str, progress: str) -> None:
        """Take the URI of the destination, and the path of the progress file."""
        path = without_credentials(uri)
        try:
            self.filesystem, self.key = open_filesystem(uri)
        except ValueError as error:
            raise ResultError(f"the destination {path} cannot be used: {error}") from None
        if self.filesystem.type_name == "local":
            raise ResultError(f"the destination {path} is on this machine; give it as a path")
        # the key has lost the slash at the end of the URI
        slash = "/" if path.endswith("/") else ""
        super().__init__(self.key + slash, f"{progress}.result", path)

    def find(self) -> tuple[Stamp, list[str]]:
        """Return the stamp of the result that is there, and foreign names in a folder."""
        with self._refuse():
            info = self.filesystem.get_file_info(self.key)
            if info.type == fs.FileType.NotFound:
                return {}, []
            self.check_kind(info.type == fs.FileType.Directory)
            infos = [info]
            if self.is_folder:
                infos = self.filesystem.get_file_info(fs.FileSelector(self.key))
        found: Stamp = {}
        foreign = []
        for info in infos:
            name = info.base_name
            if not self.is_folder or name == WHOLE or fnmatchcase(name, "part-*.parquet"):
                found[name] = [info.size, info.mtime_ns or 0]
            elif name != TRIED:
                foreign.append(name)
        return found, sorted(foreign)

    def replaces(self, path: str) -> bool:
        """Return whether the result would replace this object of the source."""
        key = without_credentials(path).rpartition("://")[2]
        return key == self.key or (self.is_folder and key.startswith(f"{self.key}/"))

    def try_writing(self) -> None:
        """Raise `ResultError` if no object can be written and deleted at the destination."""
        remove(self.writing)
        tried = self._locate(TRIED) if self.is_folder else self.key + TRIED
        with self._refuse():
            with self.filesystem.open_output_stream(tried, compression=None) as stream:
                stream.write(b"tried")
            self.filesystem.delete_file(tried)

    def move(self, stamp: Stamp, note: Callable[[Stamp], object]) -> Stamp:
        """Upload the hidden rows, and remove their local copy."""
        names = list(stamp) if self.is_folder else [self.key.rpartition("/")[2]]
        note({name: [] for name in [*names, *[WHOLE] * self.is_folder]})
        with self._refuse():
            if self.is_folder:
                for name in sorted(self.find()[0]):  # `WHOLE` comes before the parts
                    self.filesystem.delete_file(self._locate(name))
            for name in names:
                file = self.writing / name if self.is_folder else self.writing
                fs.copy_files(str(file), self._locate(name), destination_filesystem=self.filesystem)
            if self.is_folder:
                self.filesystem.open_output_stream(self._locate(WHOLE), compression=None).close()
        remove(self.writing)
        return self.find()[0]

    def _locate(self, name: str) -> str:
        """Return the key of an object of this name."""
        return f"{self.key}/{name}" if self.is_folder else self.key

    @contextmanager
    def _refuse(self) -> Iterator[None]:
        """Raise errors of the store as `ResultError`."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            why, *_ = str(error).split("\n")
            raise ResultError(f"the destination {self.path} cannot be used: {why}") from error
