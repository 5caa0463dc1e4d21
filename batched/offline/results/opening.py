"""Opening of destinations: all that `offline.run` accepts as a place for its result."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ...errors import ResultError
from ..uris import is_remote, without_credentials
from .local import Result, Stamp
from .upload import RemoteResult


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
    given = os.fspath(dest)
    if is_remote(given):
        result: Result = RemoteResult(given, os.fspath(progress))
    else:
        result = Result(given, os.path.realpath(given))
    result.overwrite, result.known = overwrite, list(known)
    for path in filter(result.replaces, source_paths):
        raise ResultError(
            f"the result {result.path} would replace {without_credentials(path)!r}, which the "
            "source reads; name another destination"
        )
    result.check()
    result.try_writing()
    return result
