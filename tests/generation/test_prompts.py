"""Prompts, settings, and refusals."""

from __future__ import annotations

import asyncio
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from tokenizers.normalizers import Strip

from batched.generation import Generation, TextGenerator
from language_models import POSITIONS, VOCABULARY, full_batches, gpt2, model, tokenizer

pytestmark = pytest.mark.model

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the dog?"}]


@pytest.fixture(scope="module")
def generator() -> Any:
    with TextGenerator(model(), tokenizer(chat=True), max_new_tokens=6) as made:
        yield made


def test_a_text_a_chat_and_their_ids_are_the_same_prompt(generator: TextGenerator[str]) -> None:
    text = "<s>system: be brief<|end|><s>user: the dog?<|end|><s>assistant: "
    ids = tokenizer()(text)["input_ids"]
    assert generator(CHAT) == generator(text) == generator(ids) == generator(list(numpy.array(ids)))
    begun = [*CHAT, {"role": "assistant", "content": "It"}]
    assert generator(begun) == generator(text + "It")


def test_a_list_of_prompts_is_a_list_of_texts(generator: TextGenerator[str]) -> None:
    prompts: list[Any] = ["the dog", CHAT, [5, 6, 7]]
    alone = [generator(prompt) for prompt in prompts]
    assert generator(prompts) == alone
    assert list(generator.map(prompts)) == alone
    assert [generator.submit(prompt).result() for prompt in prompts] == alone
    assert asyncio.run(generator.acall(prompts)) == alone
    assert generator([]) == []


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("", {}, ValueError, "got an empty prompt"),
    (b"text", {}, TypeError, "takes a text, a list of messages or a list of ids, got bytes"),
    ([{"role": "user"}], {}, ValueError, "message 0 has no content"),
    ([5, VOCABULARY], {}, ValueError, f"from 0 to {VOCABULARY - 1}, got {VOCABULARY}"),
    ([5, "x"], {}, ValueError, "got 'x'"),
    ("x", {"cache_implementation": "static"}, TypeError, "has no setting 'cache_impl"),
    ([5] * POSITIONS, {}, ValueError, f"has {POSITIONS} tokens; the model has {POSITIONS} pos"),
    ("x", {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
    ("x", {"max_new_token": 5}, TypeError, "no setting 'max_new_token'; did you mean 'max_new"),
    ("x", {"num_beams": 3}, ValueError, "for num_beams call the model's"),
    ("x", {"seed": "a"}, TypeError, "seed must be an integer of at least 0, got 'a'"),
    ("x", {"temperature": -1.0}, ValueError, "temperature"),
    ("x", {"stop_strings": ["a", ""]}, TypeError, "stop_strings"),
]


def test_a_wrong_prompt_or_setting_fails_its_caller_alone(generator: TextGenerator[str]) -> None:
    other = generator.submit("the dog", max_new_tokens=40, min_new_tokens=40)
    for prompt, settings, error, message in REFUSED:
        with pytest.raises(error) as refused:
            generator(prompt, **settings)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
    assert other.result() == generator("the dog", max_new_tokens=40, min_new_tokens=40)


def test_a_chat_needs_a_template_and_settings_are_passed_by_name() -> None:
    generator = TextGenerator(model(), tokenizer())
    with generator, pytest.raises(ValueError, match="has no chat template; pass a text"):
        generator(CHAT)
    with pytest.raises(TypeError, match="takes one prompt, or one list, by position"):
        generator("the dog", 5)


def test_other_models_and_wrong_settings_are_refused_by_the_constructor() -> None:
    translator = SimpleNamespace(generate=print, config=SimpleNamespace(is_encoder_decoder=True))
    for wrong in (translator, model().model):  # the second one has no head
        with pytest.raises(TypeError, match="needs a causal language model of transformers"):
            TextGenerator(wrong, tokenizer())
    make: Any = TextGenerator
    with pytest.raises(TypeError, match="from_pretrained loads by name, got str and NoneType"):
        make("a/name")
    for name, meant in (("tempreature", "temperature"), ("max_length", "max_new_tokens")):
        with pytest.raises(TypeError, match=f"has no setting '{name}'; did you mean '{meant}'"):
            make(model(), tokenizer(), **{name: 1})


def test_a_text_ends_at_the_last_position() -> None:
    with TextGenerator(model(), tokenizer(), details=True, min_new_tokens=9) as generator:
        found = generator([7] * (POSITIONS - 3), max_new_tokens=9)
    assert (len(found.tokens), found.finish_reason) == (3, "length")


def test_the_settings_of_the_model_hold_unless_they_are_given() -> None:
    own = gpt2().eval()
    own.generation_config.update(
        do_sample=True, temperature=2.0, repetition_penalty=1.1, stop_strings="e", max_new_tokens=27
    )
    before = own.generation_config.to_dict()
    with TextGenerator(own, tokenizer(), details=True) as generator:
        texts = {generator([5, 6, 7], seed=seed).text for seed in range(5)}
        assert len(texts) > 1
        assert all("e" not in text for text in texts)
        lengths = [generator([5, 6, 7], seed=seed, stop_strings=[]) for seed in range(2)]
        assert {len(each.tokens) for each in lengths if each.finish_reason == "length"} <= {27}
        greedy = [generator([5, 6, 7], temperature=0).tokens for _ in range(2)]
        assert greedy[0] == greedy[1]
    assert own.generation_config.to_dict() == before


def test_the_tokenizer_is_not_changed_and_its_padding_and_truncation_do_not_matter() -> None:
    own = tokenizer(pad="<|end|>")
    own.padding_side = "right"
    own.backend_tokenizer.enable_truncation(2)
    before = copy.deepcopy(own).backend_tokenizer.to_str()
    with TextGenerator(model(), own, max_new_tokens=4) as generator:
        text = generator("the quick brown fox jumps")
    assert own.backend_tokenizer.to_str() == before
    with TextGenerator(model(), tokenizer(), max_new_tokens=4) as generator:
        assert generator("the quick brown fox jumps") == text


def test_a_text_without_tokens_or_with_tokens_beyond_the_model_is_refused() -> None:
    own = tokenizer()
    own.backend_tokenizer.normalizer = Strip()
    own.add_tokens([f"more{number}" for number in range(VOCABULARY)])
    with TextGenerator(model(), own) as generator:
        with pytest.raises(ValueError, match="an empty prompt; it needs at least one token"):
            generator("  ")
        with pytest.raises(ValueError, match=f"from 0 to {VOCABULARY - 1}, got"):
            generator(f"more{VOCABULARY - 1}")


def test_settings_in_other_forms_are_the_same(generator: TextGenerator[str]) -> None:
    same: list[dict[str, Any]] = [
        {"temperature": None, "top_p": None, "max_new_tokens": None, "eos_token_id": None},
        {"temperature": 0, "do_sample": True},
        {"max_new_tokens": numpy.int64(6), "seed": numpy.int64(3)},
    ]
    texts = {generator("the dog", **settings) for settings in same for _ in range(2)}
    assert texts == {generator("the dog")}


def test_a_processor_is_not_called_after_the_end_of_its_row() -> None:
    seen: list[int] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        return scores

    with full_batches(2, cache_implementation="static") as generator:
        long = generator.submit([5, 6], max_new_tokens=6, min_new_tokens=6)
        generator.submit([7, 8], max_new_tokens=2, logits_processor=[look]).result()
        long.result()
    assert seen == [2, 3]


def test_each_prompt_has_its_own_processors_and_criteria_and_their_errors() -> None:
    seen: list[int] = []

    def fourth(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape[0] == 1
        seen.append(int(ids[0, 0]))
        return torch.tensor([ids.shape[1] >= 7])

    def always(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids[0, 0] == 9
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([42]), 0)

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    failing: list[dict[str, Any]] = [
        {"stopping_criteria": [broken]},
        {"logits_processor": [broken]},
        {"logits_processor": [lambda ids, scores: None]},
        {"logits_processor": [lambda ids, scores: scores[:, :3]]},
    ]
    with full_batches(7, details=True, max_new_tokens=9) as generator:
        long: Any = generator.submit([3] * 30)
        ended: Any = generator.submit([8, 8, 8], stopping_criteria=[fourth])
        forced: Any = generator.submit([9, 9], logits_processor=[always])
        futures = [generator.submit("the fox", **settings) for settings in failing]
        errors = [future.exception() for future in futures]
        assert [repr(error) for error in errors[:2]] == ["KeyError('mine')"] * 2
        assert all(isinstance(error, TypeError | RuntimeError) for error in errors[2:])
        assert len(long.result().tokens) == 9
        assert (len(ended.result().tokens), ended.result().finish_reason) == (4, "stop")
        assert forced.result().tokens == [42] * 9
    assert set(seen) == {8}


def test_logits_without_probabilities_fail_a_sampled_text_alone() -> None:
    def nowhere(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * torch.nan if ids.shape[1] > 4 else scores

    with full_batches(2, max_new_tokens=6) as generator:
        other = generator.submit([7, 5, 6], do_sample=True, seed=1)
        broken = generator.submit([8, 5, 6], do_sample=True, logits_processor=[nowhere])
        with pytest.raises(ValueError, match="no token can be drawn, because the logits have NaN"):
            broken.result()
        text = other.result()
    with full_batches(1, max_new_tokens=6) as generator:
        assert generator([7, 5, 6], do_sample=True, seed=1) == text


def test_many_threads_may_read_prompts_at_once() -> None:
    with TextGenerator(model(), tokenizer(), max_new_tokens=2) as generator:
        alone = generator("the dog")
        with ThreadPoolExecutor(64) as callers:
            assert list(callers.map(lambda _: generator("the dog"), range(64))) == [alone] * 64


def test_details_options_and_copies() -> None:
    with TextGenerator(model(), tokenizer(), details=True, max_new_tokens=5) as generator:
        found = generator("the dog")
        assert isinstance(found, Generation)
        size = len(tokenizer()("the dog").input_ids)
        assert (len(found.tokens), found.prompt_tokens) == (5, size)
        with generator.with_options(max_new_tokens=2, batch_size=3) as other:
            assert other("the dog").tokens == found.tokens[:2]
            assert other.options["batch_size"] == 3
        with pickle.loads(pickle.dumps(generator)) as copied:
            assert copied("the dog") == found
        assert generator.meaning == copied.meaning != other.meaning
        biased = [generator.with_options(sequence_bias={(5,): bias}) for bias in (-1.0, -2.0)]
        assert biased[0].meaning != biased[1].meaning


def test_memory_that_a_processor_of_the_caller_lacks_is_its_own_error() -> None:
    def lacking(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise MemoryError("mine")

    with TextGenerator(model(), tokenizer(), max_new_tokens=150) as generator:
        stream = generator.stream([5, 6, 7], min_new_tokens=150)
        next(stream)
        with pytest.raises(MemoryError, match="mine"):
            generator([8, 9], logits_processor=[lacking])
        assert len("".join(stream)) > 0
        assert generator.stats.memory_errors == 0
