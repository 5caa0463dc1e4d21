"""Choice of the way in which the texts of a model are computed together.

1. Texts have places if every layer is attention, full or with a window that `layer_types` names,
   and the configuration names no other window, local, chunked, recurrent or compressed part.
2. Otherwise they begin together in whole batches, unless positions depend on the longest text.
3. In both cases texts of very different lengths, one longer than every window, must have the logits
   in company that each of them has alone.
4. Otherwise there is one text at a time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from .beside import innermost
from .decoding import Batch
from .places import Places, kinds_of

KINDS: Final = {"full_attention", "sliding_attention"}
"""Kinds of layers whose keys and values can have places."""
ATTENTION: Final = {"eager", "sdpa"}
"""Implementations of attention that take a mask for each text."""
PARTS: Final = re.compile(
    "window|local(?!_experts)|chunk|recurrent|mamba|ssm|state_size|conv|block_type|attention_types"
    "|^index_|compress|lru_|hash"
)
"""Settings of parts that see more, or less, of a text than full attention does."""
OF_WINDOWS: Final = re.compile("sliding_window$|sliding_window_pattern|max_window_layers")
"""Settings of windows that `layer_types` describes."""
MOST_WINDOW: Final = 8192
"""Longest window that is tried out (tokens)."""
TOLERANCE: Final = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Difference of logits that still counts as rounding, as a share of the greatest; else 0.05.

Some models compute single parts in float32, whatever their dtype.
"""
BEYOND: Final = (17, 6)
"""Tokens of the long texts of the trial, beyond the longest window."""
SHORT: Final = 3
"""Tokens of its short text."""
TOKENS: Final = 50
"""Different tokens of all texts of the trial."""
STEPS: Final = 6
"""New tokens of the trial."""

Logits = list[list[torch.Tensor]]
"""Logits of each text, token by token."""

logger = logging.getLogger("batched")


def find_engine(model: Any, name: str) -> Any:
    """Return a function that makes engines for `model`: instances of `Places` or `Batch`.

    Args:
        model: causal language model.
        name: name of the generator, for a warning.
    """
    config = model.config.get_text_config()
    written = json.dumps(stated := config.to_dict(), default=str)
    parts = {key: value for key, value in stated.items() if PARTS.search(key) and value}
    positions: int = getattr(config, "max_position_embeddings", None) or MOST_WINDOW * 2
    windows = [each for each in _numbers([*parts.values()]) if each < positions]
    longest = max(windows, default=0)
    tokens = min(TOKENS, model.get_input_embeddings().num_embeddings)
    is_dynamic = '"dynamic"' in written or '"longrope"' in written  # as long as the longest text
    if longest <= MOST_WINDOW and not is_dynamic:
        sizes = [min(longest + more, positions - STEPS) for more in BEYOND] + [SHORT]
        texts = [[(7 * size + place) % tokens for place in range(size)] for size in sizes]
        with torch.no_grad(), suppress(Exception):  # the model fails alone: so will the texts
            alone = [logits for text in texts for logits in _logits(Batch(model), [text], tokens)]
            engines = [Batch(model)]
            if _may_have_places(model, config, parts):
                engines.insert(0, Places(model))
            for engine in engines:
                if _agree(engine, texts, alone, tokens):
                    return partial(type(engine), model)
    logger.warning(
        "%s: %s generates one text at a time, because its texts are not independent of each other "
        "in a batch",
        name,
        type(innermost(model)).__name__,
    )
    return partial(Batch, model, 1)


def _may_have_places(model: Any, config: Any, parts: Mapping[str, Any]) -> bool:
    settings = innermost(model).generation_config
    return (
        KINDS.issuperset(kinds_of(config))
        and all(map(OF_WINDOWS.search, parts))
        and config._attn_implementation in ATTENTION
        and settings.use_cache is not False
        and settings.cache_implementation in (None, "dynamic", "hybrid")
        and settings.cache_config is None
    )


def _numbers(value: Any) -> Iterator[int]:
    """Yield all whole numbers in a setting."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif type(value) is int:
        yield value


def _agree(engine: Any, texts: list[list[int]], alone: Logits, tokens: int) -> bool:
    """Return whether all texts have the logits in company that they have alone."""
    try:
        found = _logits(engine, texts, tokens)
    except Exception:  # the model does not take these arguments, or fails on padding
        return False
    bound = TOLERANCE.get(engine.dtype, 0.05)
    return all(
        bool((mine - own).abs().max() <= bound * own.abs().max())
        for some, others in zip(alone, found, strict=True)
        for own, mine in zip(some, others, strict=False)  # the first text leaves early
    )


def _logits(engine: Any, texts: list[list[int]], tokens: int) -> Logits:
    """Return the logits of each text, token by token. Of several texts, the first leaves early."""
    found: Logits = [[] for _ in texts]
    order = [*range(len(texts))]
    logits = engine.add(texts, STEPS)
    for step in range(STEPS):
        if step:
            logits = engine.step([(texts[index][-1] + step) % tokens for index in order])
        for index, row in zip(order, logits, strict=True):
            found[index].append(row)
        if step == STEPS // 2 and len(texts) > 1:
            order = [order[place] for place in engine.keep([*range(1, len(texts))])]
    return found
