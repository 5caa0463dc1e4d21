"""Reader: what a caller passes, as ids and settings that are known to be good.

transformers itself reads the settings: its `generate` is called for a prompt, up to the moment at
which it would begin, and hands over what it has made of them (`custom_generate`). So they mean what
they mean there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, cast

import torch

from .._services.prompts import Prompt, check_chat, is_id, is_prompt
from .choice import OF_SCORES_ALONE
from .decoding import ONE_TEXT
from .row import PreparedPrompt

MAX_NEW_TOKENS: Final = 256
"""New tokens, where neither call nor model says how many."""

SAMPLING: Final = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
"""Settings that mean that the text is to be sampled."""

OBJECTS: Final = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
"""Settings that are code of the caller's, with a state of its own for each prompt."""

OF_BATCHES: Final = {
    "cache_config",
    "cache_implementation",
    "compile_config",
    "disable_compile",
    "use_cache",
}
"""Settings of `generate` that prompts cannot have one by one."""

MODES: Final = ("greedy_search", "sample")

OF_MORE: Final = ("num_beams", "num_return_sequences", "guidance_scale")
"""Settings other than 1 of which mean more rows than prompts."""

PLAIN_CRITERIA: Final = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Criteria that each row has in another form."""

OF_ANY_PROMPT: Final = OF_SCORES_ALONE | {
    "ForcedBOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
}
"""Processors that may serve other prompts too. Others know of theirs, or of the text so far."""

KEPT: Final = 64
"""Most sets of settings of which it is kept what became of them."""


class _Settings(NamedTuple):
    """Settings of a prompt, as transformers reads them."""

    config: Any
    processors: Sequence[Any]
    criteria: Sequence[Any]


class PromptReader:
    """Reader of the prompts of one model. `defaults` are settings for all of them."""

    def __init__(self, model: Any, tokenizer: Any, name: str, defaults: Mapping[str, Any]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._name = name
        self._defaults = defaults
        self._known = {*vars(type(model.generation_config)()), *OBJECTS, "seed"}
        self._positions: int | None = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._kept: dict[object, _Settings] = {}
        self._read([0], {})  # refuses defaults that no prompt can have

    def is_one(self, given: Any) -> bool:
        return is_prompt(given)

    def prepare(
        self, given: Prompt | PreparedPrompt, settings: Mapping[str, Any]
    ) -> PreparedPrompt:
        if isinstance(given, PreparedPrompt):
            return given
        return self._read(self._ids_of(given), settings)

    def _ids_of(self, given: Prompt) -> list[int]:
        """Ids of a prompt, which is refused if the model cannot go on with it."""
        name = self._name
        ids: list[int]
        if isinstance(given, str):
            if not given:
                raise ValueError(f"{name} got an empty prompt; it needs at least one character")
            ids = self._tokenizer(given)["input_ids"]
        elif not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
            raise TypeError(
                f"{name} takes a text, a list of messages or a list of ids, got "
                f"{type(given).__name__}"
            )
        elif not given:
            raise ValueError(f"{name} got an empty prompt; it needs at least one token or message")
        elif isinstance(given[0], Mapping):
            ids = self._ids_of_chat(given)
        else:
            ids = list(cast("Sequence[int]", given))
        if not ids:
            raise ValueError(f"{name} got an empty prompt; the tokenizer finds no token in it")
        for number, token in enumerate(ids):
            if not is_id(token) or not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"{name}: ids are integers from 0 to {self._vocabulary - 1}, got "
                    f"{token!r:.60} at place {number}"
                )
        if self._positions is not None and len(ids) >= self._positions:
            raise ValueError(
                f"{name}: the prompt has {len(ids)} tokens; the model has {self._positions} "
                "positions, of which a new token needs one"
            )
        return ids

    def _ids_of_chat(self, messages: Any) -> list[int]:
        check_chat(self._name, messages)
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{self._name}: the tokenizer has no chat template; pass a text, or set its "
                "chat_template"
            )
        # an answer that is begun already goes on
        begun = messages[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            list(map(dict, messages)),
            tokenize=False,
            add_generation_prompt=not begun,
            continue_final_message=begun,
        )
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _read(self, ids: list[int], settings: Mapping[str, Any]) -> PreparedPrompt:
        """The prompt with its settings.

        Raises:
            TypeError: there is no such setting.
            ValueError: one has a value that it cannot have.
        """
        for name in OF_BATCHES & settings.keys():
            raise TypeError(f"{self._name}: {name} is to be set where the generator is made")
        given = layered(self._defaults, settings)
        for name in given.keys() - self._known:
            alike = get_close_matches(name, self._known, 1)
            hint = f"; did you mean {alike[0]!r}?" if alike else ""
            raise TypeError(f"{self._name} has no setting {name!r}{hint}")
        seed, stops = given.pop("seed", None), given.pop("stop_strings", None) or ()
        stops = tuple(stops) if isinstance(stops, (list, tuple)) else (stops,)
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise TypeError(
                f"{self._name}: stop_strings must be a string or several, none of them empty, got "
                f"{stops!r}"
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"{self._name}: seed must be an integer, got {seed!r}")
        ends = [*listed(self._defaults.get("eos_token_id")), *listed(settings.get("eos_token_id"))]
        given["eos_token_id"] = sorted({*ends}) or self._tokenizer.eos_token_id
        if given.get("temperature") == 0:
            del given["temperature"]
            given["do_sample"] = False
        limit = self._limit(
            len(ids), given.pop("max_new_tokens", None), given.pop("max_length", None)
        )
        key = tuple(sorted((name, repr(value)) for name, value in given.items()))
        given["max_new_tokens"] = limit
        config, processors, criteria = self._kept.get(key) or self._parse(ids, given, key)
        if self._positions is not None:
            limit = min(limit, self._positions - len(ids))
        if config.do_sample and seed is None:
            seed = random.getrandbits(64)
        return PreparedPrompt(
            ids,
            limit,
            frozenset(listed(config.eos_token_id)),
            stops,
            seed if config.do_sample else None,
            key,
            processors,
            criteria,
        )

    def _limit(self, size: int, new: object, length: object) -> int:
        """New tokens that a prompt of `size` tokens may get."""
        for name, value in (("max_new_tokens", new), ("max_length", length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{self._name}: {name} must be an integer, got {value!r}")
        if isinstance(new, int):
            if new < 1:
                raise ValueError(f"{self._name}: max_new_tokens must be at least 1, got {new}")
            return new
        if not isinstance(length, int):
            return MAX_NEW_TOKENS
        if length <= size:
            raise ValueError(
                f"{self._name}: max_length={length} leaves no room after a prompt of {size} tokens"
            )
        return length - size

    def _parse(self, ids: list[int], given: dict[str, Any], key: object) -> _Settings:
        """Settings, as `generate` reads them for a prompt."""
        made: list[_Settings] = []

        def catch(_: Any, ids: Any, **parts: Any) -> Any:
            made.append(
                _Settings(
                    parts["generation_config"],
                    list(parts["logits_processor"]),
                    [each for each in parts["stopping_criteria"] if _is_own(each)],
                )
            )
            return ids

        others = [name for name in OF_MORE if given.get(name) not in (None, 1)]
        plain = {name: value for name, value in given.items() if name not in OBJECTS}
        if not others:
            config = type(self._model.generation_config)(**plain)
            mode = config.get_generation_mode().value
            others = [] if mode in MODES else [mode]
        if others:
            raise ValueError(
                f"{self._name} writes one text for each prompt, greedily or by sampling; for "
                f"{others[0]} call the model's own generate"
            )
        prompt = torch.tensor([ids], device=self._model.device)
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            custom_generate=catch,
            **{**given, **ONE_TEXT},
        )
        kinds = {type(each).__name__ for each in made[0].processors}
        fixed = OBJECTS.isdisjoint(given) and kinds <= OF_ANY_PROMPT
        if fixed and not made[0].criteria and len(self._kept) < KEPT:
            self._kept[key] = made[0]
        return made[0]


def layered(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Settings `before`, and `more` that hold in their place, with all that they imply; None: as
    before.
    """
    # arrays and their numbers as lists and Python's own
    more = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in more.items()
        if value is not None
    }
    lengths = {"max_new_tokens", "max_length"}
    old = lengths if lengths & more.keys() else frozenset[str]()
    given = {**{name: value for name, value in before.items() if name not in old}, **more}
    if "do_sample" not in more and SAMPLING & more.keys():
        given["do_sample"] = given.get("temperature") != 0
    return given


def _is_own(criterion: Any) -> bool:
    """Test of a criterion: the caller asked for it."""
    return type(criterion).__name__ not in PLAIN_CRITERIA


def listed(value: Any) -> list[int]:
    """None, one or several as a list."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [value] if isinstance(value, int) else list(value)
