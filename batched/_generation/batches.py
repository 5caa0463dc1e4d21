"""Whole batches: transformers' own `generate` computes texts that begin together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

PAD: Final = 0
"""Token of the padding. The attention mask hides the padding, so any token serves."""
ONE_TEXT: Final = {"num_beams": 1, "num_return_sequences": 1}
"""Settings with which `generate` has one row for each prompt."""

Choose = Callable[[torch.Tensor], list[int] | None]
"""Function from (n, vocabulary) logits as float32, which it may change, to n tokens; None: stop."""


class Batch:
    """Texts that begin together. Shorter prompts are padded on the left."""

    def __init__(self, model: Any, most: int | None = None) -> None:
        self.most = most
        """Most texts at once; None: no bound."""
        self._model = model

    def write(self, prompts: Sequence[Sequence[int]], limit: int, choose: Choose) -> None:
        """Generate at most `limit` new tokens of each text, all of which `choose` chooses."""
        model, width, stops = self._model, max(map(len, prompts)), False
        ids = torch.full((len(prompts), width), PAD)
        mask = torch.zeros_like(ids)
        for place, prompt in enumerate(prompts):
            ids[place, width - len(prompt) :] = torch.tensor(prompt)
            mask[place, width - len(prompt) :] = 1

        def follow(_: object, logits: torch.Tensor) -> torch.Tensor:
            nonlocal stops
            tokens = choose(logits)
            stops = tokens is None
            forced = torch.full_like(logits, -torch.inf)
            forced[range(len(prompts)), tokens or 0] = 0.0
            return forced

        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            logits_processor=[follow],
            stopping_criteria=[lambda ids, _: torch.full(ids.shape[:1], stops, device=ids.device)],
            max_new_tokens=limit,
            pad_token_id=PAD,
            **ONE_TEXT,
        )
