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
from torch.nn.functional import pad
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from .beside import innermost

BLOCK: Final = 64
"""The buffers have room for a multiple of this number of tokens in each place."""
GROWTH: Final = 1.25
"""Room that buffers get when they grow, as a multiple of the room that is needed."""
MOST_PREFILL: Final = 512
"""Most tokens of prompts in one pass on a CPU, unless one prompt has more."""
MOST_PREFILL_ELSEWHERE: Final = 4096


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer for all places."""

    keys: Any
    values: Any

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
        rows, ends = self._places.ends
        read = []
        for buffer, states in self.reserve(key_states, value_states):
            buffer[rows, :, ends] = states[:, :, 0]
            read.append(buffer[:count, :, :longest])
        return read[0], read[1]

    def reserve(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return buffers with room for all texts, each with its states."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        places, tokens = self._places.room
        more = 0, 0, 0, tokens - self.keys.shape[2], 0, 0, 0, places - self.keys.shape[0]
        if any(more):
            self.keys, self.values = pad(self.keys, more), pad(self.values, more)
        return [(self.keys, keys), (self.values, values)]

    def write(self, new: Any, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Copy the tokens of the layer `new`, which has one row, to these rows and positions."""
        for buffer, states in self.reserve(new.keys, new.values):
            buffer[rows, :, positions] = states[0].transpose(0, 1)

    def move(self, sources: Sequence[int], targets: Sequence[int], ends: slice) -> None:
        """Move texts to other places, and clear the places at the end.

        A mask hides no NaN: its product with 0 is NaN.
        """
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[targets] = buffer[sources]
                buffer[ends] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length  # 1, and counted in the sizes
        return max(self._places.sizes), 0

    def get_seq_length(self) -> int:
        return max(self._places.sizes, default=1) - 1

    def get_max_length(self) -> int:
        return -1


class Places(Cache):  # type: ignore[misc]  # transformers has no types
    """Cache of the keys and values of several texts, each of its own length."""

    def __init__(self, model: Any) -> None:
        self.sizes: list[int] = []
        """Tokens of each text that are computed, the tokens of the present pass included."""
        self.room = 0, 0
        """Places, and tokens of a place, for which the buffers have room."""
        self.device = model.device
        is_cpu = self.device.type == "cpu"
        self.most_prefill = MOST_PREFILL if is_cpu else MOST_PREFILL_ELSEWHERE
        config = model.config.get_text_config()
        self._own = [_Layer(self) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=[*self._own])
        self._kinds = [*dict.fromkeys(kinds_of(config))]
        self._window: int = getattr(config, "sliding_window", None) or 0
        self._adds = config._attn_implementation == "eager"
        self.dtype = model.dtype
        names = inspect.signature(innermost(model).forward).parameters
        self._name = "cache" if "cache" in names else "past_key_values"
        self._model = model

    def add(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Add texts, and compute their prompts in one row, without padding.

        Returns:
            (n, vocabulary) logits of the next token, as float32.
        """
        before, sizes = len(self.sizes), torch.tensor([len(ids) for ids in prompts])
        self.sizes += sizes.tolist()
        self._make_room()
        lasts = sizes.cumsum(0) - 1
        rows = torch.arange(len(prompts)).repeat_interleave(sizes)
        positions = torch.arange(len(rows)) - (lasts - sizes + 1)[rows]
        rows, positions, lasts = (each.to(self.device) for each in (rows, positions, lasts))
        fresh, mask = DynamicCache(), None  # the model's own mask, which may cost no memory
        if len(prompts) > 1:
            mask = self._masks(positions, positions[None, :, None], rows == rows[:, None])
        logits = self._logits(
            torch.tensor([[token for ids in prompts for token in ids]]),
            mask,
            positions[None],
            lasts,
            fresh,
        )
        for layer, new in zip(self._own, fresh.layers, strict=True):
            layer.write(new, before + rows, positions)
        return logits[0]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute one further token of each text. Return the logits of the next one, as `add`."""
        self.sizes = [size + 1 for size in self.sizes]
        self._make_room()
        ends = torch.tensor(self.sizes, device=self.device) - 1
        self.ends = torch.arange(len(self.sizes), device=self.device), ends
        keys = torch.arange(max(self.sizes), device=self.device)
        mask = self._masks(keys, ends[:, None, None])
        return self._logits(torch.tensor(tokens)[:, None], mask, ends[:, None], 1, self)[:, -1]

    def _logits(
        self, ids: torch.Tensor, mask: Any, positions: torch.Tensor, keep: Any, cache: Cache
    ) -> torch.Tensor:
        output = self._model(
            input_ids=ids.to(self.device),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            return_dict=True,
            **{self._name: cache},
        )
        logits: torch.Tensor = output.logits.to(torch.float32, copy=True)
        return logits

    def keep(self, live: Sequence[int]) -> list[int]:
        """Remove the texts that are not live. Return the former places of the texts that stay."""
        count = len(live)
        gaps = sorted({*range(count)}.difference(live))
        movers = [place for place in live if place >= count]
        for layer in self._own:
            layer.move(movers, gaps, slice(count, len(self.sizes)))
        order = [*range(count)]
        for gap, mover in zip(gaps, movers, strict=True):
            order[gap] = mover
        self.sizes = [self.sizes[place] for place in order]
        return order

    def _make_room(self) -> None:
        """Let the buffers have room for all texts. They grow, and shrink, if one side is short."""
        count, longest = len(self.sizes), max(self.sizes)
        if count > self.room[0] or longest > self.room[1]:
            self.room = _more(count, 1), _more(longest, BLOCK)

    def _masks(
        self, keys: torch.Tensor, queries: torch.Tensor, own: torch.Tensor | None = None
    ) -> Any:
        """Return the mask for each kind of layer.

        Args:
            keys: (k,) positions of the keys.
            queries: (n, q, 1) positions of the queries.
            own: (q, k) whether the key and the query are of the same text.
        """
        masks = {}
        for kind in self._kinds:
            seen = keys <= queries
            if own is not None:
                seen &= own
            if kind == "sliding_attention":
                seen &= keys > queries - self._window
            masks[kind] = seen[:, None]
            if self._adds:
                hidden = torch.zeros_like(masks[kind], dtype=self.dtype)
                masks[kind] = hidden.masked_fill(~masks[kind], torch.finfo(self.dtype).min)
        return masks if len(masks) > 1 else masks[self._kinds[0]]


def _more(needed: int, step: int) -> int:
    """Return room for more than is needed, as a multiple of `step`."""
    return math.ceil(GROWTH * needed / step) * step


def kinds_of(config: Any) -> list[str]:
    """Return the kind of each layer, as configurations of transformers name them."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return [*kinds]
    has_window = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if has_window else "full_attention"]
