"""Small causal language models with random weights, and tokenizers trained on one sentence."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
)

from batched._generation.places import Places
from batched.generation import TextGenerator

VOCABULARY = 512
POSITIONS = 512
END = 1
"""Terminator of the models."""
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


def gemma() -> Any:
    """Return a model with layers that see 32 tokens, and one layer that sees all tokens."""
    more: dict[str, Any] = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 32}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **more}))


MODELS = {"llama": llama, "gpt2": gpt2, "gemma": gemma}
_made: dict[str, Any] = {}


def model(name: str = "llama") -> Any:
    if name not in _made:
        torch.manual_seed(0)
        _made[name] = MODELS[name]().eval()
    return _made[name]


def alone(model: Any, ids: list[int], limit: int, **settings: Any) -> list[int]:
    """Return the new tokens of one prompt, as transformers itself generates them."""
    made = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        pad_token_id=0,
        **{"max_new_tokens": limit, "tokenizer": tokenizer(), **settings},
    )
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens


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
    """Return a byte-level tokenizer, by default without a pad token and a chat template."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_trained(), bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    made.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    if chat:
        made.chat_template = TEMPLATE
    return made


@contextmanager
def batches_of(look: Callable[[int, int], object] = lambda *_: None) -> Iterator[list[int]]:
    """Yield the numbers of texts that the model sees at once, one number for each token.

    `look` is called before each of these passes, with the number of the pass and of its texts.
    Passes over prompts, of which the first tokens come, do not count.
    """
    sizes: list[int] = []

    def note(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        count = len(inputs["input_ids"])
        is_step = any(isinstance(each, Places) for each in inputs.values())
        if is_step and threading.current_thread() is not threading.main_thread():
            sizes.append(count)
            look(len(sizes), count)

    handle = model().register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield sizes
    finally:
        handle.remove()


def full_batches(count: int, **settings: Any) -> TextGenerator[Any]:
    """Return a generator that begins once `count` prompts have arrived."""
    generator: TextGenerator[Any] = TextGenerator(
        model(), tokenizer(), batch_size=count, **settings
    )
    execution = generator._batcher.parts.execution
    writer: Any = execution.func
    assert writer.__self__._engine is not None  # found out here, in the main thread
    write, begun = execution.func, threading.Event()

    def patient(rows: Any) -> None:
        deadline = time.monotonic() + 60
        while not begun.is_set() and sum(generator._batcher.runtime.load()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        begun.set()
        write(rows)

    object.__setattr__(execution, "func", patient)
    return generator
