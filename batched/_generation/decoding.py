"""Decoding of one batch: left padding, one pass of the model per token, and removal of ended rows.

`generate` of transformers prepares the KV cache, the mask and the positions. It then calls the loop
of this module, as its `custom_generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache

from .choice import choose
from .row import Row
from .stream import wake

PAD = 0
"""Token of the padding. The attention mask hides the padding, so any token serves."""
ONE_TEXT = {"num_beams": 1, "num_return_sequences": 1}
"""Settings with which `generate` has one row for each prompt."""


def decode(model: Any, rows: Sequence[Row], on_end: Callable[[Row], None]) -> None:
    """Add tokens to each row until all rows have ended, and call `on_end` with each ended row.

    Shorter prompts are left-padded with `PAD`.
    """
    width = max([row.size for row in rows])
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, width - row.size :] = torch.tensor(row.prompt.ids)
        mask[place, width - row.size :] = 1
    model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        custom_generate=partial(_loop, rows=list(rows), on_end=on_end),
        max_new_tokens=max([row.prompt.limit for row in rows]),
        pad_token_id=PAD,
        **ONE_TEXT,
    )


def _loop(
    model: Any,
    ids: torch.Tensor,
    *,
    rows: list[Row],
    on_end: Callable[[Row], None],
    **inputs: Any,
) -> torch.Tensor:
    """Generate tokens until all rows have ended. The return value has no use."""
    for name in ("logits_processor", "stopping_criteria", "generation_config"):
        del inputs[name]  # each row has its own
    step: dict[str, Any] = {"is_first_iteration": True}
    while True:
        outputs = model(
            **model.prepare_inputs_for_generation(ids, **step, **inputs), return_dict=True
        )
        step = {"next_sequence_length": 1 if inputs.get("use_cache") else None}
        inputs = model._update_model_kwargs_for_generation(outputs, inputs)
        # a copy: a view would keep the logits of all positions in memory
        logits = outputs.logits[:, -1].to(torch.float32, copy=True)
        del outputs
        tokens = choose(rows, ids, logits)
        ids = torch.cat([ids, tokens[:, None]], -1)
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if not row.ended:
                row.add(token)
                _apply_criteria(row, ids[place : place + 1], logits[place : place + 1])
                if row.ended:
                    on_end(row)
        wake([row.prompt.stream for row in rows if row.prompt.stream is not None])
        live = [place for place, row in enumerate(rows) if not row.ended]
        if not live:
            return ids
        # releases of transformers name the cache differently
        cache = next((each for each in inputs.values() if isinstance(each, Cache)), None)
        if len(live) < len(rows) and _can_shrink(cache):
            rows = [rows[place] for place in live]
            ids, inputs = _select(torch.tensor(live, device=ids.device), ids, inputs)


def _apply_criteria(row: Row, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """End a row if one of the caller's own stopping criteria is met."""
    for criterion in row.prompt.criteria:
        if bool(torch.as_tensor(criterion(ids[:, ids.shape[1] - row.size :], logits)).all()):
            row.finish_reason, row.ended = "stop", True


def _can_shrink(cache: Any) -> bool:
    """Return whether rows can be removed from the KV cache.

    A static (compiled) cache keeps its batch size.
    """
    layers = getattr(cache, "layers", ())
    return (
        bool(layers)
        and not getattr(cache, "is_compileable", False)
        and all(hasattr(layer, "batch_select_indices") for layer in layers)
    )


def _select(
    live: torch.Tensor, ids: torch.Tensor, inputs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Keep the live rows of the ids, the cache and all other inputs."""
    count = ids.shape[0]
    for name, value in inputs.items():
        if isinstance(value, Cache):
            value.batch_select_indices(live)
        # rows are the last axis but one: `position_ids` of some models have a further axis in front
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[-2] == count:
            inputs[name] = value.index_select(value.ndim - 2, live)
    return ids.index_select(0, live), inputs
