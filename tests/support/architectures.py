"""Tiny models of all architectures of transformers that a configuration alone can build."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 160
POSITIONS = 256
WINDOW = 24
"""Every window, in tokens."""
MOST_WEIGHTS = 6_000_000
"""Weights of the largest model that is tried out."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": None,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "init_std": 0.2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), POSITIONS),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("window_size", "keep_window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "index_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("encoder_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("encoder_ffn_dim",), 48),
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    "index_topk": 8,
}
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
}
"""Further settings of single architectures."""
_NOT_OF = {"falcon": ["head_dim"]}
"""Settings that an architecture computes itself."""


def architectures() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_of(architecture: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """Return a model with random weights, in evaluation mode.

    Raises:
        ValueError: the model has too many weights.
        Exception: whatever the configuration raises for sizes that do not fit together.
    """
    kind = CONFIG_MAPPING[architecture]
    taken = inspect.signature(kind).parameters
    known: Any = kind()
    fields = {name: _SIZES[name] for name in _SIZES if name in taken or hasattr(known, name)}
    fields = {
        name: value
        for name, value in fields.items()
        if name in ("pad_token_id", "bos_token_id", "eos_token_id")
        or (getattr(known, name, None) is not None and name not in _NOT_OF.get(architecture, ()))
    }
    config: Any = kind(**{**fields, **_MORE.get(architecture, {}), **more})
    named: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture]
    build = getattr(transformers, named if isinstance(named, str) else named[0])
    with torch.device("meta"):
        weights = sum(each.numel() for each in build(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{architecture} has {weights} weights")
    torch.manual_seed(0)
    model = build(config).to(dtype).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    for weight in model.parameters():
        if not weight.isfinite().all():  # some are left as the memory was
            torch.nn.init.normal_(weight, std=0.2)
    return model
