"""Command bench, with functions of a user."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from argparse import ArgumentError
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.progress import Progress

from batched import cli
from batched._commands import bench
from batched._commands.display import ms, new_console
from batched._commands.load import Calls, make_calls
from batched._commands.reference import import_attribute
from batched._commands.sample import read_items

pytestmark = pytest.mark.once

FUNCTIONS = """
import asyncio, signal, threading
import batched

seen = []  # arguments of the functions
loops = set()

def plain(items):
    seen.append(items[:])
    return [len(item) for item in items]

async def coroutine(items):
    loops.add(id(asyncio.get_running_loop()))
    return items

@batched.dynamically(batch_size=8, max_queue_size=1, on_full="raise")
def decorated(items):
    return items

@batched.dynamically(max_batch_tokens=4, dedupe=True)
def cut(items):
    seen.append(items[:])
    return items

@batched.dynamically(prepare=str.upper)
def prepared(items):
    seen.append(items[:])
    return items

class Model:
    def method(self, items):
        seen.append(items[:])
        return items

model = Model()
inside, overlap = threading.Lock(), threading.Event()

def one_at_a_time(items):
    if not inside.acquire(blocking=False):
        overlap.set()
        raise RuntimeError("Already borrowed")
    overlap.wait(40)
    inside.release()
    return items

def interrupting(items):
    seen.append(items)
    if len(seen) == 20:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    return items

def short(items):
    return items[1:]

def failing_from_4(items):
    if len(items) >= 4:
        raise KeyError("four")
    return items

def generator(items):
    yield from items

@batched.inference.dynamically
def features(given):
    return given["x"]

if hasattr(signal, "pthread_kill"):  # Windows has no model processes
    connected = batched.connect("functions:decorated")
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a folder with modules and samples, and shorten measurements."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "ending.py").write_text("raise SystemExit")
    (tmp_path / "items").write_text('"one"\n\n"two"\n  \n"three"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name, value in {"SIZE_TURN": 0.001, "CALLERS_TURN": 0.01, "ROUNDS": 2}.items():
        monkeypatch.setattr(bench, name, value)
    yield
    sys.modules.pop("functions", None)


def measure(target: str) -> int:
    sizes = ["--max-batch-size", "4", "--concurrency", "3"]
    return cli.main(["bench", f"functions:{target}", "--input", "items", *sizes])


def load(target: str) -> Any:
    return bench.as_batched(import_attribute(f"functions:{target}"), target)


def given() -> list[Any]:
    seen: list[Any] = sys.modules["functions"].seen
    return seen


@pytest.mark.parametrize("target", ["plain", "coroutine", "decorated"])
def test_every_kind_of_function_is_measured(
    target: str, functions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(target) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"functions:{target}, 3 items from items, ")
    assert re.findall(r"^ +(\d+)(?: +[\d.,]+){3} *$", out, re.MULTILINE) == ["1", "2", "4"]
    rows = re.findall(r"^ +(\w+) +[\d,]+ +[\d.]+x ", out, re.MULTILINE)
    assert rows == ["unbatched", "batched"]
    assert re.search(
        r"^3 callers made [\d.]+x as many items batched as unbatched", out, re.MULTILINE
    )
    assert len(sys.modules["functions"].loops) == (target == "coroutine")


def test_batches_have_the_size_that_is_measured_whatever_the_settings(functions: None) -> None:
    times = asyncio.run(
        bench.time_batches(load("cut"), ["a", "long"], [3, 5], "cut", Progress(disable=True))
    )
    assert {len(items) for items in given()} == set(times) == {3, 5}


def test_a_measurement_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: waits.append(True))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    bench.finish_on_gpu()
    assert waits == [True]


def test_an_interrupted_command_ends_with_status_130(functions: None) -> None:
    assert measure("interrupting") == 130


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("functions:short", "short was given 1 items and returned 0 results; it must .*"),
        (
            "functions:failing_from_4",
            "functions:failing_from_4 raised KeyError: 'four', given a batch of 4",
        ),
        ("functions:generator", "cannot batch functions:generator: .* is a generator function"),
        ("functions:Model.method", ".* is a method; name that of an instance, .*"),
        ("functions:features", "functions:features is no function of one list .*"),
        ("functions:connected", "functions:connected is no function of one list .*"),
        ("ending:f", "cannot import ending:f: SystemExit"),
    ],
)
def test_an_unusable_function_is_reported_in_one_sentence(
    target: str, sentence: str, functions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["bench", target, "--input", "items", "--max-batch-size", "4"])
    assert refused.value.code == 2
    assert re.fullmatch(rf"batched bench: {sentence}\n", capsys.readouterr().err)


TABLE = '\ufeffid,text\n1,one\n2,"two\nlines"\n3\n'


@pytest.mark.parametrize(
    ("name", "text", "column", "items"),
    [
        ("a.txt", "one\r\n\n \n 2 \n", None, {1: "one", 4: " 2 "}),
        ("a.csv", TABLE, "id", {2: "1", 4: "2", 5: "3"}),
        ("a.csv", f"id\n{'x' * 200_000}\n", "id", {2: "x" * 200_000}),
        ("a.jsonl", '{"id": 1, "text": "one"}\n{"text": ""}', "text", {1: "one", 2: ""}),
        ("a.jsonl", "[1, 2]\n[]\n", None, {1: [1, 2], 2: []}),
    ],
    ids=["lines", "table", "long", "objects", "lists"],
)
def test_items_are_lines_or_values_of_a_column(
    name: str, text: str, column: str | None, items: dict[int, Any], tmp_path: Path
) -> None:
    sample = tmp_path / name
    sample.write_text(text, encoding="utf-8")
    assert read_items(sample, column) == items


@pytest.mark.parametrize(
    ("name", "text", "column", "sentence"),
    [
        ("a.csv", TABLE, None, " has id, text; name the column of the items by --column"),
        ("a.csv", TABLE, "x", ", line 2: no column x; it has id, text"),
        ("a.csv", TABLE, "text", ", line 5: no column text; it has id"),
        ("a.csv", "id\n", "id", " has no items; each line must be one"),
        ("a.txt", "one", "id", ", line 1: no column id; it has no columns"),
        ("a.jsonl", '1\n\n{"a": \n', None, ", line 3: not JSON: Expecting value"),
    ],
)
def test_an_unusable_sample_is_reported_with_its_line(
    name: str, text: str, column: str | None, sentence: str, tmp_path: Path
) -> None:
    sample = tmp_path / name
    sample.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError) as refused:
        read_items(sample, column)
    assert str(refused.value) == f"{sample}{sentence}"


def test_a_sample_that_is_no_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="bytes is not a text in UTF-8: "):
        read_items(tmp_path / "bytes", None)


def test_a_function_that_bears_one_call_at_a_time_is_compared_with_one_caller(
    functions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(console=new_console(), disable=True)
    rounds = asyncio.run(bench.compare(load("one_at_a_time"), ["a"], 3, "m:f", progress))
    assert len(rounds) == 2
    assert capsys.readouterr().out == (
        "m:f raised RuntimeError: Already borrowed, called by 3 callers at once; one caller makes "
        "the unbatched calls\n"
    )


def test_an_exception_under_callers_is_reported_with_their_number(functions: None) -> None:
    async def failing(items: list[str]) -> list[str]:
        raise ValueError("no\nmore")

    fn = bench.as_batched(failing, "failing")
    with pytest.raises(ArgumentError, match="f raised ValueError: no, called by 1 caller$"):
        asyncio.run(bench.compare(fn, ["a"], 1, "m:f", Progress(disable=True)))


@pytest.mark.parametrize(
    ("target", "argument"), [("plain", "one"), ("prepared", "ONE"), ("model.method", "one")]
)
def test_an_unbatched_call_passes_one_item_as_without_this_library(
    target: str, argument: str, functions: None
) -> None:
    bench.alone(load(target))("one")
    assert given() == [[argument]]


def test_calls_go_on_until_there_are_enough() -> None:
    until = time.perf_counter()
    calls = asyncio.run(make_calls(str, count(), 2, lambda *_: None, until=until, least=50))
    assert 50 <= len(calls.latencies) <= 51


def test_the_first_calls_of_all_callers_do_not_count() -> None:
    calls = asyncio.run(make_calls(str, iter(range(100)), 8, lambda *_: None, warm_up=0.3))
    assert len(calls.latencies) == 100 - 24


def test_percentiles_are_latencies() -> None:
    calls = Calls(1.0, [0.3, 0.1, 0.2])
    assert [calls.percentile(percent) for percent in (1, 50, 99, 100)] == [0.1, 0.2, 0.3, 0.3]


ADVICE = {
    "plain": "Decorator: @batched.dynamically(batch_size=32)",
    "coroutine": "Decorator: @batched.aio.dynamically(batch_size=32)",
    "decorated": "In its decorator: batch_size=32 (now 8)",
}


@pytest.mark.parametrize("target", ADVICE)
def test_a_decorator_is_advised_if_it_gains_in_every_round(target: str, functions: None) -> None:
    found = import_attribute(f"functions:{target}")
    fn = bench.as_batched(found, target)

    def advice(*rates: int) -> str:
        rounds = [(Calls(1.0, [0.01] * 100), Calls(1.0, [0.01] * rate)) for rate in rates]
        return bench.advise(fn, fn is found, 32, 64, rounds)

    made = "64 callers made {} as many items batched as unbatched ({} to {} in 3 rounds).\n{}"
    doubt = "Batching may not be worth it."
    assert advice(390, 400, 410) == made.format("4.0x", "3.9x", "4.1x", ADVICE[target])
    assert advice(90, 300, 450) == made.format("3.0x", "0.9x", "4.5x", doubt)
    assert advice(102, 105, 120) == made.format("1.1x", "1.0x", "1.2x", doubt)


def test_the_smallest_size_that_is_nearly_the_best_is_advised() -> None:
    fixed = {1: 5.1, 2: 5.2, 4: 5.4, 8: 5.8, 16: 6.6, 32: 8.2, 64: 11.4}
    assert bench.choose_size(fixed) == 64
    linear = {1: 2.0, 2: 4.0, 4: 8.0, 8: 16.0}
    assert bench.choose_size(linear) == 2
    slower_from_16 = {1: 4.0, 2: 4.4, 4: 5.2, 8: 8.0, 16: 24.0, 32: 80.0}
    assert bench.choose_size(slower_from_16) == 8


def test_durations_are_shown_in_milliseconds() -> None:
    shown = [ms(seconds) for seconds in (5e-3, 0.0996, 0.09996, 12.3456, 4e-8)]
    assert shown == ["5.00", "99.6", "100", "12,346", "0.000040"]
