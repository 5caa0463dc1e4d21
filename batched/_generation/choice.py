"""Choice of the next token of each row of a batch.

1. Each row has logits processors of its own, as transformers builds them for a prompt that is
   generated alone.
2. Processors that look at logits only run once for all rows with equal settings: for a sampled
   batch of 32 rows, this saves 31 of 32 calls for each token.
3. Processors that look at earlier tokens run row by row, on tokens without padding.
4. A sampled row draws from a random generator of its own.

So the text of a row is independent of the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from .row import Row

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

_PACKAGE: Final = "transformers.generation.logits_process"


def looks_at_tokens(processor: Any) -> bool:
    """Return whether a processor may look at earlier tokens."""
    kind = type(processor)
    return kind.__module__ != _PACKAGE or kind.__name__ not in OF_LOGITS_ALONE


def choose(rows: Sequence[Row], ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the next token of each row.

    Args:
        rows: n rows.
        ids: (n, width) all tokens so far, padded on the left.
        logits: (n, vocabulary) logits, as float32; they are changed.
    """
    groups: dict[object, list[int]] = {}
    for place, row in enumerate(rows):
        if row.prompt.processors and not row.ended:
            groups.setdefault(row.prompt.settings, []).append(place)
    for places in groups.values():
        _process(rows, places, ids, logits)
    tokens = logits.argmax(-1)
    sampled = [place for place, row in enumerate(rows) if row.prompt.seed is not None]
    if sampled:
        draws = [rows[place].random.random() for place in sampled]
        tokens[sampled] = _draw(logits[sampled], draws)
    return tokens


def _process(
    rows: Sequence[Row], places: list[int], ids: torch.Tensor, logits: torch.Tensor
) -> None:
    """Process the logits of rows with equal settings."""
    width = ids.shape[1]
    whole = places if len(places) < len(rows) else slice(None)
    some = logits[whole]
    for number, processor in enumerate(rows[places[0]].prompt.processors):
        if not looks_at_tokens(processor):
            some = processor(ids[whole], some)
            continue
        parts = []
        for at, place in enumerate(places):
            own = rows[place].prompt.processors[number]
            parts.append(own(ids[place : place + 1, width - rows[place].size :], some[at : at + 1]))
        some = torch.cat(parts)
    logits[whole] = some


def _draw(logits: torch.Tensor, draws: list[float]) -> torch.Tensor:
    """Draw one token for each number from 0 to 1, by the probabilities."""
    precise = logits.dtype if logits.device.type == "mps" else torch.float64
    heights = logits.softmax(-1).to(precise).cumsum(-1)
    level = torch.tensor(draws, dtype=precise, device=logits.device)[:, None] * heights[:, -1:]
    # the first token with a greater height, so a token of probability 0 is never drawn; rounding
    # may leave no greater height
    last = heights.shape[1] - 1
    return torch.searchsorted(heights, level, right=True)[:, 0].clamp(max=last)
