"""Writer: the function that works in steps, from prompts to texts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from .._steps.rows import Row, Rows
from .decoding import write
from .probe import find_engine
from .result import Generation
from .text import PreparedPrompt, Text, TextDecoder


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

    def write(self, rows: Rows[PreparedPrompt, Any, str]) -> None:
        """Generate the texts of `rows`."""
        with torch.no_grad():
            write(self._engine(), rows, self._begin, self._end)

    def _begin(self, row: Row[PreparedPrompt, Any, str]) -> Text:
        return Text(row.item, self._decoder, row, self._model.device)

    def _end(self, ended: Text) -> None:
        """Answer the caller of a text that has ended."""
        text = ended.text
        ended.emit_rest(text)
        result: Any = text
        try:
            if ended.prompt.read is not None:
                result = ended.prompt.read(text)
        except ValueError as error:
            cut = "" if ended.finish_reason == "stop" else "; it was cut off: raise max_new_tokens"
            raise ValueError(f"the text does not keep to its schema{cut} ({error})") from None
        if self._details:
            value = None if ended.prompt.read is None else result
            size = len(ended.prompt.ids)
            result = Generation(text, ended.tokens, ended.finish_reason, size, value)
        ended.row.finish(result)
