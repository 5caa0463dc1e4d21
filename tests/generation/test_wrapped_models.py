"""Models that wrap the user's model: compiled ones, and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from architectures import model_of
from batched.generation import TextGenerator
from language_models import alone, tokenizer

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Position ids"),
]

PROMPTS = [[5, 6, 7], [*range(10, 60)], [8]]


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


def of_peft(kind: str, **settings: Any) -> Any:
    def wrap(model: Any) -> Any:
        peft = pytest.importorskip("peft")
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **settings)
        return peft.get_peft_model(model, config).eval()

    return wrap


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """A compiled model wraps the user's, but its code is not compiled here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda model: torch.compile(model, backend="eager"), id="compiled"),
        pytest.param(Adapter, id="adapter"),
        pytest.param(of_peft("LoraConfig", init_lora_weights=False), id="LoRA"),
        pytest.param(of_peft("PromptTuningConfig", num_virtual_tokens=4), id="prompt tuning"),
    ],
)
def test_a_wrapped_model_gives_the_texts_of_its_own_generate_and_is_not_changed(wrap: Any) -> None:
    model = model_of("llama", torch.float32)
    model.generation_config.eos_token_id = [1, *range(140, 160)]
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.stop_strings = ["never"]
    wrapped = wrap(model)
    before = wrapped.generation_config.to_dict()

    expected = [alone(wrapped, ids, 20) for ids in PROMPTS]
    with TextGenerator(wrapped, tokenizer(), details=True, max_new_tokens=20) as generator:
        futures: list[Any] = [generator.submit(ids) for ids in PROMPTS]
        assert [future.result().tokens for future in futures] == expected
        with generator.with_options(batch_size=4) as other:
            assert other(PROMPTS[0]).tokens == expected[0]
    assert wrapped.generation_config.to_dict() == before
    assert [alone(wrapped, ids, 20) for ids in PROMPTS] == expected
