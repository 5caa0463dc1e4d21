"""Small causal language models with random weights, and tokenizers trained on the spot."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 512
POSITIONS = 512
END = 1
"""The terminator that the models know."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,  # so that the best logit is well ahead of the next one
    "eos_token_id": END,
    "bos_token_id": 0,
    "pad_token_id": None,
}
TEXT = "the quick brown fox jumps over the lazy dog, and runs away: many words and 0123456789"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
    more: dict[str, Any] = {"initializer_range": 0.3, "eos_token_id": END, "bos_token_id": END}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **more))


def qwen() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def gemma() -> Any:
    """Layers that see 32 tokens beside one that sees all."""
    more: dict[str, Any] = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 32}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **more}))


MODELS = {"llama": llama, "gpt2": gpt2, "qwen": qwen, "gemma": gemma}


@functools.cache
def model(name: str = "llama") -> Any:
    """A model in evaluation mode, the same in every test."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


@functools.cache
def _trained() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    return made


def tokenizer(*, pad: str | None = None, chat: bool = False) -> Any:
    """A byte-level tokenizer, by default without a pad token and a chat template."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_trained(), bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    made.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    if chat:
        made.chat_template = TEMPLATE
    return made
