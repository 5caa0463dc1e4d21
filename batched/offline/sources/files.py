"""Files of a source: paths, lists of paths, globs and folders, on a disk or behind a URI.

1. Files are read in the sorted order of their paths, as one source; all have one format.
2. A folder stands for all Parquet files in it and in folders below, except names that begin with
   "." or "_". Text files are named by paths or globs.
3. Paths are absolute from the start; the working directory may change.
4. A file is known by its size and its time of change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from posixpath import splitext
from typing import Any, Final

from pyarrow import fs

from ...errors import SourceError
from ..uris import is_remote, open_filesystem, without_credentials
from .errors import refusing

TABLE: Final = ".parquet"
"""Suffix of tables."""

TEXTS: Final = {
    **dict.fromkeys([".jsonl", ".ndjson", ".json"], "json"),
    ".csv": "csv",
    ".tsv": "tsv",
}
"""Formats of text, by suffix."""

COMPRESSED: Final = (".gz", ".zst", ".bz2")
"""Suffixes of compressed text, after that of the format; pyarrow reads them by these names."""

_WILDCARD: Final = re.compile(r"[*?\[]")


class Files:
    """Files of a source, and their stamps when they were found."""

    def __init__(self, filesystem: Any, patterns: Sequence[str], prefix: str = "") -> None:
        """Find files by their patterns; `prefix` makes URIs of the paths of `filesystem`."""
        self.filesystem = filesystem
        self._patterns = patterns
        self._prefix = prefix
        more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
        self.name = repr(self.show(patterns[0])) + more
        self.found = self._find()
        """Size in bytes and time of change in ns by path, in the order of reading."""
        self.paths = list(map(self.show, self.found))
        """Absolute paths; URIs without credentials where the files are remote."""
        self.stamps = [[self.show(path), *stamp] for path, stamp in self.found.items()]
        """Each path with its size and time of change when it was found."""
        self.size = sum(size for size, _ in self.found.values())
        """Bytes of all files."""

    def show(self, path: str) -> str:
        """Return the URI of a remote path, without credentials, or the path."""
        return self._prefix + path

    @cached_property
    def format(self) -> str:
        """Format of the files, `TABLE` or one of the values of `TEXTS`."""
        formats = {format_of(path): path for path in self.found}
        if path := formats.get(""):
            raise SourceError(
                f"{self.show(path)!r}: the suffix is {splitext(path)[1]!r}; files that can be read "
                f"end in {', '.join([TABLE, *TEXTS])}; after a suffix of text may come "
                f"{', '.join(COMPRESSED)}; other tables are passed as pyarrow.dataset.dataset(path)"
            )
        if len(formats) > 1:
            raise SourceError(
                f"{self.name}: files of several formats ({', '.join(sorted(formats))})"
            )
        return next(iter(formats))

    def _find(self) -> dict[str, tuple[int, int | None]]:
        found = {}
        for pattern in self._patterns:
            with refusing(partial(repr, self.show(pattern))):
                files = _search(self.filesystem, pattern)
            files = [file for file in files if file.is_file]
            if not files:
                raise SourceError(
                    f"no file matches {self.show(pattern)!r}; a folder is read for its Parquet "
                    "files, text by a glob such as 'folder/*.jsonl', and a list of texts as "
                    "[{'text': text} for text in texts]"
                )
            found.update({file.path: (file.size, file.mtime_ns) for file in files})
        return dict(sorted(found.items()))

    def check_unchanged(self) -> None:
        """Raise `SourceError` if a file was changed, added or removed since it was found."""
        now = {}
        with suppress(SourceError):  # some pattern has no file any more
            now = self._find()
        if changed := self.found.items() ^ now.items():
            raise SourceError(
                f"{self.show(min(changed)[0])!r} was changed, added or removed while the run read "
                f"{self.name}; run again: rows that are as they were are not computed again"
            )


def find_files(given: Sequence[str]) -> Files:
    """Find the files that paths, globs and folders stand for."""
    filesystems, patterns, prefixes = zip(*map(_locate, given), strict=True)
    return Files(filesystems[0], patterns, prefixes[0])


def format_of(path: str) -> str:
    """Return the format of a file by its name, or ""."""
    stem, suffix = splitext(path)
    if suffix in COMPRESSED:
        return TEXTS.get(splitext(stem)[1].lower(), "")
    return TABLE if suffix.lower() == TABLE else TEXTS.get(suffix.lower(), "")


def _locate(given: str) -> tuple[Any, str, str]:
    """Return filesystem, absolute path there, and prefix of its paths in messages."""
    if is_remote(given):
        with refusing(lambda: f"the source {without_credentials(given)}"):
            filesystem, path = open_filesystem(given)
        if filesystem.type_name != "local":
            return filesystem, path, given.partition("://")[0] + "://"
        given = path
    path = os.path.abspath(os.path.expanduser(given))
    return fs.LocalFileSystem(), Path(path).as_posix(), ""


def _search(filesystem: Any, pattern: str) -> list[Any]:
    """Return `pyarrow.fs.FileInfo` of files, perhaps of more."""
    info = filesystem.get_file_info(pattern)
    if info.type == fs.FileType.Directory:
        files = filesystem.get_file_info(fs.FileSelector(pattern, recursive=True))
        return [
            file
            for file in files
            if format_of(file.path) == TABLE and not re.search("/[._]", file.path[len(pattern) :])
        ]
    if info.is_file or not _WILDCARD.search(pattern):
        return [info]  # brackets and all
    base = _WILDCARD.split(pattern)[0].rpartition("/")[0] or "/"
    is_deep = "/" in pattern[len(base) + 1 :]
    files = filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=is_deep))
    return [
        file
        for file in files
        if _matches(file.path, pattern) and "/." not in file.path[len(base) :]
    ]


def _matches(path: str, pattern: str) -> bool:
    if "**" not in pattern:  # a wildcard is within one folder
        return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)
    return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.replace("**/", ""))
