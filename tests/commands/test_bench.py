"""Command bench, with functions of a user."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
import time
from argparse import ArgumentError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("rich")

from rich.progress import Progress

from batched import cli
from batched._commands import load
from batched._commands.bench import measuring
from batched._commands.bench.advice import BatchTime, Fit, advise, fit
from batched._commands.bench.command import Findings, summarize
from batched._commands.bench.target import load_target
from batched._commands.display import format_ratio, ms
from batched._commands.load import Calls
from batched._core.cost import TimeBySize

FUNCTIONS = """
import asyncio, signal, threading
import batched
from batched.inference import dynamically as on_features

seen = []  # arguments of the functions

def plain(items):
    seen.append(items[:])
    return [len(item) for item in items]

async def coroutine(items):
    seen.append(items[:])
    loops.add(id(asyncio.get_running_loop()))
    return items

loops = set()

@batched.dynamically(
    batch_size=8, timeout_ms=1.0, max_queue_size=1, on_full="raise", max_batch_tokens=4
)
def decorated(items):
    return items

@batched.aio.dynamically
def awaited(items):
    return items

def features(given):
    seen.append({name: (values.dtype.name, values.shape) for name, values in given.items()})
    return given["x"]

arrays = on_features(features)

measured = batched.dynamically(length=len)(plain)

@batched.inference.dynamically(spread_kwargs=True, pad_to_multiple_of=4)
def spread(x, mask):
    return x

class Model:
    def __call__(self, items):
        return items

    def method(self, items):
        return items

    @batched.dynamically
    def batched_method(self, items):
        return items

model = Model()

def interrupting(items):
    seen.append(items)
    if len(seen) == 20:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    return items

def short(items):
    return items[1:]

async def failing(items):
    raise ValueError("no\\nmore")

def failing_from_4(items):
    if len(items) >= 4:
        raise KeyError("four")
    return items

def generator(items):
    yield from items

number = 3
"""
ITEMS = '"one"\n\n"two"\n  \n"three"\n'
FEATURES = '{"x": [1.5, 2, 3], "mask": [1, 1, 1]}\n{"mask": [1], "x": [4]}\n'


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a folder with modules and samples, and shorten measurements."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "ending.py").write_text("raise SystemExit")
    (tmp_path / "items").write_text(ITEMS)
    (tmp_path / "features").write_text(FEATURES)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(measuring, "TURN", 0.001)
    monkeypatch.setitem(sys.modules, "torch", None)  # else features become tensors
    yield
    sys.modules.pop("functions", None)


def bench(target: str, sample: str = "items", *more: str) -> int:
    sizes = ["--max-batch-size", "4", "--concurrency", "3", "--seconds", "0.1"]
    return cli.main(["bench", f"functions:{target}", "--input", sample, *sizes, *more])


def given() -> list[Any]:
    seen: list[Any] = sys.modules["functions"].seen
    return seen


@pytest.mark.parametrize(
    ("target", "sample"),
    [
        ("decorated", "items"),
        ("awaited", "items"),
        ("model", "items"),
        ("model.method", "items"),
        ("model.batched_method", "items"),
        ("spread", "features"),
    ],
)
def test_every_kind_of_function_is_measured(
    target: str, sample: str, functions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(target, sample, "--batch-size", "2") == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if len(row) == 4 and row[0].isdigit()] == ["1", "2", "4"]
    loads = [row for row in rows if len(row) == 6 and row[2].endswith("x")]
    assert [row[0] for row in loads if row[0].isdigit()] == ["1", "2", "3"]
    assert re.search(r"A batch of n takes about [\d.,]+ ms \+ [\d.,]+ ms \* n", out)
    number = 3 if sample == "items" else 2
    assert out.startswith(f"functions:{target}, {number} items from {sample}, ")
    assert "batch_size=2\n" in out.replace(" ", "")


RAGGED = '{"x": [1]}\n{"x": [1]}\n{"x": [1, 2, 3, 4, 5]}\n'
"""Sample of features of different lengths."""


@pytest.mark.parametrize(
    ("target", "sample"),
    [("measured", '"a"\n"b"\n"a long one"\n'), ("arrays", RAGGED)],
)
def test_direct_batches_are_never_cut_short(
    target: str, sample: str, functions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patched cost model lets any padding pay for another batch."""
    init = TimeBySize.__init__

    def costless(self: TimeBySize) -> None:
        init(self)
        self.fixed_size = 0.0

    monkeypatch.setattr(TimeBySize, "__init__", costless)
    monkeypatch.setattr(TimeBySize, "_find_fixed_size", lambda _: None)
    Path("sample").write_text(sample)
    loaded = load_target(f"functions:{target}", Path("sample"))
    times = asyncio.run(measuring.time_batches(loaded, [25, 35], Progress(disable=True)))
    rows = [batch["x"][1][0] if isinstance(batch, dict) else len(batch) for batch in given()]
    assert set(rows) == set(times) == {25, 35}
    # the first batch of each size does not count
    assert len(rows) == sum(map(len, times.values())) + 2


def test_the_function_gets_batches_of_each_size_of_items_that_may_be_lists(functions: None) -> None:
    Path("lists").write_text("[1, 2]\n[3]\n[]\n")
    bench("plain", "lists")
    assert {len(items) for items in given()} >= {1, 2, 4}
    assert {tuple(item) for items in given() for item in items} == {(1, 2), (3,), ()}


def test_features_are_arrays_with_a_row_for_each_line(functions: None) -> None:
    bench("arrays", "features")
    assert {each["x"] for each in given()} >= {("float32", (2, 3)), ("float32", (4, 3))}
    assert {each["x"] for each in given()} & {("float32", (1, 3)), ("float32", (1, 1))}
    assert all(each["mask"] == ("int64", each["x"][1]) for each in given())


def test_a_coroutine_function_runs_on_one_loop(functions: None) -> None:
    bench("coroutine")
    assert len(sys.modules["functions"].loops) == 1


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")  # before `functions` hides torch: no second import works


@pytest.mark.model
def test_features_are_tensors_if_torch_is_there(
    torch: Any, functions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    items = load_target("functions:arrays", Path("features")).items
    assert all(isinstance(row, torch.Tensor) for item in items for row in item.values())


def test_a_measurement_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: waits.append(True))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    measuring.finish_on_gpu()
    assert waits == [True]


@pytest.mark.parametrize("in_load", [False, True])
def test_an_interrupted_command_ends_with_status_130_and_leaves_no_thread_behind(
    in_load: bool, functions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    if in_load:

        def interrupt(threads: int) -> Any:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return ThreadPoolExecutor(threads)

        monkeypatch.setattr(load, "ThreadPoolExecutor", interrupt)
    assert bench("plain" if in_load else "interrupting", "items", "--seconds", "1000") == 130
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("functions:short", "short was given 1 items and returned 0 results; it must .*"),
        (
            "functions:failing_from_4",
            "functions:failing_from_4 raised KeyError: 'four', given a batch of 4",
        ),
        ("functions:generator", "cannot batch functions:generator: .* is a generator function"),
        ("functions:number", "cannot batch functions:number: only a function .*, got 3"),
        ("functions:Model.batched_method", ".* is a method; name the method of an instance, .*"),
        ("broken:f", "cannot import broken:f: RuntimeError: at import"),
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


NO_NUMBERS = "sample, line 1: each feature must be a number or lists of numbers"


@pytest.mark.parametrize(
    ("target", "text", "sentence"),
    [
        ("plain", "\n \n", "sample is empty; it must have one JSON value per line, each an item"),
        ("plain", '1\n\n{"a": \n', "sample, line 3: not JSON: Expecting value"),
        ("arrays", "3", "sample, line 1: must be an object of features"),
        ("arrays", "{}", "sample, line 1: must be an object of features"),
        (
            "arrays",
            '{"x": 1}\n{"y": 1}',
            "sample, line 2: must be an object of features x, as the first line",
        ),
        ("arrays", '{"x": "text"}', NO_NUMBERS),
        ("arrays", '{"x": [[1], [1, 2]]}', NO_NUMBERS),
    ],
)
def test_an_unusable_sample_is_reported_with_its_line(
    target: str, text: str, sentence: str, functions: None
) -> None:
    Path("sample").write_text(text)
    with pytest.raises(ArgumentError) as refused:
        load_target(f"functions:{target}", Path("sample"))
    assert str(refused.value) == sentence


def test_a_sample_that_cannot_be_read_is_reported(functions: None) -> None:
    with pytest.raises(ArgumentError, match="bytes, line 1: not JSON: "):
        load_target("functions:plain", Path("bytes"))
    with pytest.raises(SystemExit):
        bench("plain", "no_such_file")


def test_an_exception_under_load_is_reported_with_the_callers(functions: None) -> None:
    target = load_target("functions:failing", Path("items"))
    with pytest.raises(ArgumentError, match="failing raised ValueError: no, called by 2 callers"):
        asyncio.run(measuring.measure_load(target, 2, 4, 0.1))


@pytest.mark.parametrize(
    ("target", "batch_size", "line"),
    [
        ("functions:plain", 32, "Decorator: @batched.dynamically(batch_size=32)"),
        ("functions:coroutine", 16, "Decorator: @batched.aio.dynamically(batch_size=16)"),
        ("functions:decorated", 32, "In its decorator: batch_size=32 (now 8)"),
        ("functions:plain", 1, "It needs no decorator."),
    ],
)
def test_the_suggested_decorator_fits_the_function(
    target: str, batch_size: int, line: str, functions: None
) -> None:
    assert load_target(target, Path("items")).suggestion(batch_size) == line


def test_no_call_begins_after_the_end_of_a_load() -> None:
    calls = asyncio.run(load.make_calls(print, count(), 2, until=time.perf_counter()))
    assert calls.latencies == []


def times(**milliseconds: float) -> list[BatchTime]:
    """Return times of batches by size: `of_1=5.0` is 5 ms for a batch of one item."""
    return [
        BatchTime(int(size.removeprefix("of_")), value / 1e3)
        for size, value in milliseconds.items()
    ]


FIXED = times(of_1=5.1, of_2=5.2, of_4=5.4, of_8=5.8, of_16=6.6, of_32=8.2, of_64=11.4)
FLAT = times(of_1=5, of_2=6, of_4=8, of_8=12, of_16=20, of_32=36, of_64=68)
LINEAR = times(of_1=2, of_2=4, of_4=8, of_8=16)
SLOWER = times(of_1=4, of_2=4.4, of_4=5.2, of_8=8, of_16=24, of_32=80)
WORSE = times(of_1=1, of_2=3, of_4=8)
NOISY = times(of_1=10, of_2=11.4, of_4=12.8, of_8=19, of_16=28, of_32=57)

ALONE = "Batching gains nothing here: an item takes"
LARGER = (
    "In a batch of 32 an item takes 1.12 ms, alone 5.00 ms; larger batches gain less than 10% more."
)
FASTER = (
    "With batch_size=8 and 2 callers it is 250 items a second, 2.5x as many as directly one by one."
)
UNBATCHED = "Unbatched coroutines can run side by side, too: compare with that."
NO_GAIN = f"{ALONE} 2.00 ms alone and at best 2.00 ms in a batch, of 2."
NEVER_FASTER = (
    "Through batched, calls are never faster than directly one by one: at best 0.9x, 90 items a "
    "second with 1 caller."
)


@pytest.mark.parametrize(
    ("calls", "batches", "coroutine", "sentence"),
    [
        ({1: 90, 2: 250, 4: 240}, FLAT, False, f"{LARGER}\n{FASTER}"),
        ({1: 90, 2: 250}, FLAT, True, f"{LARGER}\n{FASTER} {UNBATCHED}"),
        ({1: 90, 2: 80}, FLAT, True, NEVER_FASTER),
        ({1: 90, 2: 80}, LINEAR, False, f"{NO_GAIN}\n{NEVER_FASTER}"),
    ],
)
def test_the_summary_states_the_gain(
    calls: dict[int, int], batches: list[BatchTime], coroutine: bool, sentence: str
) -> None:
    loads = [Calls(callers, 1.0, [0.01] * number) for callers, number in calls.items()]
    found = Findings(batches, Calls(1, 1.0, [0.01] * 100), advise(batches), 8, loads)
    assert summarize(found, coroutine=coroutine) == sentence


@pytest.mark.parametrize(
    ("measured", "fixed", "per_item", "off"),
    [
        (FIXED, 5.0, 0.1, 0),
        (FLAT, 4.0, 1.0, 0),
        (LINEAR, 0.0, 2.0, 0),
        (times(of_1=3, of_64=3), 3.0, 0.0, 0),
        # no part is below zero; deviations are relative to the times
        (WORSE, 0, (1 + 2 / 3 + 1 / 2) / (1 + 4 / 9 + 1 / 4), 0.36066),
        (times(of_1=4, of_2=2), (1 / 4 + 1 / 2) / (1 / 16 + 1 / 4), 0, 0.4),  # 2.4 ms, not 4 ms
    ],
)
def test_a_fit_is_the_nearest_line(
    measured: list[BatchTime], fixed: float, per_item: float, off: float
) -> None:
    found = fit(measured)
    assert found.fixed * 1e3 == pytest.approx(fixed, abs=1e-9)
    assert found.per_item * 1e3 == pytest.approx(per_item, abs=1e-9)
    assert found.off == pytest.approx(off, abs=1e-4)


def test_a_fit_states_its_largest_deviation() -> None:
    line = "A batch of n takes about 5.00 ms + 0.100 ms * n, within"
    assert str(Fit(5e-3, 1e-4, 0.31)) == f"{line} 31% of every measured time."
    assert str(Fit(5e-3, 1e-4, 0.002)) == f"{line} 1% of every measured time."


@pytest.mark.parametrize(
    ("measured", "batch_size", "reason"),
    [
        (FIXED, 64, "larger batches may be better still: try --max-batch-size 256."),
        (FLAT, 32, LARGER),
        (SLOWER, 8, "in larger batches it takes longer again, 2.50 ms in one of 32."),
        (NOISY, 16, "In a batch of 16 an item takes 1.75 ms, alone 10.0 ms; larger batches gain"),
        (LINEAR, 1, NO_GAIN),
        (WORSE, 1, f"{ALONE} 1.00 ms alone and at best 1.50 ms in a batch, of 2."),
    ],
    ids=["fixed", "flat", "slower", "noisy", "linear", "worse"],
)
def test_the_smallest_size_that_is_nearly_the_best_is_recommended(
    measured: list[BatchTime], batch_size: int, reason: str
) -> None:
    assert advise(measured).batch_size == batch_size
    assert reason in advise(measured).reason


def test_numbers_double_up_to_the_largest() -> None:
    assert measuring.doublings(1) == [1]
    assert measuring.doublings(48) == [1, 2, 4, 8, 16, 32, 48]
    assert measuring.doublings(64) == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(5e-3, "5.00"), (0.0996, "99.6"), (0.09996, "100"), (12.3456, "12,346"), (4e-8, "0.000040")],
)
def test_durations_are_shown_in_milliseconds(seconds: float, shown: str) -> None:
    assert ms(seconds) == shown


def test_multiples_are_shown_in_two_digits_or_more() -> None:
    shown = [format_ratio(ratio) for ratio in (26.64, 0.97, 0.9, 0.0193)]
    assert shown == ["26.6x", "1.0x", "0.9x", "0.019x"]
