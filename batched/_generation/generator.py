"""TextGenerator: text of a causal language model, for many callers with one prompt each.

The extra `generation` (torch and transformers) is needed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, TypeVar, overload

from .._core.policy import BatchPolicy
from .._function.continuous import Continuous
from .._function.function import BatchFunction
from .._function.settings import Options, Steps, StepSettings
from .._installation import needs
from .._services.prompts import Prompt
from .result import Generation

if TYPE_CHECKING:
    from typing import Self

_U = TypeVar("_U")
_S = TypeVar("_S")

MAX_BATCH_TOKENS: Final = 65_536
"""Default of `max_batch_tokens`: prompts plus new tokens of a batch."""
OF_HUB: Final = {
    *("revision", "code_revision", "token", "trust_remote_code"),
    *("subfolder", "cache_dir", "local_files_only"),
}
"""Arguments by which a hub finds the files of a model, and of its tokenizer."""


class TextGenerator(Continuous[Prompt, _U, str, ...]):
    """A causal language model that generates text for many callers at once.

    Callers pass one prompt each, from threads and event loops. A prompt joins the texts that are
    being generated at the next token, a text leaves as soon as it has ended, and each caller gets
    the text that its prompt would get alone. `stream(prompt)` returns the text in pieces.

    A prompt is a text, a chat or a list of ids. A chat is a list of messages, each a dict of `role`
    and `content`, for the tokenizer's own template. Any other list is a list of prompts.

    Keywords, here and in each call, are settings of transformers' `generate`. `temperature`,
    `top_k`, `top_p`, `min_p` or `typical_p` mean `do_sample=True`; a temperature of 0 means greedy
    decoding. Calls with different settings share batches. Without `max_new_tokens` a text ends
    after 256 tokens. Beams and several texts for one prompt are refused.

    The settings of `batched.continuously` are accepted here, too. The default of `batch_size`, the
    most texts at once, is 32. The default of `max_batch_tokens`, which counts prompts and new
    tokens, is 65,536. If memory runs out, the texts begin again, fewer at once. The model is put in
    evaluation mode; model and tokenizer are not changed otherwise.

    Texts join at any token if all layers of the model are attention, full or with a window, and
    read a plain cache. Otherwise (static cache, states, ALiBi), texts join once all texts have
    ended.

    Args:
        model: causal language model of transformers, decoder only.
        tokenizer: tokenizer of the model. Its padding side and pad token do not matter.
        details: whether callers get a `Generation` in place of the text alone.
        seed: seed of a sampled text: equal seeds give equal texts, alone or in a batch.
        stop_strings: strings that end the text, and are no part of it.
        eos_token_id: further terminators, besides the terminators of the model.
        schema: class of pydantic, or JSON schema. The text keeps to it, and the result is the
            instance, or the value of the JSON. A text that is cut off is a `ValueError`.
        chat_template_kwargs: arguments of the chat template, `tools` among them.

    Raises:
        TypeError: the model is of another kind, or a setting is unknown.
        ValueError: a setting is out of its range.
    """

    @overload
    def __init__(
        self: TextGenerator[_S],
        model: Any,
        tokenizer: Any,
        *,
        schema: type[_S],
        details: Literal[False] = False,
        **settings: Any,
    ) -> None: ...
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
        self, model: Any, tokenizer: Any = None, *, details: bool = False, **settings: Any
    ) -> None:
        from .beside import beside
        from .decoding import Writer
        from .reader import OF_BATCHES, PromptReader, layered

        self._arguments = model, tokenizer, settings | {"details": details}
        of_function = {
            name: settings.pop(name) for name in StepSettings.__annotations__ & settings.keys()
        }
        options = Options(
            BatchPolicy(max_batch_tokens=MAX_BATCH_TOKENS, flush="eager"),
            steps=Steps(),
            length=attrgetter("length"),
            on_oom="split",
            name=type(self).__name__,
        ).updated(of_function)
        name = str(options.name)
        if (
            not hasattr(model, "generate")
            or model.config.is_encoder_decoder
            or not hasattr(tokenizer, "decode")
        ):
            raise TypeError(
                f"{name} needs a causal language model of transformers and its tokenizer, which "
                f"from_pretrained loads by name, got {type(model).__name__} and "
                f"{type(tokenizer).__name__}"
            )
        model.eval()
        kind = type(model.generation_config)
        own = {
            key: value
            for key, value in model.generation_config.to_diff_dict().items()
            if not key.startswith(("_", "max_length", "output_", "return_", "transformers_"))
            and key in vars(kind())  # files of some models have more
        }
        given = layered(own, settings)
        # most settings are read for each prompt
        plain = beside(model, kind(**{key: given.pop(key) for key in OF_BATCHES & given.keys()}))
        tokenizer = copy.deepcopy(tokenizer)  # its padding and truncation are state
        self._reader = PromptReader(plain, tokenizer, name, options.prepare_threads, given)
        write = Writer(plain, tokenizer, name, details).write
        function = BatchFunction(write, "static", False, options, preparation=self._reader)
        super().__init__(function)

    @overload
    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, details: Literal[False] = False, **settings: Any
    ) -> TextGenerator[str]: ...
    @overload
    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, details: Literal[True], **settings: Any
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
        """Return a generator of a model that transformers loads, with its tokenizer.

        Args:
            name_or_path: name of the model on the hub, or its folder.
            device: device of the model; None: a GPU, if there is one.
            dtype: type of the weights; "auto": as they were saved.
            model_kwargs: further arguments of `AutoModelForCausalLM.from_pretrained`; `revision`,
                `token`, `trust_remote_code` and the like also reach the tokenizer.
            settings: settings of `TextGenerator`.

        Raises:
            TypeError: a setting is unknown.
        """
        with needs("TextGenerator", "generation"):
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from .reader import check_names, names_of

        of_others = {*StepSettings.__annotations__, "details"}
        hint = "; arguments of the model go into model_kwargs"
        check_names(cls.__name__, settings.keys() - of_others, names_of(GenerationConfig), hint)
        given = dict(model_kwargs or {})
        of_hub = {name: given[name] for name in OF_HUB & given.keys()}
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **of_hub)
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype, **given)
        is_placed = hasattr(model, "hf_device_map")  # by a device map, or by a quantizer
        if device is None and not is_placed and torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
        if device is not None:
            model.to(device)
        make: Any = cls
        return make(model, tokenizer, **settings)

    @property
    def meaning(self) -> str:
        """Basis of the texts, as JSON: model name, generation config, chat template and settings.

        Functions and other objects count by their names. Weights do not count.
        """
        model, tokenizer, settings = self._arguments
        own = {key: settings[key] for key in settings.keys() - StepSettings.__annotations__}
        own["sequence_bias"] = str(own.get("sequence_bias"))  # its keys are tuples
        meaning = {
            "model": model.config.name_or_path or type(model).__name__,
            "generation_config": model.generation_config.to_diff_dict(),
            "chat_template": getattr(tokenizer, "chat_template", None),
            "settings": own,
        }
        return json.dumps(meaning, sort_keys=True, default=_plain)

    def with_options(self, **settings: Any) -> Self:
        """Return the same model with other settings, of either kind, and a batcher of its own.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        model, tokenizer, before = self._arguments
        make: Any = type(self)
        made: Self = make(model, tokenizer, **before | settings)
        return made

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        model, tokenizer, settings = self._arguments
        return partial(type(self), **settings), (model, tokenizer)


def _plain(value: Any) -> Any:
    """Return the form in JSON of a value that JSON does not have."""
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    return getattr(value, "__qualname__", type(value).__qualname__)
