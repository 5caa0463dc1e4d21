"""Choice of the way in which the texts of a model are computed together.

1. Texts have places if every layer is attention, full or with a window. The configuration must
   name no other window, and no local, chunked, recurrent or compressed part.
2. Otherwise they begin together in whole batches, unless positions depend on the longest text.
3. In both cases texts of very different lengths, one longer than every window, must have the logits
   in company that each of them has alone.
4. Otherwise there is one text at a time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from .batches import Batch
from .beside import innermost
from .places import Places, kinds_of

KINDS: Final = {"full_attention", "sliding_attention"}
"""Kinds of layers with keys and values that can have places."""
ATTENTION: Final = {"eager", "sdpa"}
"""Implementations of attention that take a mask for each text."""
PARTS: Final = re.compile(
    "window|local(?!_experts)|chunk|recurrent|mamba|ssm|state_size|conv|block_type|attention_types"
    "|^index_|compress|lru_|hash"
)
"""Settings of parts that see more, or less, of a text than full attention does."""
ALONE: Final = re.compile(r'"dynamic"|"longrope"|"lru_width"|"index_topk": \d')
"""Settings of models that are wrong in batches, though not at once: positions that depend on the
longest text, RecurrentGemma, and attention to tokens that an index chooses (HY v4).
"""
OF_WINDOWS: Final = re.compile("sliding_window$|sliding_window_pattern|max_window_layers")
"""Settings of windows that layers with places may have."""
MOST_WINDOW: Final = 8192
"""Longest window that is tried out (tokens)."""
TOLERANCE: Final = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Difference of logits that still counts as rounding, as a share of the greatest; else 0.05.

Models of any dtype may compute single parts in float32.
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
    numbers = map(int, re.findall(r"\b\d+\b", json.dumps([*parts.values()], default=str)))
    why = "its texts are not independent of each other in a batch"
    longest = max([each for each in numbers if each < positions], default=0)
    tokens = min(TOKENS, model.get_input_embeddings().num_embeddings)
    if longest <= MOST_WINDOW and not ALONE.search(written):
        sizes = [min(longest + more, positions - STEPS) for more in BEYOND] + [SHORT]
        texts = [[(7 * size + place) % tokens for place in range(size)] for size in sizes]
        with torch.no_grad(), suppress(Exception):  # the model fails alone: so will the texts
            alone = [_in_batch(Batch(model), [text], tokens)[0] for text in texts]
            ways: list[Any] = [(Batch, _in_batch)]
            if _may_have_places(model, config, parts):
                ways.insert(0, (Places, _in_places))
            for kind, trial in ways:
                try:
                    if _agree(alone, trial(kind(model), texts, tokens), model.dtype):
                        return partial(kind, model)
                except Exception as error:  # it does not take these arguments, or padding
                    why = f"a trial with several texts failed: {error!r:.200}"
    kind = type(innermost(model)).__name__
    logger.warning("%s: %s generates one text at a time, because %s", name, kind, why)
    return partial(Batch, model, 1)


def _may_have_places(model: Any, config: Any, parts: Mapping[str, Any]) -> bool:
    settings = innermost(model).generation_config
    return (
        KINDS.issuperset(kinds_of(config))
        and all(map(OF_WINDOWS.search, parts))
        and config._attn_implementation in ATTENTION
        and settings.cache_implementation in (None, "dynamic", "hybrid")
    )


def _agree(alone: Logits, found: Logits, dtype: torch.dtype) -> bool:
    """Return whether all texts have the logits in company that they have alone."""
    bound = TOLERANCE.get(dtype, 0.05)
    return all(
        bool((mine - own).abs().max() <= bound * own.abs().max())
        for some, other in zip(alone, found, strict=True)
        for own, mine in zip(some, other, strict=False)  # the first text leaves early
    )


def _in_batch(batch: Batch, texts: list[list[int]], tokens: int) -> Logits:
    """Return the logits of each text, token by token."""
    found: Logits = [[] for _ in texts]

    def follow(logits: torch.Tensor) -> list[int]:
        for own, row in zip(found, logits, strict=True):
            own.append(row)
        return [(text[-1] + len(found[0])) % tokens for text in texts]

    batch.write(texts, STEPS, follow)
    return found


def _in_places(places: Places, texts: list[list[int]], tokens: int) -> Logits:
    """Return the logits of each text, token by token. The first text leaves early."""
    found: Logits = [[] for _ in texts]
    order = [*range(len(texts))]
    logits = places.add(texts)
    for step in range(STEPS):
        if step:
            logits = places.step([(texts[index][-1] + step) % tokens for index in order])
        for index, row in zip(order, logits, strict=True):
            found[index].append(row)
        if step == STEPS // 2:
            order = [order[place] for place in places.keep([*range(1, len(texts))])]
    return found
