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

from batched import Batched, cli
from batched._commands import load
from batched._commands.bench import measuring
from batched._commands.bench.advice import (
    BatchTime,
    Fit,
    Way,
    choose_size,
    choose_way,
    fit,
    summarize,
)
from batched._commands.bench.sample import read_items
from batched._commands.bench.target import Target, finish_on_gpu, load_target
from batched._commands.display import format_ratio, ms
from batched._commands.load import Calls
from batched._core.cost import TimeBySize

pytestmark = pytest.mark.once

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
        seen.append(items[:])
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

@batched.dynamically(prepare=str.upper)
def prepared(items):
    seen.append(items[:])
    return items

@batched.inference.dynamically(spread_kwargs=True)
def keywords(x, mask):
    seen.append({"x": x.shape})
    return x
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
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    monkeypatch.setitem(sys.modules, "torch", None)  # else features become tensors
    yield
    sys.modules.pop("functions", None)


def bench(target: str, sample: str = "items", *more: str) -> int:
    sizes = ["--max-batch-size", "4", "--concurrency", "3", "--seconds", "0.01"]
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
    assert re.findall(r"^ +(\d+)(?: +[\d.,]+){3} *$", out, re.MULTILINE) == ["1", "2", "4"]
    ways = re.findall(r"^ +(\d) +(unbatched|\d(?:, length)?) .* to ", out, re.MULTILINE)
    assert ways[:3] == [("1", "unbatched"), ("3", "unbatched"), ("1", "1")]
    lengths = ["", ", length"] if "length" in out else [""]
    assert ways[3:] == [("3", f"{n}{length}") for length in lengths for n in (1, 2, 4, 8)]
    assert ("length" in out) == (sample == "items")
    assert re.search(r"A batch of n takes about [\d.,]+ ms \+ |are not linear in the size", out)
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
    finish_on_gpu()
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


SETTINGS = {"batch_size": 32, "max_concurrent_batches": 1}
LENGTHS = SETTINGS | {"length": len}
NO_NUMBERS = "sample, line 1: each feature must be a number or lists of numbers"


@pytest.mark.parametrize(
    ("target", "text", "sentence"),
    [
        ("plain", "\n \n", "sample has no items; each line must be one"),
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
    with pytest.raises(ArgumentError, match="bytes is not a text in UTF-8: "):
        load_target("functions:plain", Path("bytes"))
    with pytest.raises(SystemExit):
        bench("plain", "no_such_file")


TABLE = '\ufeffid,text\n1,one\n2,"two\nlines"\n3\n'


@pytest.mark.parametrize(
    ("name", "text", "column", "items"),
    [
        ("a.txt", "one\r\n\n \n 2 \n", None, {1: "one", 4: " 2 "}),
        ("a.csv", TABLE, "id", {2: "1", 4: "2", 5: "3"}),
        ("a.jsonl", '{"id": 1, "text": "one"}\n{"text": ""}', "text", {1: "one", 2: ""}),
    ],
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
        ("a.csv", "", None, " has no columns; name the column of the items by --column"),
        ("a.csv", "id\n", "id", " has no items; each line must be one"),
        ("a.txt", "one", "id", ", line 1: no column id; it has no columns"),
    ],
)
def test_a_column_that_is_not_there_is_reported_with_the_columns(
    name: str, text: str, column: str | None, sentence: str, tmp_path: Path
) -> None:
    sample = tmp_path / name
    sample.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError) as refused:
        read_items(sample, column)
    assert str(refused.value) == f"{sample}{sentence}"


def test_an_item_of_a_table_may_be_long(tmp_path: Path) -> None:
    sample = tmp_path / "a.csv"
    sample.write_text(f"id\n{'x' * 200_000}\n", encoding="utf-8")
    assert read_items(sample, "id") == {2: "x" * 200_000}


def measure_loads(target: Target, ways: list[Way]) -> None:
    asyncio.run(measuring.measure_loads(target, ways, 0.01, Progress(disable=True)))


def test_an_exception_under_load_is_reported_with_the_callers(functions: None) -> None:
    target = load_target("functions:failing", Path("items"))
    with pytest.raises(ArgumentError, match="failing raised ValueError: no, called by 1 caller un"):
        measure_loads(target, [Way(1), Way(2)])


def test_a_way_in_which_calls_at_once_fail_is_left_out(
    functions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make_calls(call: Any, items: Any, callers: int, **_: Any) -> Calls:
        if callers > 1 and not isinstance(call, Batched):
            raise RuntimeError("Already borrowed")
        return Calls(callers, 1.0, [0.01])

    monkeypatch.setattr(measuring, "make_calls", make_calls)
    ways = [Way(1), Way(3), Way(3, SETTINGS)]
    measure_loads(load_target("functions:plain", Path("items")), ways)
    assert [len(way.rounds) for way in ways] == [2, 0, 2]
    error = "functions:plain raised RuntimeError: Already borrowed, called by 3 callers unbatched"
    assert [way.error for way in ways] == ["", error, ""]


@pytest.mark.parametrize(
    ("target", "sample", "arguments"),
    [
        ("plain", "items", [["one"], ["three"], ["two"]]),
        ("prepared", "items", [["ONE"], ["THREE"], ["TWO"]]),
        ("model.method", "items", [["one"], ["three"], ["two"]]),
        ("keywords", "features", [{"x": (1, 1)}, {"x": (1, 3)}]),
    ],
)
def test_an_unbatched_call_passes_one_item_as_without_this_library(
    target: str, sample: str, arguments: list[Any], functions: None
) -> None:
    call, items = load_target(f"functions:{target}", Path(sample)).unbatched
    for item in items:
        call(item)
    assert sorted(given(), key=str) == arguments


@pytest.mark.parametrize(
    ("target", "text", "has_lengths"),
    [
        ("plain", '"a"\n"long one"\n', True),
        ("plain", "[1]\n[1, 2]\n", True),
        ("plain", '"a"\n"b"\n', False),
        ("plain", '"a"\n2\n', False),
        ("measured", '"a"\n"long one"\n', False),
        ("arrays", RAGGED, False),
        ("prepared", '"a"\n"long one"\n', True),
    ],
)
def test_length_is_tried_if_items_differ_in_length_and_the_function_has_none(
    target: str, text: str, has_lengths: bool, functions: None
) -> None:
    Path("sample").write_text(text)
    assert load_target(f"functions:{target}", Path("sample")).has_lengths() == has_lengths


@pytest.mark.parametrize(
    ("target", "settings", "line"),
    [
        ("plain", LENGTHS, "Decorator: @batched.dynamically(batch_size=32, length=len)"),
        (
            "coroutine",
            {"batch_size": 8, "max_concurrent_batches": 4},
            "Decorator: @batched.aio.dynamically(batch_size=8, max_concurrent_batches=4)",
        ),
        ("decorated", SETTINGS, "In its decorator: batch_size=32 (now batch_size=8)"),
        ("plain", None, "It needs no decorator."),
    ],
)
def test_the_suggested_decorator_fits_the_function(
    target: str, settings: dict[str, Any] | None, line: str, functions: None
) -> None:
    assert load_target(f"functions:{target}", Path("items")).suggestion(settings) == line


def test_no_second_call_begins_after_the_end_of_a_load() -> None:
    calls = asyncio.run(load.make_calls(print, count(), 2, until=time.perf_counter()))
    assert len(calls.latencies) == 2


def test_calls_go_on_until_there_are_enough() -> None:
    until = time.perf_counter()
    calls = asyncio.run(load.make_calls(str, count(), 2, until=until, least=50))
    assert 50 <= len(calls.latencies) <= 51


def test_the_first_calls_of_all_callers_do_not_count() -> None:
    calls = asyncio.run(load.make_calls(str, iter(range(100)), 8, warm_up=0.3))
    assert len(calls.latencies) == 100 - 24


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

UNBATCHED = Way(64)
ONE = Way(64, SETTINGS)
TWO = Way(64, SETTINGS | {"max_concurrent_batches": 2})
LENGTH = Way(64, LENGTHS)
MADE = "64 callers made"
MORE = "as many items with batch_size=32, max_concurrent_batches=1"
AS = f"{MORE} as unbatched"
FASTER = f"Other settings may be faster: {MADE} 1.2x {MORE[:-1]}2 as {MORE[14:]}"
UNSTABLE = "in 3 rounds: this machine is unstable."


@pytest.mark.parametrize(
    ("rates", "chosen", "sentences"),
    [
        (
            [(UNBATCHED, 100, 100, 100), (ONE, 400, 390, 410), (TWO, 420, 425, 430)],
            ONE,
            f"{MADE} 4.0x {AS} (3.9x to 4.1x in 3 rounds).",
        ),
        (
            [(UNBATCHED, 100, 100, 100), (ONE, 90, 96, 110)],
            UNBATCHED,
            f"Batching is not worth it: {MADE} 1.0x {AS} (0.9x to 1.1x in 3 rounds).",
        ),
        (
            [(UNBATCHED, 100, 100, 100), (ONE, 150, 300, 450), (LENGTH, 80, 80, 80)],
            ONE,
            f"{MADE} 1.5x to 4.5x {AS} {UNSTABLE}",
        ),
        (
            [(UNBATCHED, 100, 100, 100), (ONE, 90, 150, 160)],
            UNBATCHED,
            f"Batching may not be worth it: {MADE} 0.9x to 1.6x {AS} {UNSTABLE}",
        ),
        (
            [(UNBATCHED, 50, 50, 50), (ONE, 100, 100, 100), (TWO, 98, 120, 121)],
            ONE,
            f"{MADE} 2.0x {AS} (2.0x to 2.0x in 3 rounds).\n{FASTER} (1.0x to 1.2x in 3 rounds).",
        ),
        (
            [(UNBATCHED, 10, 10, 10), (ONE, 20, 20, 20), (TWO, 19, 21, 20), (LENGTH, 26, 25, 27)],
            LENGTH,
            f"{MADE} 2.6x {MORE}, length=len as unbatched (2.5x to 2.7x in 3 rounds).",
        ),
    ],
    ids=["small gain", "no gain", "unstable", "doubtful", "perhaps faster", "length"],
)
def test_advice_is_the_fewest_settings_with_a_gain_in_every_round(
    rates: list[tuple[Any, ...]], chosen: Way, sentences: str
) -> None:
    ways = [
        Way(way.callers, way.settings, [Calls(64, 1.0, [0.01] * number) for number in numbers])
        for way, *numbers in rates
    ]
    found = choose_way(ways)
    assert found.settings == chosen.settings
    assert summarize(ways, found) == sentences


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
    assert str(Fit(5e-3, 1e-4, 0.2)) == f"{line} 20% of every measured time."
    assert str(Fit(5e-3, 1e-4, 0.002)) == f"{line} 1% of every measured time."


@pytest.mark.parametrize(
    ("measured", "batch_size", "larger"),
    [
        (FIXED, 64, "may gain more: try --max-batch-size 256."),
        (FLAT, 32, "gain less than 10% more."),
        (SLOWER, 8, "gain less than 10% more."),
        (NOISY, 16, "gain less than 10% more."),
        (LINEAR, 2, "gain less than 10% more."),
        (WORSE, 2, "gain less than 10% more."),
    ],
    ids=["fixed", "flat", "slower", "noisy", "linear", "worse"],
)
def test_the_smallest_size_that_is_nearly_the_best_is_measured_under_load(
    measured: list[BatchTime], batch_size: int, larger: str
) -> None:
    assert choose_size(measured) == (batch_size, f"Batches larger than {batch_size} {larger}")


def test_a_line_that_is_far_from_a_time_is_not_printed() -> None:
    assert str(fit(WORSE)) == (
        "The measured times are not linear in the size of the batch: the nearest line differs from "
        "one of them by 36%."
    )


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
