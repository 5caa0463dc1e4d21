"""Errors of many kinds that a batch function may raise."""

from __future__ import annotations

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


def attribute() -> None:
    object().missing  # type: ignore[attr-defined]  # noqa: B018  # so it raises


def group() -> None:
    try:
        attribute()
    except AttributeError as error:
        raise ExceptionGroup("several", [error, KeywordOnly(code=2)]) from error


def keyword_only() -> None:
    raise KeywordOnly(code=3)


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
    attribute,
    group,
    keyword_only,
    slotted,
    operating_system,
    text,
    module,
    syntax,
    caused,
    from_none,
]
"""Functions; each raises an error that can be copied."""
