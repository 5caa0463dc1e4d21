"""Functions of a user, for the pages of docs/."""

from __future__ import annotations

from typing import Any


def embed(texts: list[str]) -> list[list[float]]:
    return [[float(len(text)), 1.0] for text in texts]


class Captioner:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, texts: list[str]) -> list[dict[str, Any]]:
        return [{"caption": f"{self.name}: {text}", "score": 0.5} for text in texts]
