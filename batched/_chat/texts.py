"""Embeddings: texts prepared and checked in the thread of each caller, and requests."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

import numpy as np
from openai.resources.embeddings import AsyncEmbeddings

from .._services.prompts import PromptPreparation
from .answers import Answer, Unusable
from .items import Item
from .questions import CHARACTERS, check_parameters

RESERVED: Final = {
    "encoding_format": "vectors come as numbers",
    "input": "it is made of the texts",
    "model": "it is the client's own",
    "timeout": "the client has timeout_s",
}
"""Parameters of embeddings that callers cannot set, and the reasons."""


class TextRequests(PromptPreparation):
    """Embeddings of one client: preparation of texts, requests, and vectors."""

    length = attrgetter("tokens")
    """Texts of like length share a request; `most_tokens` bounds their number times the longest."""

    def __init__(self, name: str, settings: Any, parameters: Mapping[str, Any]) -> None:
        """Check `parameters`, which hold for all texts."""
        check_parameters(name, AsyncEmbeddings.create, parameters, RESERVED, vars(settings))
        self._name = name  # of the client, for messages
        self._settings = settings
        self._parameters = {"encoding_format": "float", **parameters}
        self.prices = None if settings.price is None else (settings.price, 0.0)
        self.most_items = settings.max_inputs
        self.most_tokens = settings.max_tokens
        self._size: int | None = None  # of the first vector

    def prepare(self, given: Any, settings: Mapping[str, Any], _: object = None, /) -> Item:
        """Return the item for a text.

        Raises:
            TypeError: there is no text, or a parameter for this call.
            ValueError: the text is empty, or has more tokens than one request may have.
        """
        name, count, most = self._name, self._settings.count_tokens, self._settings.max_tokens
        if settings:
            raise TypeError(
                f"{name}: {next(iter(settings))} cannot be set for a call, only for the client"
            )
        if not isinstance(given, str):
            raise TypeError(f"{name} takes a text, got {given!r:.60}")
        if not given:
            raise ValueError(f"{name} got an empty text")
        tokens = 1 + len(given) // CHARACTERS if count is None else count(given)
        if tokens > most:
            raise ValueError(
                f"{name} got a text of {tokens} tokens, of at most {most} (max_tokens)"
            )
        return Item(given, tokens, 0)

    async def send(self, http: Any, items: list[Item]) -> Any:
        """Return the raw response to the request for some texts."""
        return await http.embeddings.with_raw_response.create(
            model=self._settings.model,
            input=[item.content for item in items],
            **self._parameters,
        )

    def read(self, answer: Answer, items: list[Item], _: str | None) -> list[Any]:
        """Return the vectors of some texts.

        Raises:
            Unusable: the answer has not one vector for each text.
        """
        try:
            vectors = {
                entry.get("index", place): _vector(entry["embedding"])
                for place, entry in enumerate(answer.data)
            }
            found = [vectors.pop(place) for place in range(len(items))]
            sizes = {self._size or len(found[0]), *map(len, found)}
            if vectors or len(sizes) > 1:
                raise ValueError(f"{len(vectors)} too many, of the lengths {sizes}")
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise Unusable(f"its answer has wrong vectors: {error!r:.200}", again=True) from None
        self._size = len(found[0])
        return found


def _vector(given: Any) -> Any:
    vector = np.asarray(given, np.float32)
    if vector.ndim != 1 or not vector.size:
        raise ValueError(f"a vector has the shape {vector.shape}")
    if not np.isfinite(vector).all():  # null becomes NaN
        raise ValueError("a vector has NaN, null or infinity")
    return vector
