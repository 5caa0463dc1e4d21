"""Errors of sources: sentences that name the place at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..._core.checks import suggest
from ...errors import SourceError


def explain(error: BaseException) -> str:
    """Return the type and message of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def refusing(place: Callable[[], str]) -> Iterator[None]:
    """Raise every error as `SourceError` with the name of its place."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{place()} cannot be read: {explain(error)}") from error


def row_name(number: int) -> str:
    """Return the name of a row for messages."""
    return f"row {number} (counted from 0)"


def missing_column(name: str, place: str, names: Sequence[str]) -> SourceError:
    """Return the error for a column that `place`, which has the columns `names`, lacks."""
    return SourceError(f"{place} {lack(name, names)}")


def lack(name: str, names: Sequence[str]) -> str:
    """Return the sentence for a column that is not among `names`, without its subject."""
    there = ", ".join(map(repr, names)) or "none"
    return f"has no column {name!r}; its columns are {there}{suggest(name, names)}"


def check_names(place: str, names: Sequence[str]) -> None:
    """Raise `SourceError` if two columns of a place have the same name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise SourceError(f"{place} has two columns {twice[0]!r}; names must differ")
