"""Texts that are JSON of a schema: at each token, only tokens that keep the text valid are left.

llguidance computes these tokens. Of the libraries for this, it alone needs no other package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.nn.functional import pad

from .._installation import needs

FORM: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as `json.dumps` writes it: a model cannot write spaces for ever."""


KEPT: Final = 64
"""Most grammars that are kept."""


class Grammars:
    """Grammars of the schemas of one model and its tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int, name: str) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._name = name  # of the generator, for messages
        self._made: Any = None  # tokenizer of llguidance
        self._kept: dict[str, Any] = {}

    def read(self, schema: Any) -> tuple[str, Callable[[str], Any]]:
        """Return a schema as JSON, and the function that reads its texts.

        Args:
            schema: class of pydantic, or JSON schema.

        Raises:
            TypeError: it is neither.
        """
        if isinstance(schema, Mapping):
            return json.dumps(schema), json.loads
        if hasattr(schema, "model_json_schema") and hasattr(schema, "model_validate_json"):
            return json.dumps(_closed(schema.model_json_schema())), schema.model_validate_json
        raise TypeError(
            f"{self._name}: schema must be a class of pydantic or a JSON schema (a dict), got "
            f"{schema!r:.60}"
        )

    def processor(self, schema: str, size: int, terminators: Collection[int]) -> SchemaProcessor:
        """Return the processor of one text after a prompt of `size` tokens.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: the schema cannot be followed, or no token ends a text.
        """
        if not terminators:
            raise ValueError(
                f"{self._name}: a text with a schema needs a terminator; pass eos_token_id="
            )
        matcher = self._kept.get(schema) or self._matcher(schema)
        return SchemaProcessor(matcher.deep_copy(), size, terminators)

    def _matcher(self, schema: str) -> Any:
        with needs(f"{self._name}: schema", "generation"):
            from llguidance import LLMatcher, hf
        if self._made is None:
            self._made = hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=FORM)
        matcher = LLMatcher(self._made, grammar)
        if matcher.is_error():
            raise ValueError(f"{self._name}: schema cannot be followed: {matcher.get_error()}")
        if len(self._kept) < KEPT:
            self._kept[schema] = matcher
        return matcher


def _closed(schema: Any) -> Any:
    """Return a JSON schema without properties that it does not name: a class ignores them."""
    if isinstance(schema, list):
        return list(map(_closed, schema))
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(closed.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


class SchemaProcessor:
    """Logits processor that leaves the tokens with which one text keeps to its schema."""

    def __init__(self, matcher: Any, size: int, terminators: Collection[int]) -> None:
        self._matcher = matcher
        self._size = size  # tokens of the prompt
        self._ends = [*terminators]
        self._read = 0  # new tokens that the matcher has

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, with minus infinity for tokens that would break the schema.

        Args:
            ids: (1, n) prompt and new tokens.
            scores: (1, vocabulary) scores of the next token.
        """
        matcher, tokens = self._matcher, ids[0, self._size :].tolist()
        if len(tokens) < self._read:  # the text has begun anew
            matcher.reset()
            self._read = 0
        matcher.consume_tokens(tokens[self._read :])
        self._read = len(tokens)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = pad(torch.from_numpy(bits), (0, scores.shape[-1] - len(bits))).bool()
        if matcher.is_accepting():
            allowed[self._ends] = True
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)
