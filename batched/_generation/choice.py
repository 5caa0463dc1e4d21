"""Choice of the next token of each row of a batch.

Each row has settings of its own: processors of scores, as transformers makes them for a prompt that
is generated alone. Those that look at nothing but scores run once for all rows of equal settings;
those that look at earlier tokens run row by row, on tokens without padding. A row that is sampled
draws from a generator of its own. So a text does not depend on the company that its row has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from .row import Row

OF_SCORES_ALONE: Final = {
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
    """Test of a processor: it may look at earlier tokens."""
    kind = type(processor)
    return kind.__module__ != _PACKAGE or kind.__name__ not in OF_SCORES_ALONE


def choose(rows: Sequence[Row], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The next token of each row.

    Args:
        rows: n rows.
        ids: (n, width) all tokens so far, on the left of which is padding.
        scores: (n, vocabulary) logits, as float32; they are changed.
    """
    groups: dict[object, list[int]] = {}
    for place, row in enumerate(rows):
        if row.prompt.processors and not row.ended:
            groups.setdefault(row.prompt.settings, []).append(place)
    for places in groups.values():
        _process(rows, places, ids, scores)
    tokens = scores.argmax(-1)
    sampled = [place for place, row in enumerate(rows) if row.prompt.seed is not None]
    if sampled:
        draws = [rows[place].random.random() for place in sampled]
        tokens[sampled] = _draw(scores[sampled], draws)
    return tokens


def _process(
    rows: Sequence[Row], places: list[int], ids: torch.Tensor, scores: torch.Tensor
) -> None:
    """Processes the scores of rows of equal settings."""
    width = ids.shape[1]
    whole = places if len(places) < len(rows) else slice(None)
    some = scores[whole]
    for number, processor in enumerate(rows[places[0]].prompt.processors):
        if not looks_at_tokens(processor):
            some = processor(ids[whole], some)
            continue
        parts = []
        for at, place in enumerate(places):
            own = rows[place].prompt.processors[number]
            parts.append(own(ids[place : place + 1, width - rows[place].size :], some[at : at + 1]))
        some = torch.cat(parts)
    scores[whole] = some


def _draw(scores: torch.Tensor, draws: list[float]) -> torch.Tensor:
    """Tokens by their probabilities, one for each number from 0 to 1."""
    precise = scores.dtype if scores.device.type == "mps" else torch.float64
    heights = scores.softmax(-1).to(precise).cumsum(-1)
    level = torch.tensor(draws, dtype=precise, device=scores.device)[:, None] * heights[:, -1:]
    # the first whose height is above, so none of probability 0; rounding may leave none above
    last = heights.shape[1] - 1
    return torch.searchsorted(heights, level, right=True)[:, 0].clamp(max=last)
