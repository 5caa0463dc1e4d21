"""Row: one prompt in a batch, from its first new token to its text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from .stream import Stream

FinishReason = Literal["stop", "length"]


class Decode(Protocol):
    """Text of tokens, special ones included or not."""

    def __call__(self, tokens: Sequence[int], *, special: bool = False) -> str: ...


MARGIN: Final = 4
"""Tokens beyond the bytes of a stop string that are looked at for it: the first of them may lose a
space, or be the rest of a character.
"""


@dataclass(eq=False)
class PreparedPrompt:
    """A prompt as ids, and all that is to be known of how it goes on."""

    ids: list[int]
    limit: int
    """Most new tokens."""
    terminators: frozenset[int]
    """Tokens that end the text."""
    stop_strings: tuple[str, ...]
    """Strings that end the text, and are no part of it."""
    seed: int | None
    """Of a text that is sampled; None: the likeliest token is next."""
    settings: object
    """Key that prompts have in common if their scores are to be processed alike."""
    processors: Sequence[Any]
    """Processors of scores, as transformers has them."""
    criteria: Sequence[Any]
    """Further criteria for its end, likewise."""
    stream: Stream | None = None
    """Listener who wants each token at once."""
    cancelled: bool = False
    """True once nobody wants the text any more."""

    @property
    def length(self) -> int:
        """Tokens that it may come to, new ones included."""
        return len(self.ids) + self.limit


@dataclass(eq=False)
class Row:
    """One prompt in one batch."""

    prompt: PreparedPrompt
    decode: Decode
    tokens: list[int] = field(default_factory=list)
    """New ones, the terminator included."""
    ended: bool = False
    finish_reason: FinishReason = "length"

    def __post_init__(self) -> None:
        self.random = random.Random(self.prompt.seed)
        stops = self.prompt.stop_strings
        self._window = max([len(stop.encode()) for stop in stops], default=0) + MARGIN

    @property
    def size(self) -> int:
        """Tokens, those of the prompt included."""
        return len(self.prompt.ids) + len(self.tokens)

    def add(self, token: int) -> None:
        """Adds a token, which may be the last one."""
        prompt = self.prompt
        self.tokens.append(token)
        if token in prompt.terminators or (prompt.stop_strings and self._is_stopped()):
            self.finish_reason, self.ended = "stop", True
        elif len(self.tokens) >= prompt.limit or prompt.cancelled:
            self.ended = True
        if prompt.stream is not None:
            prompt.stream.put(len(self.tokens), token)

    def text(self) -> str:
        """Text of the new tokens, up to what ended it."""
        return text_of(self.prompt, self.tokens, self.decode)

    def _is_stopped(self) -> bool:
        """Test of the text: a stop string, which may be that of a special token, has just been
        written. All is decoded only if it seems so, or if a character was cut, which may spoil
        those beside it.
        """
        stops = self.prompt.stop_strings
        latest = self.decode(self.tokens[-self._window :], special=True)
        if not any(stop in latest for stop in (*stops, "\N{REPLACEMENT CHARACTER}")):
            return False
        whole = self.decode(self.tokens, special=True)
        return any(stop in whole for stop in stops)


def text_of(prompt: PreparedPrompt, tokens: Sequence[int], decode: Decode) -> str:
    """Text of new tokens of `prompt`, without what ended it."""
    text = decode(tokens[:-1] if tokens and tokens[-1] in prompt.terminators else tokens)
    for stop in prompt.stop_strings:
        text = text.partition(stop)[0]
    return text
