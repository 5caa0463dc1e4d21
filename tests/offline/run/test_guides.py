"""The examples of the field's guides, with the real libraries and one bad row each."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("pyarrow")

import numpy as np

from batched import offline
from batched.errors import RunStopped

pytestmark = pytest.mark.once

# --- a text pipeline of three steps, with a resume

LABELS: Final = ("bad", "good")
CALLS: Counter[str] = Counter()
"""Rows in calls, by the name of the step."""


def clean(texts: list[str]) -> list[str]:
    CALLS["clean"] += len(texts)
    if any(not text.strip() for text in texts):
        raise ValueError("an empty review")
    return [" ".join(text.lower().split()) for text in texts]


class Embed:
    """A bag of words by an embedding of torch, built once."""

    def __init__(self, size: int) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(0)
        self.bag = torch.nn.EmbeddingBag(256, size, mode="mean")

    def __call__(self, texts: list[str]) -> Any:
        CALLS["embed"] += len(texts)
        words = [[sum(word.encode()) % 256 for word in text.split()] for text in texts]
        offsets = np.cumsum([0, *map(len, words)])[:-1]
        with self.torch.inference_mode():
            return self.bag(
                self.torch.tensor([word for each in words for word in each]),
                self.torch.from_numpy(offsets),
            )


def classify(vectors: list[Any]) -> list[dict[str, Any]]:
    CALLS["classify"] += len(vectors)
    sums = [float(np.sum(vector)) for vector in vectors]
    return [{"label": LABELS[total > 0], "score": abs(total)} for total in sums]


def reviews(path: Path, count: int, mended: bool = False) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        for number in range(count):
            bad = number == 70 and not mended
            writer.writerow([f"r{number}", "   " if bad else f"The  kettle no {number} LEAKS"])


def test_a_text_pipeline_of_three_steps_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source, dest = tmp_path / "reviews.csv", tmp_path / "labels.parquet"
    pipeline = offline.Pipeline(
        offline.Step(clean, input="text", output="clean"),
        offline.Step(Embed, args=(16,), input="clean", output="vector", batch_size=16),
        offline.Step(classify, input="vector", output=["label", "score"]),
        max_failed=0,
    )
    settings: dict[str, Any] = {"key": "id", "keep": ["id"], "watch": False}
    CALLS.clear()
    reviews(source, 60)
    assert pipeline.run(source, dest, **settings).ok == 60
    assert CALLS == {"clean": 60, "embed": 60, "classify": 60}
    reviews(source, 150)
    with pytest.raises(RunStopped, match="max_failed"):
        pipeline.run(source, dest, **settings)
    reviews(source, 150, mended=True)
    report = pipeline.run(source, dest, **settings)
    assert (report.ok + report.skipped, report.failed) == (150, 0)
    assert report.skipped >= 60
    whole = dest.read_bytes()
    CALLS.clear()
    report = pipeline.run(source, dest, **settings, batch_size=50, workers=2)
    assert (report.ok, report.skipped, CALLS) == (0, 150, {})
    anew: list[tuple[int | str, dict[str, int]]] = [
        (2, {"classify": 150}),
        ("Embed", {"embed": 150, "classify": 150}),
    ]
    for step, computed in anew:
        CALLS.clear()
        pipeline.run(source, dest, **settings, resume_step=step)
        assert computed == CALLS
        assert dest.read_bytes() == whole
    fresh = tmp_path / "fresh.parquet"
    pipeline.run(source, fresh, **settings)
    assert fresh.read_bytes() == whole


# --- chat over a dataset


def test_chat_over_a_dataset_costs_the_rows_that_have_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    from batched._chat import limits, session
    from batched.chat import ChatClient
    from chat_server import Asked, Reply, answer, chat_server, refuse

    monkeypatch.setattr(session, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(limits, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(limits, "MOST_PAUSE", 0.2)

    def behave(asked: Asked) -> Reply:
        if asked.prompt.endswith("number 40."):
            return refuse(400)
        if asked.prompt.endswith("number 99."):  # the last row; for good
            return refuse(500)
        return refuse(503) if asked.number % 10 == 5 else answer(asked)

    source, dest = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    rows = [{"id": number, "text": f"Say number {number}."} for number in range(100)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (
        chat_server(behave) as server,
        ChatClient(server.url, "a-model", max_workers=8, attempts=2, max_wait_s=5) as client,
    ):
        step = offline.Step(
            client,
            input="text",
            output="answer",
            retry=offline.Retry(wait_initial=0.01, wait_max=0.1, wait_jitter=0),
        )
        pipeline = offline.Pipeline(step)
        for ok, skipped in ((98, 0), (0, 98)):
            report = pipeline.run(source, dest, key="id", watch=False)
            assert (report.ok, report.failed, report.skipped) == (ok, 2, skipped)
            letters = {letter["key"]: letter["error"] for letter in report.dead_letters()}
            assert set(letters) == {40, 99}
            assert all(error.startswith("ChatError: ") for error in letters.values())
        twice = [prompt for prompt, count in server.answered.items() if count > 1]
        # each run may repeat one of them, to see whether the service answers anybody
        assert len(twice) <= 2
    found = [json.loads(line) for line in dest.read_text().splitlines()]
    assert found == [
        {**row, "answer": f"re: {row['text']}"} for row in rows if row["id"] not in (40, 99)
    ]


# --- predictors in Ray Data


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray Data is not installed")
    pytest.importorskip("ray.data", reason="Ray Data is not installed", exc_type=ImportError)
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    yield ray
    ray.shutdown()


guides = [
    pytest.mark.model,
    pytest.mark.slow,  # torch, transformers or Keras in an actor take half a minute
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of Ray
]


def predicted(ray: Any, dataset: Any, fn: Callable[..., Any], **settings: Any) -> list[Any]:
    return dataset.map_batches(  # type: ignore[no-any-return]  # Ray is not looked into
        offline.BatchPredictor,
        fn_constructor_args=(fn,),
        fn_constructor_kwargs={"input": "data", "output": "output", **settings},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=16,
    ).take_all()


def check_rows(rows: list[Any], count: int, bad: int, error: str) -> None:
    """Compare the columns that are added: all rows but `bad` have an output, that one an error."""
    ends = [(row["_status"], row["_error"].partition(": ")[0]) for row in rows]
    assert ends == [("failed", error) if number == bad else ("ok", "") for number in range(count)]


WORDS: Final = ("the", "kettle", "leaks", "and", "sings", "all", "day", "long")
POSITIONS: Final = 32


def tiny_model(folder: Path) -> None:
    """Save a GPT-2 with random weights, and a tokenizer of a few words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<pad>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=10**6,  # so that nothing is cut, and the model sees too long a row
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(words),
        n_positions=POSITIONS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


class HuggingFacePredictor:
    """A text generation of Hugging Face, as in the guide, but for the list that it is given."""

    def __init__(self, path: str) -> None:
        from transformers import pipeline

        self.model = pipeline("text-generation", model=path)

    def __call__(self, texts: list[str]) -> list[str]:
        predictions = self.model(
            texts, max_new_tokens=4, do_sample=False, batch_size=len(texts), truncation=False
        )
        return [sequences[0]["generated_text"] for sequences in predictions]


class TestRayData:
    pytestmark = guides

    def test_a_predictor_of_hugging_face(self, ray: Any, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        tiny_model(tmp_path)
        texts = [" ".join(WORDS[n % 4 : n % 4 + 1 + n % 3]) for n in range(20)]
        texts[13] = "leaks " * (2 * POSITIONS)  # more tokens than the model has positions
        rows = predicted(
            ray,
            ray.data.from_items([{"data": text} for text in texts]),
            HuggingFacePredictor,
            args=(str(tmp_path),),
        )
        check_rows(rows, 20, bad=13, error="IndexError")
        alone = HuggingFacePredictor(str(tmp_path))
        for text, row in zip(texts, rows, strict=True):
            if row["_status"] == "ok":
                assert row["output"].startswith(text)
                assert row["output"] == alone([text])[0]

    def test_a_predictor_of_torch(self, ray: Any) -> None:
        torch = pytest.importorskip("torch")

        class TorchPredictor:
            def __init__(self) -> None:
                layers = torch.nn.Linear(in_features=100, out_features=1), torch.nn.Sigmoid()
                torch.nn.init.constant_(layers[0].weight, 0.01)
                torch.nn.init.zeros_(layers[0].bias)
                self.model = torch.nn.Sequential(*layers)
                self.model.eval()

            def __call__(self, rows: list[Any]) -> Any:
                tensor = torch.as_tensor(np.stack(rows), dtype=torch.float32)
                with torch.inference_mode():
                    return self.model(tensor)

        data = [np.full(100 if n != 7 else 99, n / 40, np.float32) for n in range(20)]
        rows = predicted(ray, ray.data.from_items([{"data": row} for row in data]), TorchPredictor)
        check_rows(rows, 20, bad=7, error="RuntimeError")
        for n, row in enumerate(rows):
            if n != 7:
                assert np.allclose(row["output"], 1 / (1 + np.exp(-n / 40)))

    def test_a_predictor_of_keras(self, ray: Any) -> None:
        if not _has("keras"):
            pytest.skip("Keras is not installed")

        class KerasPredictor:
            def __init__(self) -> None:
                os.environ["KERAS_BACKEND"] = "torch"
                import keras

                inputs = keras.Input(shape=(100,))
                outputs = keras.layers.Dense(
                    1,
                    activation="sigmoid",
                    kernel_initializer=keras.initializers.Constant(0.01),
                )(inputs)
                self.model = keras.Model(inputs, outputs)

            def __call__(self, rows: list[Any]) -> Any:
                return self.model.predict(np.stack(rows), verbose=0)

        data = [np.full(100 if n != 3 else 101, n / 40, np.float32) for n in range(20)]
        rows = predicted(ray, ray.data.from_items([{"data": row} for row in data]), KerasPredictor)
        check_rows(rows, 20, bad=3, error="ValueError")
        for n, row in enumerate(rows):
            if n != 3:
                assert np.allclose(row["output"], 1 / (1 + np.exp(-n / 40)))


def _has(package: str) -> bool:
    """Test whether a package is installed, without importing it here."""
    import importlib.util

    return importlib.util.find_spec(package) is not None
