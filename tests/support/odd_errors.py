"""Errors of all kinds that a batch function may raise, for tests of what callers see of them."""

from __future__ import annotations

import json
from typing import Any, Self

import pytest


class KeywordOnly(Exception):
    """Made with other arguments than those that it has afterwards."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code", "never_set")

    def __init__(self, code: int | None) -> None:
        self.code = code


class Refusing(ValueError):
    """Made by a function of its own only, as those of compiled libraries."""

    def __new__(cls, *_: object) -> Self:
        raise TypeError("use Refusing.of")

    @classmethod
    def of(cls, errors: list[str]) -> Refusing:
        made = ValueError.__new__(cls, "several")
        made.errors = errors
        return made

    errors: list[str]


class Grouped(ExceptionGroup[Exception]):
    """A group whose parts, when it is split, are plain ones."""


class Unreadable(type):
    """The type of classes of which nothing can be learnt."""

    __flags__ = property(lambda cls: cls.__missing__)


class Uncopyable(Exception, metaclass=Unreadable):
    """An error of which there is no other."""


def attribute() -> None:
    object().missing  # type: ignore[attr-defined]  # noqa: B018  # so it raises


def name() -> None:
    missing  # type: ignore[name-defined]  # noqa: B018, F821  # so it raises


def group() -> None:
    try:
        attribute()
    except AttributeError as error:
        raise ExceptionGroup("several", [error, KeywordOnly(code=2)]) from error


def grouped() -> None:
    raise Grouped("several", [ValueError(1)])


def keyword_only() -> None:
    raise KeywordOnly(code=3)


def refusing() -> None:
    raise Refusing.of(["a", "b"])


def slotted() -> None:
    raise Slotted(None)


def operating_system() -> None:
    open("/nowhere/at all")  # noqa: SIM115  # it raises


def text() -> None:
    b"\xff".decode()


def module() -> None:
    import batched.missing  # type: ignore[import-not-found]  # noqa: F401  # so it raises


def syntax() -> None:
    compile("1 +", "there", "eval")


def parsed() -> None:
    json.loads("{")


def caused() -> None:
    try:
        name()
    except NameError as error:
        raised = KeywordOnly(code=4)
        raised.add_note("a note")
        raise raised from error


def followed() -> None:
    try:
        name()
    except NameError:
        keyword_only()


def from_none() -> None:
    try:
        name()
    except NameError:
        raise KeyError("gone") from None


def of_httpx() -> None:
    httpx = pytest.importorskip("httpx")
    request = httpx.Request("GET", "http://nowhere.invalid")
    httpx.Response(503, request=request).raise_for_status()


def uncopyable() -> None:
    raise Uncopyable("alone", 1)


RAISING: list[Any] = [
    attribute,
    name,
    group,
    grouped,
    keyword_only,
    refusing,
    slotted,
    operating_system,
    text,
    module,
    syntax,
    parsed,
    caused,
    followed,
    from_none,
    of_httpx,
    uncopyable,
]
"""Functions that raise one each."""
