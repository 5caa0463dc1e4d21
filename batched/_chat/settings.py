"""Settings of clients: written in the signatures of their constructors, checked by pydantic."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

Address: TypeAlias = Annotated[str, Field(pattern="^https?://")]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
Key: TypeAlias = Text | Callable[[], str]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Seconds: TypeAlias = Annotated[float, Field(ge=0.001, le=3600, allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Prices: TypeAlias = Annotated[tuple[Amount, Amount], Field(strict=False)]

NAMES = {**globals(), "U": BaseModel, "Callable": Callable}
"""Names in the annotations of constructors; `schema` is a subclass of `BaseModel`."""


def read_settings(constructor: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Return the settings in `given`, which `constructor` names, as a frozen dataclass.

    Raises:
        ValueError: a setting is of the wrong type, or out of its range.
    """
    kind = _dataclass(constructor)
    names = kind.__dataclass_fields__
    try:
        return kind(**{name: value for name, value in given.items() if name in names})
    except ValidationError as error:
        raise ValueError(first_error(error)) from None


@functools.cache
def _dataclass(constructor: Callable[..., Any]) -> Any:
    """Return a dataclass with the parameters of `constructor` as fields."""
    hints = typing.get_type_hints(constructor, NAMES, include_extras=True)
    fields = {name: hints[name] for name in hints if name not in ("parameters", "return")}
    kind = type("Settings", (), {"__annotations__": fields})
    return dataclass(kind, frozen=True, config=ConfigDict(strict=True))


def first_error(error: ValidationError) -> str:
    """Return the first error in one line: its place, its message, and the wrong value."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}{': ' * bool(where)}{first['msg']}, got {first['input']!r:.60}".replace(
        "match pattern '^https?://'", "begin with http:// or https://"
    )
