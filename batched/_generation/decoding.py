"""Generation of texts, token by token: in places, or in whole batches of transformers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import Any, Final

import torch
from transformers import DynamicCache

from .._execution.memory import is_out_of_memory
from .._steps.rows import Row, Rows
from .choice import NO_TOKEN, choose
from .places import Places
from .text import PreparedPrompt, Text

PAD: Final = 0
"""Token of the padding. The attention mask hides the padding, so any token serves."""
ONE_TEXT: Final = {"num_beams": 1, "num_return_sequences": 1}
"""Settings with which `generate` has one row for each prompt."""

Prompts = Rows[PreparedPrompt, Any, str]
AnyPrompt = Row[PreparedPrompt, Any, str]
Begin = Callable[[AnyPrompt], Text]
"""Function that returns the text of a row that has joined."""
End = Callable[[Text], None]
"""Function that answers the caller of a text that has ended."""


def write(engine: Places | Batch, rows: Prompts, begin: Begin, end: End) -> None:
    """Generate the texts of `rows`."""
    texts: list[Text] = []  # in the order of the engine
    waiting: list[Text] = []  # their prompts are not computed yet

    def leave() -> None:
        rows.leave()
        waiting[:] = [text for text in waiting if not text.row.ended]
        live = [place for place, text in enumerate(texts) if not text.row.ended]
        if len(live) < len(texts):
            texts[:] = [texts[place] for place in engine.keep(live)]

    while rows:
        joined = rows.join(engine.most) if engine.joins or not texts else []
        waiting += _begin_all(joined, begin)
        if waiting or joined:
            texts += _enter(engine, waiting, end)
            leave()
        if texts:
            _add_tokens(texts, engine.step([text.last for text in texts]), end)
            leave()


def _enter(engine: Places | Batch, waiting: list[Text], end: End) -> list[Text]:
    """Compute the prompts of texts from `waiting`, the oldest first, and their first tokens.

    Return the texts that have entered.
    """
    sizes = accumulate(len(text.prompt.ids) for text in waiting)
    count = max(1, bisect_right([*sizes], engine.most_prefill))
    chosen = waiting[:count]
    del waiting[:count]
    entered = []
    for texts, logits in _enter_together(engine, chosen) if chosen else ():
        _add_tokens(texts, logits, end)
        entered += texts
    return entered


def _enter_together(
    engine: Places | Batch, texts: list[Text]
) -> list[tuple[list[Text], torch.Tensor]]:
    """Compute prompts in one pass or, if that fails, one by one."""
    before = len(engine.sizes)
    try:
        limit = max([text.prompt.limit for text in texts])
        return [(texts, engine.add([text.prompt.ids for text in texts], limit))]
    except Exception as error:
        engine.keep(range(before))
        if is_out_of_memory(error) or not engine.joins:
            raise
        if len(texts) > 1:
            return [each for text in texts for each in _enter_together(engine, [text])]
        texts[0].row.fail(error)
        return []


def _add_tokens(texts: Sequence[Text], logits: torch.Tensor, end: End) -> None:
    """Choose the next token of each text.

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


def _begin_all(rows: Sequence[AnyPrompt], begin: Begin) -> list[Text]:
    """Return the texts of rows that have joined. A row whose text cannot begin fails."""
    texts = []
    for row in rows:
        try:
            texts.append(begin(row))
        except Exception as error:
            row.fail(error)
    return texts


class Batch:
    """Texts that begin together, as transformers computes them: shorter prompts are left-padded."""

    joins = False

    def __init__(self, model: Any, most: int | None = None) -> None:
        self.most = most
        self.most_prefill = inf
        self.dtype = model.dtype
        self._model = model
        self.sizes: list[int] = []

    def add(self, prompts: Sequence[Sequence[int]], limit: int) -> torch.Tensor:
        """Begin with texts of at most `limit` new tokens.

        Returns:
            (n, vocabulary) logits of the next token, as float32.
        """
        model, width = self._model, max(map(len, prompts))
        ids = torch.full((len(prompts), width), PAD)
        mask = torch.zeros_like(ids)
        for place, prompt in enumerate(prompts):
            ids[place, width - len(prompt) :] = torch.tensor(prompt)
            mask[place, width - len(prompt) :] = 1
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            custom_generate=self._take,
            max_new_tokens=limit,
            pad_token_id=PAD,
            **ONE_TEXT,
        )
        return self._logits()

    def _take(self, model: Any, ids: torch.Tensor, **inputs: Any) -> None:
        """Take over where `generate` has prepared the cache, the mask and the positions."""
        for name in ("logits_processor", "stopping_criteria", "generation_config"):
            del inputs[name]  # each text has its own
        self._ids, self._inputs, self._inner = ids, inputs, model
        self._prepare = model.prepare_inputs_for_generation  # adapters replace it meanwhile
        self._step: dict[str, Any] = {"is_first_iteration": True}

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute one further token of each text. Return the logits of the next one, as `add`."""
        new = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._ids = torch.cat([self._ids, new], -1)
        return self._logits()

    def _logits(self) -> torch.Tensor:
        outputs = self._inner(
            **self._prepare(self._ids, **self._step, **self._inputs), return_dict=True
        )
        self._step = {"next_sequence_length": 1 if self._inputs.get("use_cache") else None}
        self._inputs = self._inner._update_model_kwargs_for_generation(outputs, self._inputs)
        # a copy: a view would keep the logits of all positions in memory
        logits: torch.Tensor = outputs.logits[:, -1].to(torch.float32, copy=True)
        return logits

    def keep(self, live: Sequence[int]) -> list[int]:
        """Remove texts that are not live, if the cache can; all of them if none is live.

        Return the former places of the texts that stay.
        """
        if not live:
            return []
        count = self._ids.shape[0]
        # releases of transformers name the cache differently; a static one keeps its batch size
        caches = [each for each in self._inputs.values() if isinstance(each, DynamicCache)]
        if not caches:
            return [*range(count)]
        places = torch.tensor(live, device=self._ids.device)
        caches[0].reorder_cache(places)
        for name, value in self._inputs.items():
            # rows are the last axis but one: `position_ids` of some models have an axis in front
            if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[-2] == count:
                self._inputs[name] = value.index_select(value.ndim - 2, places)
        self._ids = self._ids.index_select(0, places)
        return [*live]
