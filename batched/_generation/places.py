"""KV cache of places: each text keeps its own keys and values while other texts join and leave.

A place is a row of the buffers of all layers. The texts stand at the left of their places, without
padding, and a mask hides the rest of the place. A step writes the key and the value
of one token for each text in place, and reads the buffers up to the longest text. The texts fill
the first places: if a text leaves, the text at the last place moves into its place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

BLOCK: Final = 64
"""The buffers have room for a multiple of this number of tokens in each place."""
GROWTH: Final = 1.25
"""Room that buffers get when they grow, as a multiple of the room that is needed."""
WASTE: Final = 2
"""Room of grown buffers, as a multiple of the room that is needed, beyond which they shrink."""
KINDS: Final = {"full_attention", "sliding_attention"}
"""Kinds of layers whose keys and values can have places."""
ATTENTION: Final = {"eager", "sdpa"}
"""Implementations of attention that take a mask for each text."""
TOLERANCE: Final = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Difference of logits that still counts as rounding, as a share of the greatest; else 0.05."""


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer for all places."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = key_states[:0], value_states[:0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token for each text. Return all keys and values up to the longest text."""
        count, longest = len(self._places.sizes), max(self._places.sizes)
        self.reserve(key_states, value_states)
        rows, ends = [each.to(key_states.device) for each in self._places.ends]
        read = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None
            buffer[rows, :, ends] = states[:, :, 0]
            read.append(buffer[:count, :, :longest])
        return read[0], read[1]

    def reserve(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Let the buffers, for states of this shape, have room for all texts."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places, tokens = self._places.room
        assert self.keys is not None
        assert self.values is not None
        if self.keys.shape[0::2] != (places, tokens):
            self.keys = _resized(self.keys, key_states, places, tokens)
            self.values = _resized(self.values, value_states, places, tokens)

    def write(self, first: int, new: Any) -> None:
        """Copy the layer `new` of another cache to the places from `first` on."""
        self.reserve(new.keys, new.values)
        for buffer, states in ((self.keys, new.keys), (self.values, new.values)):
            assert buffer is not None
            buffer[first : first + len(states), :, : states.shape[2]] = states

    def move(self, source: int, target: int, size: int) -> None:
        """Move the first `size` tokens of a place to another place, and clear the rest of both.

        A mask hides no NaN: its product with 0 is NaN.
        """
        for buffer in (self.keys, self.values):
            if buffer is not None:
                if source != target:
                    buffer[target, :, :size] = buffer[source, :, :size]
                    buffer[target, :, size:] = 0
                buffer[source] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length  # 1, and counted in the sizes
        return max(self._places.sizes), 0

    def get_seq_length(self) -> int:
        return max(self._places.sizes, default=1) - 1

    def get_max_length(self) -> int:
        return -1


def _resized(buffer: torch.Tensor, states: torch.Tensor, places: int, tokens: int) -> torch.Tensor:
    """Return a buffer of another size with the contents of `buffer`, as far as they fit."""
    resized = states.new_zeros((places, states.shape[1], tokens, states.shape[3]))
    old = buffer[:places, :, :tokens]
    resized[: old.shape[0], :, : old.shape[2]] = old
    return resized


class Places(Cache):  # type: ignore[misc]  # transformers has no types
    """Cache of the keys and values of several texts, each of its own length."""

    def __init__(self, model: Any) -> None:
        self.sizes: list[int] = []
        """Tokens of each text, the token of the present step included."""
        self.room = 0, 0
        """Places, and tokens of a place, for which the buffers have room."""
        self.device = model.device
        config = model.config.get_text_config()
        self._own = [_Layer(self) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=[*self._own])
        self._kinds = [*dict.fromkeys(_kinds(config))]
        self._window: int = getattr(config, "sliding_window", None) or 0
        self._adds = config._attn_implementation == "eager"
        self._dtype = model.dtype
        self._name = cache_name(model)
        self._model = model

    def add(self, prompts: Sequence[Sequence[int]]) -> None:
        """Add texts, and compute the keys and values of their prompts except for the last token."""
        before = len(self.sizes)
        self.sizes += [len(ids) for ids in prompts]
        self._make_room()
        width = max([len(ids) for ids in prompts]) - 1
        if not width:
            return
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        for place, prompt in enumerate(prompts):
            ids[place, : len(prompt) - 1] = torch.tensor(prompt[:-1])
        positions = torch.arange(width, device=self.device)
        fresh = DynamicCache()
        self._model(
            input_ids=ids.to(self.device),
            attention_mask=self._masks(positions, positions[None, :, None]),
            position_ids=positions[None].expand(len(prompts), -1),
            use_cache=True,
            logits_to_keep=1,
            **{self._name: fresh},
        )
        for layer, new in zip(self._own, fresh.layers, strict=True):
            layer.write(before, new)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute one token of each text, its last one. Return the logits of the next token.

        Returns:
            (n, vocabulary) logits, as float32.
        """
        self._make_room()
        sizes = torch.tensor(self.sizes, device=self.device)
        self.ends = torch.arange(len(self.sizes), device=self.device), sizes - 1
        keys = torch.arange(max(self.sizes), device=self.device)
        output = self._model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=self._masks(keys, sizes[:, None, None] - 1),
            position_ids=sizes[:, None] - 1,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
            **{self._name: self},
        )
        logits: torch.Tensor = output.logits[:, -1].to(torch.float32, copy=True)
        return logits

    def remove(self, place: int) -> None:
        """Remove the text at `place`. The text at the last place moves there."""
        last = len(self.sizes) - 1
        for layer in self._own:
            layer.move(last, place, self.sizes[last])
        self.sizes[place] = self.sizes[last]
        self.sizes.pop()

    def forget(self, first: int) -> None:
        """Forget the texts from the place `first` on, of which not all may have been computed."""
        for place in reversed(range(first, len(self.sizes))):
            self.remove(place)

    def _make_room(self) -> None:
        places, tokens = self.room
        count, longest = len(self.sizes), max(self.sizes)
        if count > places:
            places = _more(count, 1)
        if longest > tokens:
            tokens = _more(longest, BLOCK)
        if (places, tokens) != self.room and places * tokens > WASTE * count * longest:
            places, tokens = _more(count, 1), _more(longest, BLOCK)
        self.room = places, tokens

    def _masks(self, keys: torch.Tensor, queries: torch.Tensor) -> Any:
        """Return the mask for each kind of layer.

        Args:
            keys: (k,) positions of the keys.
            queries: (n, q, 1) positions of the queries.
        """
        masks = {}
        for kind in self._kinds:
            seen = keys <= queries
            if kind == "sliding_attention":
                seen &= keys > queries - self._window
            masks[kind] = seen[:, None]
            if self._adds:
                hidden = torch.zeros_like(masks[kind], dtype=self._dtype)
                masks[kind] = hidden.masked_fill(~masks[kind], torch.finfo(self._dtype).min)
        return masks if len(masks) > 1 else masks[self._kinds[0]]


def _more(needed: int, step: int) -> int:
    """Return room for more than is needed, as a multiple of `step`."""
    return math.ceil(GROWTH * needed / step) * step


def _kinds(config: Any) -> list[str]:
    """Return the kind of each layer, as configurations of transformers name them."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return [*kinds]
    if getattr(config, "sliding_window", None) is None:
        return ["full_attention"]
    return ["sliding_attention" if config.model_type == "mistral" else "unknown"]


def cache_name(model: Any) -> str:
    """Return the name of the cache among the arguments of the model."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def has_places(model: Any) -> bool:
    """Return whether the texts of `model` can have places.

    All layers must be attention that takes a mask, and positions must be given for each token. Two
    short texts are computed, with and without places, to see whether the model does as it is told.
    """
    config, settings = model.config.get_text_config(), model.generation_config
    if (
        not {*_kinds(config)} <= KINDS
        or config._attn_implementation not in ATTENTION
        or settings.use_cache is False
        or settings.cache_implementation not in (None, "dynamic", "hybrid")
        or settings.cache_config is not None
    ):
        return False
    vocabulary = model.get_input_embeddings().num_embeddings
    texts = [[token % vocabulary for token in range(first, first + 4 + first)] for first in (1, 3)]
    try:
        with torch.no_grad():
            places = Places(model)
            places.add([texts[0][:-2], texts[1][:-1]])
            places.step([texts[0][-3], texts[1][-2]])
            places.sizes = [size + 1 for size in places.sizes]
            found = places.step([texts[0][-2], texts[1][-1]])
            alone = [
                model(input_ids=torch.tensor([ids], device=model.device)).logits[0, -1].float()
                for ids in (texts[0][:-1], texts[1])
            ]
    except Exception:  # the model does not take these arguments
        return False
    expected = torch.stack(alone)
    difference = (found - expected).abs().max() / expected.abs().max()
    return bool(difference <= TOLERANCE.get(model.dtype, 0.05))
