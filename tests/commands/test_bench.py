"""The command `python -m batched bench` on functions of a user."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batched import cli
from batched._commands import parser
from batched._commands.bench import measuring
from batched._commands.bench.advice import BatchTime, Fit, advise, fit, format_ratio, ms
from batched._commands.bench.target import load_target
from batched._core.cost import TimeBySize

PACKAGES = ("numpy", "rich", "matplotlib")
"""Packages that the command needs."""

RAGGED = '{"x": [1]}\n{"x": [1]}\n{"x": [1, 2, 3, 4, 5]}\n'
"""Sample of features of different lengths."""

FUNCTIONS = """
import asyncio, signal, threading
import batched
from batched.inference import dynamically as on_features

seen = []  # what the functions were given

def plain(items):
    seen.append(items[:])
    return [len(item) for item in items]

def consuming(items):
    return [items.pop() for _ in range(len(items))]

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

async def awaited_features(given):
    return features(given)

awaited_arrays = batched.aio.inference.dynamically(awaited_features)

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

def failing(items):
    raise ValueError("no\\nmore")

async def failing_coroutine(items):
    raise ValueError("no")

def failing_from_4(items):
    if len(items) >= 4:
        raise KeyError("four")
    return items

def exiting(items):
    raise SystemExit(3)

def generator(items):
    yield from items

number = 3
"""
ITEMS = '"one"\n\n"two"\n  \n"three"\n'
FEATURES = '{"x": [1.5, 2, 3], "mask": [1, 1, 1]}\n{"mask": [1], "x": [4]}\n'


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a folder with modules and samples, and shorten measurements."""
    for package in PACKAGES:
        pytest.importorskip(package)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "needy.py").write_text("import no_such_package")
    (tmp_path / "ending.py").write_text("raise SystemExit")
    (tmp_path / "items").write_text(ITEMS)
    (tmp_path / "features").write_text(FEATURES)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(measuring, "TURN", 0.001)
    monkeypatch.setattr(measuring, "ROUNDS_SECONDS", 0.0)
    monkeypatch.setitem(sys.modules, "torch", None)  # else features become tensors
    yield
    sys.modules.pop("functions", None)


def bench(target: str, sample: str = "items", *more: str) -> int:
    return cli.main(
        [
            "bench",
            target,
            "--input",
            sample,
            "--max-batch-size",
            "4",
            "--concurrency",
            "3",
            "--seconds",
            "0.1",
            *more,
        ]
    )


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # the command runs in a folder without the package
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=environment,
    )


def given() -> list[Any]:
    seen: list[Any] = sys.modules["functions"].seen
    return seen


@pytest.mark.parametrize(
    ("target", "sample"),
    [
        ("functions:plain", "items"),
        ("functions:consuming", "items"),
        ("functions:coroutine", "items"),
        ("functions:decorated", "items"),
        ("functions:awaited", "items"),
        ("functions:model", "items"),
        ("functions:model.method", "items"),
        ("functions:model.batched_method", "items"),
        ("functions:arrays", "features"),
        ("functions:spread", "features"),
    ],
)
def test_every_kind_of_function_is_measured(
    target: str, sample: str, functions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(target, sample) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines()]
    sizes = [
        row[0] for row in rows if len(row) == 6 and row[0].isdigit() and not row[2].endswith("x")
    ]
    callers = [
        row[0] for row in rows if len(row) == 6 and row[0].isdigit() and row[2].endswith("x")
    ]
    assert sizes == ["1", "2", "4"]
    assert callers == ["1", "2", "3"]
    assert re.search(r"A batch of n takes about [\d.,]+ ms \+ [\d.,]+ ms \* n", out)
    assert out.startswith(f"{target}, {3 if sample == 'items' else 2} items from {sample}, ")
    assert "Picture: batched-bench.png" in out


def test_the_command_draws_its_results(functions: None) -> None:
    import matplotlib.image

    command = (
        "-m",
        "batched",
        "bench",
        "functions:plain",
        "--input",
        "items",
        "--max-batch-size",
        "2",
        "--concurrency",
        "2",
    )
    ended = run(*command, "--seconds", "0.1", "--batch-size", "2", "--output", "picture.png")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "batch_size=2\n" in ended.stdout.replace(" ", "")
    assert ended.stdout.splitlines()[-2] == "Picture: picture.png"
    pixels = matplotlib.image.imread("picture.png")  # fails unless the picture is complete
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert pixels.std() > 0.05


def test_the_function_gets_lists_of_items_of_each_size(functions: None) -> None:
    bench("functions:plain")
    assert {len(items) for items in given()} >= {1, 2, 4}
    assert {item for items in given() for item in items} == {"one", "two", "three"}


@pytest.mark.parametrize(
    ("target", "sample"),
    [("measured", '"a"\n"b"\n"a long one"\n'), ("arrays", RAGGED), ("awaited_arrays", RAGGED)],
)
def test_direct_batches_are_never_cut_short(
    target: str, sample: str, functions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patched cost model lets any padding pay for another batch."""
    made = TimeBySize.__init__

    def costless(self: TimeBySize) -> None:
        made(self)
        self.fixed_size = 0.0

    monkeypatch.setattr(TimeBySize, "__init__", costless)
    monkeypatch.setattr(TimeBySize, "_find_fixed_size", lambda _: None)
    Path("sample").write_text(sample)
    timings = asyncio.run(
        measuring.time_batches(
            load_target(f"functions:{target}", Path("sample")), [25, 35], lambda: None
        )
    )
    rows = [batch["x"][1][0] if isinstance(batch, dict) else len(batch) for batch in given()]
    assert set(rows) == {timing.size for timing in timings} == {25, 35}


def test_an_item_may_be_a_list(functions: None) -> None:
    Path("lists").write_text("[1, 2]\n[3]\n[]\n")
    bench("functions:plain", "lists")
    assert {tuple(item) for items in given() for item in items} == {(1, 2), (3,), ()}


def test_features_are_arrays_with_a_row_for_each_line(functions: None) -> None:
    bench("functions:arrays", "features")
    assert {each["x"] for each in given()} >= {("float32", (2, 3)), ("float32", (4, 3))}
    assert {each["x"] for each in given()} & {("float32", (1, 3)), ("float32", (1, 1))}
    assert all(each["mask"] == ("int64", each["x"][1]) for each in given())


def test_a_coroutine_function_runs_on_one_loop(functions: None) -> None:
    bench("functions:coroutine")
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


def test_an_interrupted_command_ends_with_status_130_and_leaves_no_thread_behind(
    functions: None,
) -> None:
    before = set(threading.enumerate())
    assert bench("functions:interrupting", "items", "--seconds", "20") == parser.INTERRUPTED == 130
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def test_an_interrupt_ends_the_load(functions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from batched._commands import load

    run_threads = load.run_threads

    def interrupted(*args: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        run_threads(*args)

    monkeypatch.setattr(load, "run_threads", interrupted)
    before = set(threading.enumerate())
    assert bench("functions:plain", "items", "--seconds", "1000") == 130
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["functions:short"],
            "short was given 1 items and returned 0 results; it must return one per item, in order",
        ),
        (["functions:failing"], "failing raised ValueError: no, given a batch of 1"),
        (
            ["functions:failing_from_4"],
            "failing_from_4 raised KeyError: 'four', given a batch of 4",
        ),
        (["functions:exiting"], "exiting raised SystemExit.*"),
        (
            ["functions:generator"],
            "cannot batch functions:generator: generator is a generator function",
        ),
        (
            ["functions:number"],
            (
                "cannot batch functions:number: only a function that takes a list "
                "can be batched, got 3"
            ),
        ),
        (
            ["functions:Model.batched_method"],
            "functions:Model.batched_method is a method; name that of an instance, such as .*",
        ),
        (["functions:nothing"], "functions has no attribute 'nothing'"),
        (["functions:model.nothing"], "functions.model has no attribute 'nothing'"),
        (["functions"], "name the function as module:function, got 'functions'"),
        (["no_such_module:f"], "cannot import no_such_module: No module named 'no_such_module'"),
        (["needy:f"], "cannot import needy: No module named 'no_such_package'"),
        (["broken:f"], "cannot import broken: RuntimeError: at import"),
        (["ending:f"], "cannot import ending: SystemExit"),
        (
            ["functions:plain", "no_such_file"],
            "cannot read no_such_file: No such file or directory",
        ),
        (["functions:plain", "bytes"], "cannot read bytes: it is not UTF-8 text"),
        (
            ["functions:plain", "items", "--output", "no/picture.png"],
            "no file can be written at no/picture.png",
        ),
        (
            ["functions:plain", "items", "--max-batch-size", "1"],
            "argument --max-batch-size: must be at least 2, got 1",
        ),
        (
            ["functions:plain", "items", "--seconds", "nan"],
            "argument --seconds: must be at least 0.1, got nan",
        ),
        (
            ["functions:plain", "items", "--seconds", "long"],
            "argument --seconds: invalid number value: 'long'",
        ),
        (
            ["functions:plain", "items", "--batch-size", "0"],
            "argument --batch-size: must be at least 1, got 0",
        ),
    ],
)
def test_an_error_is_reported_in_one_sentence(
    arguments: list[str], sentence: str, functions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        bench(*arguments)
    assert refused.value.code == 2
    assert re.fullmatch(rf"batched bench: {sentence}\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("target", "text", "sentence"),
    [
        ("plain", "", "sample is empty; it must have one JSON value per line, each an item"),
        ("plain", "\n \n", "sample is empty; it must have one JSON value per line, each an item"),
        ("plain", '1\n\n{"a": \n', "sample, line 3: not JSON: Expecting value at column 7"),
        ("arrays", "3", "sample, line 1: must be an object of features"),
        ("arrays", "{}", "sample, line 1: must be an object of features"),
        (
            "arrays",
            '{"x": 1}\n{"y": 1}',
            "sample, line 2: must be an object of the features x, as line 1 is",
        ),
        ("arrays", '{"x": "text"}', "sample, line 1: x must be a number or lists of numbers"),
        (
            "arrays",
            '{"x": [[1], [1, 2]]}',
            "sample, line 1: x must be a number or lists of numbers",
        ),
    ],
)
def test_an_unusable_sample_is_reported_with_its_line(
    target: str, text: str, sentence: str, functions: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sample").write_text(text)
    with pytest.raises(SystemExit) as refused:
        bench(f"functions:{target}", "sample")
    assert refused.value.code == 2
    assert capsys.readouterr().err == f"batched bench: {sentence}\n"


@pytest.mark.parametrize("name", ["failing", "failing_coroutine"])
def test_an_exception_under_load_is_reported_with_the_callers(name: str, functions: None) -> None:
    with pytest.raises(ArgumentError, match=f"{name} raised ValueError: no, called by 2 callers"):
        asyncio.run(
            measuring.measure_load(load_target(f"functions:{name}", Path("items")), 2, 4, 0.1)
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_the_extra(package: str, functions: None) -> None:
    arguments = ["bench", "functions:plain", "--input", "items"]
    ended = run(
        "-c",
        f"import sys; sys.modules[{package!r}] = None; from batched.cli import main; "
        f"sys.exit(main({arguments}))",
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        f"batched bench: {package} is not installed; "
        'run `pip install "batched-dynamically[bench]"`\n'
    )


def test_the_help_states_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--max-batch-size N", "64"),
        ("--batch-size N", "the recommended one"),
        ("--concurrency N", "256"),
        ("--seconds S", "1.0"),
        ("--output FILE", "batched-bench.png"),
    ):
        assert re.search(rf"{option} [^()]*\({default}\)", text), option


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


def loaded(callers: int, calls: int) -> measuring.Load:
    """Return the load of `callers` that made `calls` calls in one second."""
    made = measuring.Load([None], callers, 0.0)
    made.seconds = 1.0
    for _ in range(calls):
        made.record(0, None, 0.0)
    return made


LARGER = (
    "In a batch of 32 an item takes 1.12 ms, alone 5.00 ms; larger batches gain less than 10% more."
)
FASTER = (
    "With batch_size=8 and 2 callers it is 250 items a second, 2.5x as many as directly one by one."
)
UNBATCHED = "Unbatched coroutines can run side by side, too: compare with that."
NO_GAIN = "Batching gains nothing here: an item takes 2.00 ms alone and no less in any batch."
NEVER_FASTER = (
    "Through batched, calls are never faster than directly one by one: at best 0.9x, 90 items a "
    "second with 1 caller."
)


@pytest.mark.parametrize(
    ("calls", "batches", "coroutine", "sentence"),
    [
        ({1: 90, 2: 250, 4: 240}, "FLAT", False, f"{LARGER}\n{FASTER}"),
        ({1: 90, 2: 250}, "FLAT", True, f"{LARGER}\n{FASTER} {UNBATCHED}"),
        ({1: 90, 2: 80}, "FLAT", True, NEVER_FASTER),
        ({1: 90, 2: 80}, "LINEAR", False, f"{NO_GAIN}\n{NEVER_FASTER}"),
    ],
)
def test_the_summary_states_the_gain(
    calls: dict[int, int], batches: str, coroutine: bool, sentence: str, functions: None
) -> None:
    from batched._commands.bench.command import Findings, summarize

    loads = [loaded(callers, number) for callers, number in calls.items()]
    alone = measuring.Timing(1, [0.01])
    measured = {"FLAT": FLAT, "LINEAR": LINEAR}[batches]
    found = Findings([alone], fit(measured), advise(measured), 8, loads)
    assert summarize(found, coroutine=coroutine) == sentence


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


@pytest.mark.parametrize(
    ("measured", "fixed", "per_item"),
    [(FIXED, 5.0, 0.1), (FLAT, 4.0, 1.0), (LINEAR, 0.0, 2.0), (times(of_1=3, of_64=3), 3.0, 0.0)],
)
def test_a_fit_finds_the_line_on_which_times_lie(
    measured: list[BatchTime], fixed: float, per_item: float
) -> None:
    found = fit(measured)
    assert found.fixed * 1e3 == pytest.approx(fixed, abs=1e-9)
    assert found.per_item * 1e3 == pytest.approx(per_item, abs=1e-9)
    assert found.off == pytest.approx(0, abs=1e-9)


def test_no_part_of_a_fit_is_below_zero() -> None:
    assert fit(WORSE).fixed == 0
    assert fit(WORSE).per_item * 1e3 == pytest.approx((1 + 2 / 3 + 1 / 2) / (1 + 4 / 9 + 1 / 4))
    falling = fit(times(of_1=4, of_2=2))
    assert falling.per_item == 0
    assert falling.fixed * 1e3 == pytest.approx((1 / 4 + 1 / 2) / (1 / 16 + 1 / 4))
    assert falling.off == pytest.approx(0.4)  # 2.4 ms instead of 4 ms


def test_a_fit_weighs_deviations_relative_to_the_times() -> None:
    assert fit(NOISY).off < 0.2
    # measured in milliseconds, the deviation at 57 ms would outweigh this time
    assert abs(fit(NOISY).at(1) * 1e3 - 10) < 1


@pytest.mark.parametrize(
    ("off", "sentence"),
    [
        (
            0.002,
            "A batch of n takes about 5.00 ms + 0.100 ms * n, within 1% of every measured time.",
        ),
        (
            0.31,
            (
                "A batch of n takes about 5.00 ms + 0.100 ms * n, but only roughly: it is within "
                "31% of every measured time."
            ),
        ),
    ],
)
def test_a_fit_states_its_largest_deviation(off: float, sentence: str) -> None:
    assert str(Fit(5e-3, 1e-4, off)) == sentence


@pytest.mark.parametrize(
    ("measured", "batch_size", "reason"),
    [
        (
            FIXED,
            64,
            (
                "In a batch of 64 an item takes 0.178 ms, alone 5.10 ms; larger batches may be "
                "better "
                "still: try --max-batch-size 256."
            ),
        ),
        (
            FLAT,
            32,
            LARGER,
        ),
        (
            SLOWER,
            8,
            (
                "In a batch of 8 an item takes 1.00 ms, alone 4.00 ms; in larger batches it "
                "takes longer again, 2.50 ms in one of 32."
            ),
        ),
        (
            NOISY,
            16,
            (
                "In a batch of 16 an item takes 1.75 ms, alone 10.0 ms; larger batches gain "
                "less than 10% more."
            ),
        ),
        (
            LINEAR,
            1,
            NO_GAIN,
        ),
        (
            WORSE,
            1,
            "Batching gains nothing here: an item takes 1.00 ms alone and no less in any batch.",
        ),
        (
            times(of_1=2, of_2=3.8, of_4=7.6),
            1,
            (
                "Batching gains nothing here: an item takes 2.00 ms alone and at best 1.90 ms in a "
                "batch, of 2."
            ),
        ),
    ],
    ids=["fixed", "flat", "slower", "noisy", "linear", "worse", "nearly linear"],
)
def test_the_smallest_size_that_is_nearly_the_best_is_recommended(
    measured: list[BatchTime], batch_size: int, reason: str
) -> None:
    assert (advise(measured).batch_size, advise(measured).reason) == (batch_size, reason)


@pytest.mark.parametrize(
    ("most", "numbers"),
    [(1, [1]), (2, [1, 2]), (48, [1, 2, 4, 8, 16, 32, 48]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_numbers_double_up_to_the_largest(most: int, numbers: list[int]) -> None:
    assert measuring.doublings(most) == numbers


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0"),
        (5e-3, "5.00"),
        (0.012345, "12.3"),
        (1.23456e-6, "0.00123"),
        (12.3456, "12,300"),
        (1e-12, "0.000000"),
    ],
)
def test_durations_are_shown_in_milliseconds_of_three_digits(seconds: float, shown: str) -> None:
    assert ms(seconds) == shown


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(26.64, "26.6x"), (1.0, "1.0x"), (0.97, "1.0x"), (0.9, "0.9x"), (0.0193, "0.019x")],
)
def test_multiples_are_shown_in_two_digits_or_more(ratio: float, shown: str) -> None:
    assert format_ratio(ratio) == shown
