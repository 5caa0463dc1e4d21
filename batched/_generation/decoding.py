"""Loops that generate texts: with places, where texts join at any token, and in whole batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
from transformers import Cache

from .._execution.memory import is_out_of_memory
from .._steps.rows import Row, Rows
from .choice import NO_TOKEN, choose
from .places import Places
from .text import PreparedPrompt, Text

PAD: Final = 0
"""Token of the padding. The attention mask hides the padding, so any token serves."""
ONE_TEXT: Final = {"num_beams": 1, "num_return_sequences": 1}
"""Settings with which `generate` has one row for each prompt."""
MOST_PREFILL: Final = 4096
"""Most tokens of prompts that are computed between two steps, unless one prompt has more."""
SPARE: Final = {"cpu": 128}
"""Most tokens of padding in one pass over prompts, by type of device."""
SPARE_ELSEWHERE: Final = 4096

Prompts = Rows[PreparedPrompt, Any, str]
AnyPrompt = Row[PreparedPrompt, Any, str]
Begin = Callable[[AnyPrompt], Text]
"""Function that returns the text of a row that has joined."""
End = Callable[[Text], None]
"""Function that answers the caller of a text that has ended."""


def write_in_places(model: Any, rows: Prompts, begin: Begin, end: End) -> None:
    """Generate texts that join and leave at any token."""
    places = Places(model)
    texts: list[Text] = []  # by place
    waiting: list[Text] = []  # not in a place yet
    while rows:
        waiting += _begin_all(rows.join(), begin)
        if waiting:
            texts += _enter(places, waiting)
        if texts:
            _step(places, texts, end)
        rows.leave()
        waiting = [text for text in waiting if not text.row.ended]
        for place in reversed(range(len(texts))):
            if texts[place].row.ended:
                places.remove(place)
                texts[place] = texts[-1]
                texts.pop()


def _enter(places: Places, waiting: list[Text]) -> list[Text]:
    """Move texts from `waiting`, the oldest first, to places. Return them in their order there.

    The prompts of one pass are of similar lengths.
    """
    sizes = accumulate(len(text.prompt.ids) for text in waiting)
    count = max(1, bisect_right([*sizes], MOST_PREFILL))
    chosen = sorted(waiting[:count], key=_prompt_size)
    del waiting[:count]
    spare = SPARE.get(places.device.type, SPARE_ELSEWHERE)
    entered: list[Text] = []
    while chosen:
        together = [chosen.pop()]  # the longest first
        padding = 0
        width = _prompt_size(together[0])
        while chosen and (padding := padding + width - _prompt_size(chosen[-1])) <= spare:
            together.append(chosen.pop())
        entered += _enter_together(places, together)
    return entered


def _prompt_size(text: Text) -> int:
    return len(text.prompt.ids)


def _enter_together(places: Places, texts: list[Text]) -> list[Text]:
    """Compute prompts in one pass or, if that fails, one by one. Return the texts with places."""
    before = len(places.sizes)
    try:
        places.add([text.prompt.ids for text in texts])
    except Exception as error:
        places.forget(before)
        if is_out_of_memory(error):
            raise
        if len(texts) > 1:
            return [each for text in texts for each in _enter_together(places, [text])]
        texts[0].row.fail(error)
        return []
    return texts


def _step(places: Places, texts: list[Text], end: End) -> None:
    """Add a token to each text."""
    _add_tokens(texts, places.step([text.last for text in texts]), end)
    places.sizes = [text.size for text in texts]


def _add_tokens(texts: Sequence[Text], logits: torch.Tensor, end: End) -> list[int]:
    """Choose the next token of each text, and return the tokens.

    Args:
        texts: n texts; ended texts get tokens of no use.
        logits: (n, vocabulary) logits, as float32; they are changed.
    """
    tokens: list[int] = choose(texts, logits).tolist()
    for place, (text, token) in enumerate(zip(texts, tokens, strict=True)):
        if text.row.ended:
            continue
        try:
            if text.error is not None:
                raise text.error
            if token == NO_TOKEN:
                raise ValueError(
                    "no token can be drawn, because the logits have NaN or only -inf; look at the "
                    "weights of the model and at its logits processors"
                )
            text.add(token)
            text.apply_criteria(logits[place : place + 1])
            if text.ended:
                end(text)
            else:
                text.emit()
        except Exception as error:
            if text.row.ended:
                raise
            text.row.fail(error)
    return [max(token, 0) for token in tokens]


def _begin_all(rows: Sequence[AnyPrompt], begin: Begin) -> list[Text]:
    """Return the texts of rows that have joined. A row whose text cannot begin fails."""
    texts = []
    for row in rows:
        try:
            texts.append(begin(row))
        except Exception as error:
            row.fail(error)
    return texts


def write_in_batches(model: Any, rows: Prompts, begin: Begin, end: End) -> None:
    """Generate texts in batches; the texts of a batch begin together.

    transformers prepares the cache, the mask and the positions of a batch. It then calls `_loop`,
    as its `custom_generate`. Shorter prompts are left-padded with `PAD`.
    """
    while rows:
        texts = _begin_all(rows.join(), begin)
        if not texts:
            rows.leave()
            continue
        width = max([text.size for text in texts])
        ids = torch.full((len(texts), width), PAD)
        mask = torch.zeros_like(ids)
        for place, text in enumerate(texts):
            ids[place, width - text.size :] = torch.tensor(text.prompt.ids)
            mask[place, width - text.size :] = 1
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            custom_generate=partial(_loop, rows=rows, texts=texts, end=end),
            max_new_tokens=max([text.prompt.limit for text in texts]),
            pad_token_id=PAD,
            **ONE_TEXT,
        )


def _loop(
    model: Any, ids: torch.Tensor, *, rows: Prompts, texts: list[Text], end: End, **inputs: Any
) -> torch.Tensor:
    """Generate tokens until all texts have ended. The return value has no use."""
    for name in ("logits_processor", "stopping_criteria", "generation_config"):
        del inputs[name]  # each text has its own
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
        tokens = _add_tokens(texts, logits, end)
        ids = torch.cat([ids, torch.tensor(tokens, device=ids.device)[:, None]], -1)
        rows.leave()
        live = [place for place, text in enumerate(texts) if not text.row.ended]
        if not live:
            return ids
        # releases of transformers name the cache differently
        cache = next((each for each in inputs.values() if isinstance(each, Cache)), None)
        if len(live) < len(texts) and _can_shrink(cache):
            texts = [texts[place] for place in live]
            ids, inputs = _select(torch.tensor(live, device=ids.device), ids, inputs)


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
