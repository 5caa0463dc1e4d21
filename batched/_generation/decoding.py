"""Writer: the function that works in steps, from prompts to texts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from .._steps.rows import Row, Rows
from .batches import Batch
from .choice import NO_TOKEN, choose
from .places import Places
from .probe import find_engine
from .result import Generation
from .text import PreparedPrompt, Text, TextDecoder

Prompts = Rows[PreparedPrompt, Any, str]


class Writer:
    """The function that works in steps: from prompts to texts."""

    def __init__(self, model: Any, tokenizer: Any, name: str, details: bool) -> None:
        self._decoder = TextDecoder(tokenizer)
        self._model = model
        self._name = name  # of the generator, for messages
        self._details = details

    @cached_property
    def _engine(self) -> Any:
        # found out in the thread that computes: threads of OpenMP, which belong to the thread that
        # computed first, would slow down the threads of any later one
        return find_engine(self._model, self._name)

    def write(self, rows: Prompts) -> None:
        """Generate the texts of `rows`."""
        engine = self._engine()
        with torch.no_grad():
            if isinstance(engine, Places):
                self._write_in_places(engine, rows)
            else:
                self._write_batches(engine, rows)

    def _write_in_places(self, places: Places, rows: Prompts) -> None:
        """Generate texts that join and leave at any token."""
        texts: list[Text] = []  # in the order of the places
        waiting: list[Text] = []  # their prompts are not computed yet

        def leave() -> None:
            rows.leave()
            waiting[:] = [text for text in waiting if not text.row.ended]
            live = [place for place, text in enumerate(texts) if not text.row.ended]
            if len(live) < len(texts):
                texts[:] = [texts[place] for place in places.keep(live)]

        while rows:
            sizes = accumulate(len(text.prompt.ids) for text in waiting)
            count = max(1, bisect_right([*sizes], places.most_prefill))
            if entering := waiting[:count]:
                del waiting[:count]
                texts += entering
                self._add_tokens(entering, places.add([text.prompt.ids for text in entering]))
                leave()
            waiting += map(self._begin, rows.join())
            if len(waiting) < len(texts):  # otherwise more prompts first: they save steps
                self._add_tokens(texts, places.step([text.last for text in texts]))
                leave()

    def _write_batches(self, batch: Batch, rows: Prompts) -> None:
        """Generate texts that join once all earlier texts have ended."""
        while rows:
            if not (texts := [*map(self._begin, rows.join(batch.most))]):
                rows.leave()
                continue

            def follow(logits: torch.Tensor, texts: list[Text] = texts) -> list[int] | None:
                self._add_tokens(texts, logits)
                rows.leave()
                return [text.last for text in texts] if len(rows) else None

            limit = max(text.prompt.limit for text in texts)
            batch.write([text.prompt.ids for text in texts], limit, follow)

    def _add_tokens(self, texts: Sequence[Text], logits: torch.Tensor) -> None:
        """Choose the next token of each text.

        Args:
            texts: n texts; ended texts get tokens of no use.
            logits: (n, vocabulary) logits, as float32; they are changed.
        """
        tokens = choose(texts, logits).tolist()
        for place, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            if text.row.ended:
                continue
            try:
                if text.error is not None:
                    raise text.error
                if token == NO_TOKEN:
                    raise ValueError(
                        "no token can be drawn, because the logits have NaN or only -inf; look at "
                        "the weights of the model and at its logits processors"
                    )
                text.add(token)
                text.apply_criteria(logits[place : place + 1])
                if text.ended:
                    self._end(text)
                else:
                    text.emit()
            except Exception as error:
                if text.row.ended:
                    raise
                text.row.fail(error)

    def _begin(self, row: Row[PreparedPrompt, Any, str]) -> Text:
        return Text(row.item, self._decoder, row, self._model.device)

    def _end(self, ended: Text) -> None:
        """Answer the caller of a text that has ended."""
        text, read = self._decoder.text(ended.prompt, ended.tokens), ended.prompt.read
        ended.emit_rest(text)
        try:
            value = None if read is None else read(text)
        except ValueError as error:
            cut = "" if ended.finish_reason == "stop" else "; it was cut off: raise max_new_tokens"
            raise ValueError(f"the text does not keep to its schema{cut} ({error})") from None
        result: Any = text if read is None else value
        if self._details:
            size = len(ended.prompt.ids)
            result = Generation(text, ended.tokens, ended.finish_reason, size, value)
        ended.row.finish(result)
