"""Sources of rows: what `offline.run` may be given, and how it is read.

A source is read from the start as often as needed, in windows of bounded size, always in the same
order. `_files` reads paths, `_objects` reads objects; `_window` has the rules for columns and
values, `_keys` those for keys.
"""

from __future__ import annotations

import os
from pathlib import Path

from ._files import open_files
from ._keys import Key, keys_of
from ._objects import open_object
from ._window import Source, Window

__all__ = ["Key", "Source", "Window", "keys_of", "open_source"]


def open_source(source: object, *, spool: Path) -> Source:
    """The rows of a path, a glob, a folder of Parquet files, or an object that has rows.

    `spool` is a file that is written if the object can be read only once, and deleted by `close`.
    """
    if isinstance(source, str | os.PathLike):
        return open_files(os.fspath(source))
    return open_object(source, spool)
