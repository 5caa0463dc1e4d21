"""Errors of many kinds that a batch function may raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self


class KeywordOnly(Exception):
    """Error with arguments that differ from the arguments of its constructor."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code", "never_set")

    def __init__(self, code: int | None) -> None:
        self.code = code


class Uncopyable(ValueError):
    """Error without a constructor, as in compiled libraries."""

    def __new__(cls, *_: object) -> Self:
        raise TypeError("use Uncopyable.of")

    @classmethod
    def of(cls, *errors: str) -> Uncopyable:
        made = ValueError.__new__(cls, "several")
        made.errors = errors
        return made

    errors: tuple[str, ...]


def statement(code: str) -> Callable[[], None]:
    """Return a function that runs `code`."""
    return lambda: exec(code, {})


attribute = statement("object().missing")


def group() -> None:
    try:
        attribute()
    except AttributeError as error:
        raise ExceptionGroup("several", [error, KeywordOnly(code=2)]) from error


def keyword_only() -> None:
    raise KeywordOnly(code=3)


def slotted() -> None:
    raise Slotted(None)


def caused() -> None:
    try:
        attribute()
    except AttributeError as error:
        raised = KeywordOnly(code=4)
        raised.add_note("a note")
        raise raised from error


def from_none() -> None:
    try:
        attribute()
    except AttributeError:
        raise KeyError("gone") from None


def uncopyable() -> None:
    raise Uncopyable.of("a", "b")


COPIED: list[Any] = [
    *(attribute, group, keyword_only, slotted, caused, from_none),
    statement("open('/nowhere/at all')"),
    statement("b'\\xff'.decode()"),
    statement("import batched.missing"),
    statement("compile('1 +', 'there', 'eval')"),
]
"""Functions; each raises an error that can be copied."""
