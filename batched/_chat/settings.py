"""Settings of a chat client, checked. The parameters of its requests are no part of them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import Any

from .._core.checks import check_whole


@dataclass(frozen=True)
class ChatSettings:
    """Settings of one client. The docstring of `ChatClient` explains them."""

    base_url: str
    model: str
    schema: type[Any] | None
    max_workers: int
    api_key: str | None
    system: str | None
    timeout_s: float
    attempts: int
    max_wait_s: float
    requests_per_minute: int | None
    tokens_per_minute: int | None
    prices: tuple[float, float] | None

    def __post_init__(self) -> None:
        """Raise an error that names the first wrong setting, or the missing extra."""
        try:
            import_module("openai")
            base_model = import_module("pydantic").BaseModel
        except ImportError as error:
            raise ImportError(
                'ChatClient needs the openai client: pip install "batched-dynamically[chat]"'
            ) from error
        url: object = self.base_url
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url must be an address such as http://localhost:8000/v1, got {url}"
            )
        for name in ("model", "api_key", "system"):
            text = getattr(self, name)
            if not (isinstance(text, str) and text) and (name == "model" or text is not None):
                raise TypeError(f"{name} must be a text that is not empty, got {text!r}")
        schema: object = self.schema
        if schema is not None and not (isinstance(schema, type) and issubclass(schema, base_model)):
            raise TypeError(f"schema must be a class of pydantic (BaseModel), got {schema!r:.60}")
        for name in ("max_workers", "attempts", "requests_per_minute", "tokens_per_minute"):
            count = getattr(self, name)
            if count is not None or not name.endswith("_per_minute"):
                check_whole(name, count)
        for name, least in (("timeout_s", 0.001), ("max_wait_s", 0)):
            seconds = getattr(self, name)
            if not _is_number(seconds, least):
                raise ValueError(
                    f"{name} must be a number of seconds, at least {least}, got {seconds!r}"
                )
        prices: object = self.prices
        if prices is not None and not (
            isinstance(prices, tuple | list)
            and len(prices) == 2
            and all(_is_number(price, 0) for price in prices)
        ):
            raise ValueError(
                "prices must be two numbers, the prices of a million tokens of prompts and of "
                f"answers, got {prices!r:.60}"
            )


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < inf
