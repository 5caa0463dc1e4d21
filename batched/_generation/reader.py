"""Reader: from the prompt of a caller to ids and checked settings.

transformers itself reads the settings, so that they keep their meaning. Its `generate` is called
with the prompt, up to the moment at which decoding would begin. There it passes on its logits
processors and stopping criteria (`custom_generate`).

The call takes 1 to 4 ms of CPU time, a sixth of the time for 16 tokens of a small model. So the
settings are kept for later prompts, if all their processors fit any prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from .._core.checks import check_whole, suggest
from .._services.prompts import Prompt, PromptPreparation, check_chat, is_id
from .batches import ONE_TEXT
from .beside import innermost
from .choice import OF_LOGITS_ALONE
from .schema import Grammars
from .text import PreparedPrompt

MAX_NEW_TOKENS: Final = 256
"""Default of `max_new_tokens`, if neither the call nor the model sets it."""

SAMPLING: Final = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
"""Settings that imply `do_sample=True`."""

OBJECTS: Final = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
"""Settings that are code of the caller, with state for one prompt."""

OF_BATCHES: Final = {
    "cache_config",
    "cache_implementation",
    "compile_config",
    "disable_compile",
    "use_cache",
}
"""Settings of `generate` that apply to whole batches."""

OF_TEMPLATES: Final = "chat_template_kwargs"
"""Setting with arguments of the tokenizer's chat template."""

OF_SEVERAL: Final = (
    "num_beams",
    "num_return_sequences",
    "guidance_scale",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
)
"""Settings of other modes than greedy decoding and sampling, unless they are 1."""

PLAIN_CRITERIA: Final = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that `Text.add` replaces."""

OF_ANY_PROMPT: Final = OF_LOGITS_ALONE | {
    "ForcedBOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
}
"""Processors that fit any prompt. All further processors hold a prompt, or the text so far."""

KEPT: Final = 64
"""Most combinations of settings that a reader keeps."""


class _Settings(NamedTuple):
    """Settings of a prompt, as transformers reads them."""

    config: Any
    processors: Sequence[Any]
    criteria: Sequence[Any]


def names_of(config: Any) -> set[str]:
    """Return the names of all settings, with a class of generation configs."""
    names = {*vars(config()), *OBJECTS, OF_TEMPLATES, "schema", "seed"}
    return names - {"max_length"}


def check_names(name: str, given: Iterable[str], known: set[str], hint: str = "") -> None:
    """Raise a TypeError for the first name that is no setting. `hint` is advice without another."""
    for each in given:
        if each not in known:
            raise TypeError(f"{name} has no setting {each!r}{suggest(each, known) or hint}")


class PromptReader(PromptPreparation):
    """Reader of the prompts of one model; `defaults` are settings for all prompts."""

    def __init__(
        self, model: Any, tokenizer: Any, name: str, threads: int, defaults: Mapping[str, Any]
    ) -> None:
        self.threads = threads
        self._model = innermost(model)
        self._tokenizer = tokenizer
        self._name = name
        self._defaults = dict(defaults)
        self._of_templates = self._defaults.pop(OF_TEMPLATES, None)
        self._known = names_of(type(model.generation_config)) - OF_BATCHES
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._kept: dict[object, _Settings] = {}
        self._grammars = Grammars(tokenizer, self._vocabulary, name)
        self._read([0], {})  # refuses wrong defaults

    def prepare(
        self, given: Prompt | PreparedPrompt, settings: Mapping[str, Any], _: object = None, /
    ) -> PreparedPrompt:
        """Return the prompt as ids, with its settings.

        Raises:
            TypeError, ValueError: the prompt or a setting is wrong.
        """
        if isinstance(given, PreparedPrompt):
            return given
        of_template = settings.get(OF_TEMPLATES) or self._of_templates or {}
        settings = {name: settings[name] for name in settings.keys() - {OF_TEMPLATES}}
        return self._read(self._ids_of(given, of_template), settings)

    def _ids_of(self, given: Any, of_template: Mapping[str, Any]) -> list[int]:
        """Return the ids of a prompt, and refuse a prompt that the model cannot continue."""
        name = self._name
        if isinstance(given, str):
            ids: list[int] = self._tokenizer(given)["input_ids"]
        elif not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
            raise TypeError(
                f"{name} takes a text, a list of messages or a list of ids, got "
                f"{type(given).__name__}"
            )
        elif given and isinstance(given[0], Mapping):
            ids = self._ids_of_chat(given, of_template)
        else:
            ids = list(given)
        if not ids or given == "":
            raise ValueError(f"{name} got an empty prompt; it needs at least one token or message")
        for token in ids:
            if not is_id(token) or not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"{name}: ids are integers from 0 to {self._vocabulary - 1}, got {token!r:.60};"
                    " a list of texts is several prompts, and ids are of the model's tokenizer"
                )
        if self._positions is not None and len(ids) >= self._positions:
            raise ValueError(
                f"{name}: the prompt has {len(ids)} tokens; the model has {self._positions} "
                "positions, of which a new token needs one"
            )
        return ids

    def _ids_of_chat(self, messages: Any, of_template: Mapping[str, Any]) -> list[int]:
        """Return the ids of a chat by the tokenizer's template."""
        check_chat(self._name, messages)
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{self._name}: the tokenizer has no chat template; pass a text, or set its "
                "chat_template"
            )
        # the model continues an answer that has begun
        begun = messages[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            list(map(dict, messages)),
            tokenize=False,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            **of_template,
        )
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _read(self, ids: list[int], settings: Mapping[str, Any]) -> PreparedPrompt:
        """Return the prompt with its settings.

        Raises:
            TypeError: a setting is unknown, or of the wrong type.
            ValueError: a setting is out of its range.
        """
        given = layered(self._defaults, settings)
        check_names(self._name, given.keys(), self._known)
        seed, schema = given.pop("seed", None), given.pop("schema", None)
        stops = tuple(listed(given.pop("stop_strings", None)))
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise TypeError(
                f"{self._name}: stop_strings must be a string or several, none of them empty, got "
                f"{stops!r}"
            )
        if seed is not None:
            check_whole(f"{self._name}: seed", seed, 0)
        given["eos_token_id"] = given["eos_token_id"] or self._tokenizer.eos_token_id
        if given.get("temperature") == 0:
            del given["temperature"]
            given["do_sample"] = False
        limit = given.pop("max_new_tokens", MAX_NEW_TOKENS)
        check_whole(f"{self._name}: max_new_tokens", limit)
        key: Any = tuple(sorted((name, repr(value)) for name, value in given.items()))
        given["max_new_tokens"] = limit
        config, processors, criteria = self._kept.get(key) or self._parse(ids, given, key)
        if self._positions is not None:
            limit = min(limit, self._positions - len(ids))
        if not config.do_sample:
            seed = None
        elif seed is None:
            seed = random.getrandbits(64)
        terminators = frozenset(listed(config.eos_token_id))
        if stops:  # the text, which has the stop strings, has no special tokens
            added = self._tokenizer.added_tokens_decoder.items()
            terminators |= {token for token, each in added if each.special and str(each) in stops}
        read = None
        if schema is not None:
            form, read = self._grammars.read(schema)
            # first: of these tokens, `top_k` and the like then choose
            processors = [self._grammars.processor(form, len(ids), terminators), *processors]
            key = (form, *key)
        return PreparedPrompt(ids, limit, terminators, stops, seed, key, processors, criteria, read)

    def _parse(self, ids: list[int], given: dict[str, Any], key: object) -> Any:
        """Return the settings as `generate` reads them for a prompt."""
        for name in OF_SEVERAL:
            if given.get(name) not in (None, 1):
                raise ValueError(
                    f"{self._name} writes one text for each prompt, greedily or by sampling; for "
                    f"{name} call the model's own generate"
                )

        def settings_of(_model: object, _ids: object, **parts: Any) -> _Settings:
            criteria = parts["stopping_criteria"]
            return _Settings(
                parts["generation_config"],
                list(parts["logits_processor"]),
                [each for each in criteria if type(each).__name__ not in PLAIN_CRITERIA],
            )

        prompt = torch.tensor([ids], device=self._model.device)
        settings = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            custom_generate=settings_of,
            **given | ONE_TEXT,
        )
        kinds = {type(each).__name__ for each in settings.processors}
        fits_any = OBJECTS.isdisjoint(given) and kinds <= OF_ANY_PROMPT and not settings.criteria
        if fits_any and len(self._kept) < KEPT:
            self._kept[key] = settings
        return settings


def layered(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `before`, overridden by `more` and all that `more` implies.

    None in `more` leaves a setting as before. Terminators of both are kept.
    """
    # arrays, whose `repr` is shortened, become lists
    more = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in more.items()
        if value is not None
    }
    given = {**before, **more}
    ends = {*listed(before.get("eos_token_id")), *listed(more.get("eos_token_id"))}
    given["eos_token_id"] = sorted(ends)
    if "do_sample" not in more and SAMPLING & more.keys():
        given["do_sample"] = True
    return given


def listed(value: Any) -> list[Any]:
    """Return None, one object or several objects as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
