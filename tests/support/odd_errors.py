"""Errors of many kinds that a batch function may raise."""

from __future__ import annotations

import json
from typing import Any, Self

import pytest


class KeywordOnly(Exception):
    """Error with arguments that differ from the arguments of its constructor."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code", "never_set")

    def __init__(self, code: int | None) -> None:
        self.code = code


class Refusing(ValueError):
    """Error without a constructor, as in compiled libraries."""

    def __new__(cls, *_: object) -> Self:
        raise TypeError("use Refusing.of")

    @classmethod
    def of(cls, errors: list[str]) -> Refusing:
        made = ValueError.__new__(cls, "several")
        made.errors = errors
        return made

    errors: list[str]


class Grouped(ExceptionGroup[Exception]):
    """Subclass of exception groups; its split parts are plain groups."""


class Unreadable(type):
    """Metaclass of classes that cannot be inspected."""

    __flags__ = property(lambda cls: cls.__missing__)


class Uncopyable(Exception, metaclass=Unreadable):
    """Error that cannot be copied."""


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
"""Functions; each raises one of the errors."""
