"""Opening of sources: everything that `offline.run` accepts as rows.

A source is read from the start as often as needed, in windows of bounded size, always in the same
order. `files` finds paths, `text` and `tables` read them; `objects` reads objects.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .base import Source
from .files import TABLES, find_files
from .objects import open_object
from .spool import spool_rows
from .text import TextSource, open_csv, read_json


def open_source(source: object, *, spool: Path) -> Source:
    """Open paths, a glob, a folder, a URI, "-" (JSON lines of standard input), or an object.

    `spool` is a file for the rows of a source with one pass. `close` deletes it.
    """
    if isinstance(source, str) and source == "-":
        return spool_rows(read_json("<stdin>", sys.stdin.buffer), "standard input", spool)
    given: Any = source if isinstance(source, list | tuple) else [source]
    if not given or not all(isinstance(path, str | os.PathLike) for path in given):
        return open_object(source, spool)
    files = find_files(list(map(os.fspath, given)))
    if files.format in TABLES.values():
        from .tables import open_tables  # loads pandas, which takes long

        return open_tables(files)
    return TextSource(files, read_json) if files.format == "json" else open_csv(files)
