"""Pipelines of the field's guides, with the real libraries and one bad row each."""

from __future__ import annotations

import csv
import json
from collections import Counter
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
