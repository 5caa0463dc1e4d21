"""Text of causal language models: many callers with a prompt each, one batch on the model.

Needs the extra `generation` (torch and transformers).
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from .._core.policy import BatchPolicy
from .._function.batched import Batched
from .._function.function import BatchFunction
from .._function.requests import MISSING
from .._function.settings import Options, Settings
from .._runtime.shift import within_run
from .._services.prompts import Prompt, is_prompt
from .row import FinishReason, PreparedPrompt, Row, text_of
from .stream import Stream

if TYPE_CHECKING:
    from typing import Self

_U = TypeVar("_U")

MAX_BATCH_TOKENS: Final = 65_536
"""Most tokens of a batch, those of the prompts and the new ones, if there is no other setting."""


@dataclass(frozen=True)
class Generation:
    """A text, and how it came to be."""

    text: str
    """The new text, without the prompt, special tokens, and the string that ended it."""
    tokens: list[int]
    """The new tokens, the one that ended it included."""
    finish_reason: FinishReason
    """"stop": a terminator, a stop string or a criterion; "length": `max_new_tokens`, or the
    model's last position.
    """
    prompt_tokens: int
    """Tokens of the prompt."""


class TextGenerator(Batched[Prompt, _U, ...]):
    """A causal language model that callers give one prompt each, from threads and event loops, and
    that writes for all of them at once. Each gets the text that it would get alone.

    A prompt is a text; a chat, which is a list of messages (`{"role": ..., "content": ...}`) for
    the tokenizer's own template; or a list of ids. Any other list is a list of prompts.

    Keywords, here and in each call, are those of transformers' `generate`, and

        seed: of a text that is sampled: the same seed gives the same text, alone or in company.
        stop_strings: strings that end the text, and are no part of it.
        eos_token_id: ends the text as well as the terminators that the model has.

    `temperature`, `top_k`, `top_p`, `min_p` or `typical_p` mean `do_sample=True`; a temperature of
    0 means that the likeliest token is next. Calls with different settings share batches. Without
    `max_new_tokens` a text ends after 256 tokens. Beams and several texts for one prompt are
    refused.

    Here also the settings of `batched.dynamically`: `batch_size` is 32 and `max_batch_tokens`,
    which counts prompts and new tokens, 65,536; a batch that runs out of memory runs in halves.
    Prompts of like length run together. The model is put in evaluation mode, and is else left as it
    is, like the tokenizer.

    Args:
        model: one of transformers' causal language models, decoder only.
        tokenizer: its tokenizer. Which side it pads, and with what, does not matter.
        details: whether callers get a `Generation` in place of the text alone.

    Raises:
        TypeError: the model is no such model, or there is no such setting.
        ValueError: a setting has a value that it cannot have.
    """

    @overload
    def __init__(
        self: TextGenerator[str],
        model: Any,
        tokenizer: Any,
        *,
        details: Literal[False] = False,
        **settings: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: TextGenerator[Generation],
        model: Any,
        tokenizer: Any,
        *,
        details: Literal[True],
        **settings: Any,
    ) -> None: ...
    def __init__(
        self, model: Any, tokenizer: Any, *, details: bool = False, **settings: Any
    ) -> None:
        from .reader import OF_BATCHES, PromptReader, layered, listed

        self._arguments = model, tokenizer, {"details": details, **settings}
        of_function = {
            name: settings.pop(name) for name in Settings.__annotations__ & settings.keys()
        }
        options = Options(
            BatchPolicy(max_batch_tokens=MAX_BATCH_TOKENS),
            length=attrgetter("length"),
            on_oom="split",
            isolate_errors=True,
            name=type(self).__name__,
        ).updated(of_function)
        name = str(options.name)
        if not hasattr(model, "generate") or model.config.is_encoder_decoder:
            raise TypeError(
                f"{name} needs a causal language model of transformers, such as "
                f"AutoModelForCausalLM loads, got {type(model).__name__}"
            )
        model.eval()
        own = {
            key: value
            for key, value in model.generation_config.to_diff_dict().items()
            if not key.startswith(("_", "output_", "return_", "transformers_"))
        }
        # a model that shares all but these settings, for they are read anew for each prompt
        kind = type(model.generation_config)
        plain = copy.copy(model)
        given = layered(own, settings)
        plain.generation_config = kind(**{key: given.pop(key) for key in OF_BATCHES & given.keys()})
        given["eos_token_id"] = [
            *listed(own.get("eos_token_id")),
            *listed(settings.get("eos_token_id")),
        ]
        tokenizer = copy.deepcopy(tokenizer)  # which has a state, of padding and truncation
        reader = PromptReader(plain, tokenizer, name, given)
        self._writer = _Writer(plain, tokenizer, details)
        self._reader = reader
        function = BatchFunction.of(self._writer.generate, options, coroutines=False)
        super().__init__(replace(function, preparation=reader))
        self.__doc__ = type(self).__doc__

    @overload
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        device: Any = None,
        dtype: Any = "auto",
        model_kwargs: Mapping[str, Any] | None = None,
        details: Literal[False] = False,
        **settings: Any,
    ) -> TextGenerator[str]: ...
    @overload
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        device: Any = None,
        dtype: Any = "auto",
        model_kwargs: Mapping[str, Any] | None = None,
        details: Literal[True],
        **settings: Any,
    ) -> TextGenerator[Generation]: ...
    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        device: Any = None,
        dtype: Any = "auto",
        model_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        """A generator of a model that `transformers` loads, with its tokenizer.

        Args:
            name_or_path: of the model, on the hub or in a folder.
            device: where it computes; None: a GPU, if there is one.
            dtype: of its weights; "auto": as they were saved.
            model_kwargs: further arguments of `AutoModelForCausalLM.from_pretrained`.
            settings: those of `TextGenerator`.
        """
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error.name} is not installed; run "
                '`pip install "batched-dynamically[generation]"`',
                name=error.name,
            ) from None
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path, dtype=dtype, **(model_kwargs or {})
        )
        if device is None and torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
        if device is not None:
            model.to(device)
        make: Any = cls
        return make(model, tokenizer, **settings)

    @property
    def meaning(self) -> str:
        """Basis of its texts, as JSON: the model's name, its generation config, the chat
        template and settings; functions and other objects by their names. Weights do not count.
        """
        model, tokenizer, settings = self._arguments
        own = {
            # JSON has no keys such as those of sequence_bias
            key: list(value.items()) if isinstance(value, Mapping) else value
            for key, value in settings.items()
            if key not in Settings.__annotations__
        }
        meaning = {
            "model": model.config.name_or_path or type(model).__name__,
            "generation_config": model.generation_config.to_diff_dict(),
            "chat_template": getattr(tokenizer, "chat_template", None),
            "settings": own,
        }
        return json.dumps(meaning, sort_keys=True, default=_told)

    if not TYPE_CHECKING:  # its types are those of every batched function

        async def acall(self, item: Any = MISSING, /, *args: Any, **kwargs: Any) -> Any:
            """As in every batched function; a cancelled call leaves its batch at the next token."""
            if item is not MISSING and not args:
                several = isinstance(item, list) and not (item and is_prompt(item))
                prepare = self._reader.prepare
                item = (
                    [prepare(each, kwargs) for each in item] if several else prepare(item, kwargs)
                )
                kwargs = {}
            try:
                return await super().acall(item, *args, **kwargs)
            except BaseException:
                for prompt in item if isinstance(item, list) else [item]:
                    if isinstance(prompt, PreparedPrompt):
                        prompt.cancelled = True
                raise

    async def stream(self, prompt: Prompt, /, **settings: Any) -> AsyncGenerator[str, None]:
        """The text of one prompt, piece by piece, while it stays in its batch, on any event loop.

        The pieces put together are what a call returns. Whoever stops early (`aclose()`, or the end
        of the task) takes the prompt out of its batch.

        Raises:
            Exception: as a call does.
        """
        item = self._reader.prepare(prompt, settings)
        item.stream = stream = Stream()
        future = self._submit(item, (), {})
        future.add_done_callback(lambda _: stream.end())
        sent, known = "", 0
        try:
            while not stream.ended:
                await stream.wait(known)
                known = len(stream.tokens)
                text = self._writer.stable(item, stream.tokens[:known])
                if len(text) > len(sent):
                    yield text[len(sent) :]
                    sent = text
            result: Any = future.result()
            text = result.text if isinstance(result, Generation) else result
            if len(text) > len(sent):
                yield text[len(sent) :]
        finally:
            item.cancelled = True
            future.cancel()

    def with_options(self, **settings: Any) -> Self:
        """The same model with other settings, of either kind, and a batcher of its own.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        model, tokenizer, before = self._arguments
        make: Any = type(self)
        made: Self = make(model, tokenizer, **{**before, **settings})
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        model, tokenizer, settings = self._arguments
        return partial(type(self), **settings), (model, tokenizer)


def _told(value: Any) -> Any:
    """A value that JSON does not have."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return getattr(value, "__qualname__", type(value).__qualname__)


class _Writer:
    """The batch function: prompts in, texts out."""

    def __init__(self, model: Any, tokenizer: Any, details: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._details = details
        # any token would do, for the mask hides it
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        self._pad = next((pad for pad in pads if pad is not None), 0)
        vocabulary = tokenizer.get_vocab()
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        self._bytes = frozenset([vocabulary[name] for name in names if name in vocabulary])

    def generate(self, prompts: list[PreparedPrompt]) -> list[Any]:
        from .decoding import decode

        shift = within_run()

        def answer(row: Row) -> None:
            # its caller need not wait for the others, nor the row be written again with them
            if shift is not None and shift.answer_early(row.prompt, self._result(row)):
                row.prompt.cancelled = True

        rows = [Row(prompt, self._decode) for prompt in prompts]
        decode(self._model, rows, self._pad, answer)
        return [self._result(row) for row in rows]

    def stable(self, prompt: PreparedPrompt, tokens: Sequence[int]) -> str:
        """Text of the first tokens of a prompt, as far as further ones do not change it."""
        size = len(tokens)
        while size and tokens[size - 1] in self._bytes:  # all of them change with the next one
            size -= 1
        text = text_of(prompt, tokens[:size], self._decode).rstrip("\N{REPLACEMENT CHARACTER}")
        # a stop string may have begun
        ends = [stop[:size] for stop in prompt.stop_strings for size in range(1, len(stop))]
        return text[: len(text) - max([len(end) for end in ends if text.endswith(end)], default=0)]

    def _decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def _result(self, row: Row) -> Any:
        text = row.text()
        if not self._details:
            return text
        return Generation(text, row.tokens, row.finish_reason, len(row.prompt.ids))
