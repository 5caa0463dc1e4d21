"""Text: one prompt from its first new token to its end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from .._steps.rows import Row
from .result import FinishReason

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
    read: Callable[[str], Any] | None = None
    """Function that returns the value of a text that keeps to a schema."""

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
        self.bytes = frozenset(map(vocabulary.get, names)) - {None}
        """Tokens that stand for one byte; the next token may change the text of all of them."""
        marked = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.special = frozenset([token for token in marked if not self.decode([token])])
        """Tokens that have no text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def text(self, prompt: PreparedPrompt, tokens: Sequence[int]) -> str:
        """Return the text of new tokens of `prompt`, up to a terminator or a stop string."""
        text = self.decode(tokens[:-1] if tokens and tokens[-1] in prompt.terminators else tokens)
        for stop in prompt.stop_strings:
            text = text.partition(stop)[0]
        return text


class Pieces:
    """Text of the tokens of one prompt in pieces that no further token can change.

    Only the tokens since the last piece but one are decoded: a token may lose its first space
    without the token before.
    """

    def __init__(self, decoder: TextDecoder, stop_strings: Sequence[str]) -> None:
        self.is_stopped = False
        """Whether the text has a stop string."""
        self._decoder = decoder
        self._stops = stop_strings
        self._starts = [stop[:size] for stop in stop_strings for size in range(1, len(stop))]
        self._first = self._read = 0  # first token that is decoded, and first token without text
        self._known = ""  # text of the tokens from `_first` to `_read`
        self._held = ""  # text that may be the beginning of a stop string

    def next(self, tokens: Sequence[int]) -> str:
        """Return the text that is new with all `tokens` so far; "" if none is certain.

        Special tokens are left out: a decoder that begins with one loses a space.
        """
        size = len(tokens)
        if self._stops:
            latest = self._decoder.decode(tokens[self._first :])
            latest = self._held + latest[len(self._known) :]
            self.is_stopped = any(stop in latest for stop in self._stops)
        while size > self._read and tokens[size - 1] in self._decoder.bytes:
            size -= 1
        if size <= self._read:
            return ""
        text = self._decoder.decode(tokens[self._first : size])
        if text.endswith(REPLACEMENT) or not text.startswith(self._known):
            return ""
        held = self._held + text[len(self._known) :]
        self._first, self._read = self._read, size
        self._known = self._decoder.decode(tokens[self._first : size])
        back = max([len(start) for start in self._starts if held.endswith(start)], default=0)
        piece, self._held = held[: len(held) - back], held[len(held) - back :]
        return piece


class Text:
    """The new tokens of one prompt, while they are generated."""

    def __init__(
        self, prompt: PreparedPrompt, decoder: TextDecoder, row: Row[Any, Any, str], device: Any
    ) -> None:
        self.prompt = prompt
        self.row = row
        self.tokens: list[int] = []
        """New tokens, the terminator included."""
        self._plain: list[int] = []  # new tokens that are not special
        self.ended = False
        self.finish_reason: FinishReason = "length"
        self.error: Exception | None = None
        """Error of a processor or a criterion of the caller."""
        self.random = random.Random(prompt.seed)
        self._decoder = decoder
        self._pieces: Pieces | None = None
        if row.has_reader or prompt.stop_strings:
            self._pieces = Pieces(decoder, prompt.stop_strings)
        self._piece = ""  # text that is new
        self._sent = 0  # characters of all text before
        self._device = device

    @property
    def last(self) -> int:
        """The last token."""
        return self.tokens[-1] if self.tokens else self.prompt.ids[-1]

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, of shape (1, n)."""
        return torch.tensor([self.prompt.ids + self.tokens], device=self._device)

    def add(self, token: int) -> None:
        """Add a token, and end the text if it is the last one."""
        prompt, pieces = self.prompt, self._pieces
        self.tokens.append(token)
        if token not in self._decoder.special:
            self._plain.append(token)
        if pieces is not None:
            self._piece = pieces.next(self._plain)
        if token in prompt.terminators or (pieces is not None and pieces.is_stopped):
            self.finish_reason, self.ended = "stop", True
        elif len(self.tokens) >= prompt.limit:
            self.ended = True

    def apply_criteria(self, logits: torch.Tensor) -> None:
        """End the text if one of the caller's own stopping criteria is met.

        Args:
            logits: (1, vocabulary) processed logits of the last token.
        """
        for criterion in self.prompt.criteria:
            if bool(torch.as_tensor(criterion(self.ids, logits)).all()):
                late = type(criterion).__name__ == "MaxTimeCriteria"
                self.finish_reason, self.ended = "time" if late else "stop", True

    def emit(self) -> None:
        """Pass the text that is new on to the reader of a stream."""
        if self._piece:
            self._sent += len(self._piece)
            self.row.emit(self._piece)

    def emit_rest(self, text: str) -> None:
        """Pass on all of the whole `text` that the reader does not have."""
        if rest := text[self._sent :]:
            self.row.emit(rest)
