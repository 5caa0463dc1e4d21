"""Settings of a chat client, checked by pydantic, without the parameters of its requests."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

Text: TypeAlias = Annotated[str, Field(min_length=1)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Price: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class ChatSettings:
    """Settings of one client. The docstring of `ChatClient` explains them."""

    base_url: Annotated[str, Field(pattern="^https?://")]
    model: Text
    schema: type[BaseModel] | None
    max_workers: Count
    api_key: Text | None
    system: Text | None
    timeout_s: Annotated[float, Field(ge=0.001, allow_inf_nan=False)]
    attempts: Count
    max_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    requests_per_minute: Count | None
    tokens_per_minute: Count | None
    prices: Annotated[tuple[Price, Price], Field(strict=False)] | None


def first_error(error: ValidationError) -> str:
    """Return the first error in one line: its place, its message, and the wrong value."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = [".".join(map(str, first["loc"]))] if first["loc"] else []
    return ": ".join([*where, f"{first['msg']}, got {first['input']!r:.60}"])
