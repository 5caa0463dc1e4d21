"""Texts in company are those of each prompt alone, whatever the model, or what wraps it."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batched.generation import TextGenerator
from language_models import alone, tokenizer

pytestmark = pytest.mark.model

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


def model_of(architecture: str, **more: Any) -> Any:
    """Return a model with random weights, in evaluation mode.

    Raises:
        ValueError: the model has too many weights.
        Exception: whatever the configuration raises for sizes that do not fit together.
    """
    kind = CONFIG_MAPPING[architecture]
    known: Any = kind()
    fields = {
        name: value
        for name, value in _SIZES.items()
        if name.endswith("_token_id")
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
    model = build(config).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    for weight in model.parameters():
        if not weight.isfinite().all():  # some are left as the memory was
            torch.nn.init.normal_(weight, std=0.2)
    return model


ENDS = [7, 8, 9]
LENGTHS = [1, 2, 3, 5, 9, 17, WINDOW - 1, WINDOW, WINDOW + 1, 40, 60, 90]
WAYS = {
    "gpt_neo": "together",  # a mask of its own for local layers
    "falcon_h1": "together",  # attention and states in one layer
    "mamba": "together",  # states alone
    "gemma3_text": "together",  # windows in places
    "recurrent_gemma": "one by one",  # wrong beyond its window
    "doge": "one by one",  # wrong beyond its window, if longer texts are near
    "bart": "one by one",  # positions that count the padding
}


def check(model: Any, name: str, count: int) -> None:
    """Compare texts that join and leave at random with the same texts alone."""
    draw = random.Random(name)
    lengths = [90, *(draw.choice(LENGTHS) for _ in range(count - 1))]  # some beyond any window
    asked = [
        ([draw.randrange(10, VOCABULARY) for _ in range(length)], draw.randint(1, 30))
        for length in lengths
    ]
    try:
        expected = [alone(model, *each, eos_token_id=ENDS) for each in asked]
    except RuntimeError as error:
        pytest.skip(f"its own generate fails: {error}")
    generator = TextGenerator(model, tokenizer(), details=True, batch_size=6, eos_token_id=ENDS)
    with generator:
        futures: list[Any] = []
        for ids, limit in asked:
            futures.append(generator.submit(ids, max_new_tokens=limit))
            if draw.random() < 0.3:  # the next ones join later
                futures[draw.randrange(len(futures))].result(300)
        found = [future.result(300).tokens for future in futures]
        steps = generator.stats.rows_per_step
    assert found == expected
    way = "one by one" if steps == 1 else "together"
    assert WAYS.get(name, way) == way


@pytest.mark.parametrize("name", ["gpt_neo", "falcon_h1", "bart"])
def test_texts_in_company_are_those_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check(model_of(name), name, 8)
    warnings = [each for each in caplog.messages if "one text at a time" in each]
    assert len(warnings) == (WAYS[name] == "one by one")


def test_positions_that_depend_on_the_longest_text_lead_to_one_text_at_a_time() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=64)
    with TextGenerator(model, tokenizer(), details=True, eos_token_id=ENDS) as generator:
        short, long = [5, 6, 7], [*range(10, 50)]
        futures: list[Any] = [generator.submit(ids, max_new_tokens=8) for ids in (long, short)]
        expected = [alone(model, ids, 8, eos_token_id=ENDS) for ids in (long, short)]
        assert [future.result().tokens for future in futures] == expected
        assert generator.stats.rows_per_step == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_that_a_configuration_builds(name: str) -> None:
    try:
        model = model_of(name)
        alone(model, [10, 11, 12], 4, eos_token_id=ENDS)
    except Exception as error:
        pytest.skip(f"its tiny configuration fails alone: {error!r:.150}")
    check(model, name, 14)


class Adapter(torch.nn.Module):
    """An adapter, which hands its generation config to the model within, as those of peft do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)

    def generate(self, **inputs: Any) -> Any:
        self.base_model.generation_config = self.generation_config
        return self.base_model.generate(**inputs)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), Adapter])
def test_a_wrapped_model_gives_the_texts_of_its_own_generate_and_is_not_changed(wrap: Any) -> None:
    model, prompts = model_of("llama").float(), [[5, 6, 7], [*range(10, 60)], [8]]
    model.generation_config.eos_token_id = [1, *range(140, 160)]
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.stop_strings = ["never"]
    wrapped = wrap(model)
    before = wrapped.generation_config.to_dict()
    with torch.compiler.set_stance("force_eager"):  # the code is not compiled here
        expected = [alone(wrapped, ids, 20) for ids in prompts]
        with TextGenerator(wrapped, tokenizer(), details=True, max_new_tokens=20) as generator:
            futures: list[Any] = [generator.submit(ids) for ids in prompts]
            assert [future.result().tokens for future in futures] == expected
            with generator.with_options(batch_size=4) as other:
                assert other(prompts[0]).tokens == expected[0]
        assert wrapped.generation_config.to_dict() == before
        assert [alone(wrapped, ids, 20) for ids in prompts] == expected
