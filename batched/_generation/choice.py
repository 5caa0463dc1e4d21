"""Choice of the next token of each text.

1. Each text has logits processors of its own, as transformers builds them for a prompt that is
   generated alone.
2. Processors that look at logits only run once for all texts with equal settings: for 32 sampled
   texts, this saves 31 of 32 calls for each token.
3. Processors that look at earlier tokens run text by text, on tokens without padding.
4. A sampled text draws from a random generator of its own.

So each text is independent of all other texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from .._execution.memory import is_out_of_memory
from .text import Text

OF_LOGITS_ALONE: Final = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
"""Processors that do not look at tokens."""

NO_TOKEN: Final = -1
"""Token in place of a draw without probabilities."""

_PACKAGE: Final = "transformers.generation.logits_process"


def looks_at_tokens(processor: Any) -> bool:
    """Return whether a processor may look at earlier tokens."""
    kind = type(processor)
    return kind.__module__ != _PACKAGE or kind.__name__ not in OF_LOGITS_ALONE


def choose(texts: Sequence[Text], logits: torch.Tensor) -> torch.Tensor:
    """Return the next token of each text, `NO_TOKEN` where the logits are NaN.

    An error of a processor that looks at tokens is the error of its text.

    Args:
        texts: n texts.
        logits: (n, vocabulary) logits, as float32; they are changed.
    """
    groups: dict[object, list[int]] = {}
    for place, text in enumerate(texts):
        if text.prompt.processors and not text.ended:
            groups.setdefault(text.prompt.settings, []).append(place)
    for places in groups.values():
        _process(texts, places, logits)
    tokens = logits.argmax(-1)
    sampled = [place for place, text in enumerate(texts) if text.prompt.seed is not None]
    if sampled:
        draws = [texts[place].random.random() for place in sampled]
        tokens[sampled] = _draw(logits[sampled], draws)
    return tokens


def _process(texts: Sequence[Text], places: list[int], logits: torch.Tensor) -> None:
    """Process the logits of texts with equal settings."""
    some = logits[places]
    no_tokens = torch.empty((len(places), 0), dtype=torch.long, device=logits.device)
    for number, processor in enumerate(texts[places[0]].prompt.processors):
        if not looks_at_tokens(processor):
            some = processor(no_tokens, some)
            continue
        for at, place in enumerate(places):
            text, own = texts[place], some[at : at + 1]
            try:
                own.copy_(text.prompt.processors[number](text.ids, own))
            except Exception as error:
                if is_out_of_memory(error) and type(processor).__module__ == _PACKAGE:
                    raise
                text.error = error
    logits[places] = some


def _draw(logits: torch.Tensor, draws: list[float]) -> torch.Tensor:
    """Draw one token for each number from 0 to 1, by the probabilities.

    The token is `NO_TOKEN` where the logits give no probabilities.
    """
    precise = logits.dtype if logits.device.type == "mps" else torch.float64
    heights = logits.softmax(-1).to(precise).cumsum(-1)
    level = torch.tensor(draws, dtype=precise, device=logits.device)[:, None] * heights[:, -1:]
    # the first token with a greater height, so a token of probability 0 is never drawn; rounding
    # may leave no greater height
    last = heights.shape[1] - 1
    tokens = torch.searchsorted(heights, level, right=True)[:, 0].clamp(max=last)
    return tokens.where(heights[:, -1].isfinite(), NO_TOKEN)
