"""Row: one prompt in a batch, from its first new token to its text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .stream import Stream

FinishReason = Literal["stop", "length"]

MARGIN: Final = 4
"""Further tokens in which a stop string is searched, besides one for each of its bytes.

The first of these tokens may lose a space, or be the rest of a character.
"""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""Text of an incomplete character."""


@dataclass(eq=False)
class PreparedPrompt:
    """A prompt as ids, and the settings of its text."""

    ids: list[int]
    limit: int
    """Most new tokens."""
    terminators: frozenset[int]
    """Tokens that end the text."""
    stop_strings: tuple[str, ...]
    """Strings that end the text, and are no part of it."""
    seed: int | None
    """Seed of a sampled text; None: greedy decoding."""
    settings: object
    """Key of the settings; prompts with equal keys have equal processors."""
    processors: Sequence[Any]
    """Logits processors of transformers."""
    criteria: Sequence[Any]
    """Stopping criteria of the caller."""
    stream: Stream | None = None
    """Receiver of each token."""
    cancelled: bool = False
    """Whether the caller has left."""

    @property
    def length(self) -> int:
        """Length of the prompt plus its most new tokens."""
        return len(self.ids) + self.limit


class TextDecoder:
    """Decoder of new tokens to text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        self._bytes = frozenset([vocabulary[name] for name in names if name in vocabulary])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, including special tokens if `special`."""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def text(self, prompt: PreparedPrompt, tokens: Sequence[int]) -> str:
        """Return the text of new tokens of `prompt`, up to a terminator or a stop string."""
        text = self.decode(tokens[:-1] if tokens and tokens[-1] in prompt.terminators else tokens)
        for stop in prompt.stop_strings:
            text = text.partition(stop)[0]
        return text

    def stable_text(self, prompt: PreparedPrompt, tokens: Sequence[int]) -> str:
        """Return the part of the text of `tokens` that no further token can change."""
        size = len(tokens)
        while size and tokens[size - 1] in self._bytes:  # the next token may change all of them
            size -= 1
        text = self.text(prompt, tokens[:size]).rstrip(REPLACEMENT)
        # the end of the text may be the beginning of a stop string
        starts = [stop[:size] for stop in prompt.stop_strings for size in range(1, len(stop))]
        held_back = max([len(start) for start in starts if text.endswith(start)], default=0)
        return text[: len(text) - held_back]


@dataclass(eq=False)
class Row:
    """One prompt in one batch."""

    prompt: PreparedPrompt
    decoder: TextDecoder
    tokens: list[int] = field(default_factory=list)
    """New tokens, the terminator included."""
    ended: bool = False
    finish_reason: FinishReason = "length"

    def __post_init__(self) -> None:
        """Start the row's own random numbers."""
        self.random = random.Random(self.prompt.seed)
        stops = self.prompt.stop_strings
        self._window = max([len(stop.encode()) for stop in stops], default=0) + MARGIN

    @property
    def size(self) -> int:
        """Number of all tokens, the prompt included."""
        return len(self.prompt.ids) + len(self.tokens)

    @property
    def text(self) -> str:
        """Text of the new tokens."""
        return self.decoder.text(self.prompt, self.tokens)

    def add(self, token: int) -> None:
        """Add a token, and end the row if it is the last one."""
        prompt = self.prompt
        self.tokens.append(token)
        if token in prompt.terminators or (prompt.stop_strings and self._is_stopped()):
            self.finish_reason, self.ended = "stop", True
        elif len(self.tokens) >= prompt.limit or prompt.cancelled:
            self.ended = True
        if prompt.stream is not None:
            prompt.stream.put(len(self.tokens), token)

    def _is_stopped(self) -> bool:
        """Return whether the text, special tokens included, has a stop string.

        The latest tokens are decoded first. All tokens are decoded only if the latest tokens seem
        to have a stop string, or have an incomplete character, which may spoil its neighbours.
        """
        stops = self.prompt.stop_strings
        latest = self.decoder.decode(self.tokens[-self._window :], special=True)
        if not any(stop in latest for stop in (*stops, REPLACEMENT)):
            return False
        whole = self.decoder.decode(self.tokens, special=True)
        return any(stop in whole for stop in stops)
