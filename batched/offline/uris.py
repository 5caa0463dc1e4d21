"""URIs of files: the recognition of URIs, their form in messages, and their filesystems."""

from __future__ import annotations

import os
import re
from typing import Any, Final

_URI: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]+://")  # a single letter is a drive of Windows


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URI."""
    return _URI.match(os.fspath(path)) is not None


def without_credentials(path: str) -> str:
    """Return a path without the key, the secret and the query of its URI.

    A secret that was not %-encoded may have any character.
    """
    scheme, mark, rest = path.partition("://")
    if not mark:
        return path
    before, _, after = rest.rpartition("@")
    return f"{scheme}://{after if ':' in before else rest}".partition("?")[0]


def open_filesystem(uri: str) -> tuple[Any, str]:
    """Return the `pyarrow.fs` filesystem of a URI, and the path in it.

    A URI that cannot be used is a `ValueError`; its message holds no secret of the URI.
    """
    from pyarrow import ArrowException, fs  # loads the clients of object stores

    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
        return filesystem, path
    except (OSError, ValueError, ImportError, ArrowException) as error:
        why = str(error).partition("\n")[0]
    # raised outside, because a chained error would show the whole URI
    if uri != without_credentials(uri):  # the message may quote a part of it
        why = "pyarrow.fs cannot read that URI; of a key, special characters must be %-encoded"
    raise ValueError(why)
