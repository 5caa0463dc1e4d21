"""RunInference with a ModelHandler of ours, on Beam's direct runner in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import batched
import batched.errors
import batched.inference

pytest.importorskip("apache_beam")

import apache_beam as beam
from apache_beam.internal import pickler
from apache_beam.ml.inference.base import RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from batched.beam import ModelHandler
from batched.offline import Retry

RUNNER = "FnApiRunner"  # what the direct runner runs batches with, if nothing else is installed

SEEN: defaultdict[str, list[Any]] = defaultdict(list)
"""What functions of this module were given. Those that pipelines hold are found by their names."""


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def infer(
    handler: ModelHandler, items: Iterable[Any], threads: int = 1
) -> tuple[dict[Any, Any], list[Any], list[Any]]:
    """Results by item, dead letters of single items, and those of batches."""
    flags = [f"--direct_num_workers={threads}", "--direct_running_mode=multi_threading"]
    with beam.Pipeline(RUNNER, PipelineOptions(flags)) as pipeline:
        rows = pipeline | beam.Create(list(items), reshuffle=threads > 1)
        results, dead = rows | RunInference(handler).with_exception_handling()
        (of_items,) = dead.failed_postprocessing
        for name, rows in (("good", results), ("items", of_items), ("all", dead.failed_inferences)):
            rows | f"keep {name}" >> beam.Map(partial(keep, name))
    return {each.example: each.inference for each in SEEN["good"]}, SEEN["items"], SEEN["all"]


def keep(name: str, value: Any) -> None:
    SEEN[name].append(value)


def invert(numbers: list[int]) -> list[float]:
    keep("calls", numbers)
    return [1 / number for number in numbers]


async def invert_later(numbers: list[int]) -> list[float]:
    await asyncio.sleep(0)
    return invert(numbers)


class Inverter:
    def __init__(self, dividend: int) -> None:
        keep("built", threading.get_ident())
        self._dividend = dividend

    def __call__(self, numbers: list[int]) -> list[float]:
        keep("callers", threading.get_ident())
        return [each * self._dividend for each in invert(numbers)]


FORMS: dict[str, Callable[[], ModelHandler]] = {
    "plain": lambda: ModelHandler(invert, batch_size=64),
    "coroutine": lambda: ModelHandler(invert_later, batch_size=64),
    "decorated": lambda: ModelHandler(batched.dynamically(batch_size=64)(invert)),
    "class": lambda: ModelHandler(Inverter, args=(1,), batch_size=64),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_bad_row_in_64_is_one_dead_letter(form: str) -> None:
    results, (letter,), batches = infer(FORMS[form](), range(64))
    assert results == {number: 1 / number for number in range(1, 64)}
    failed, (kind, text, lines) = letter
    assert (failed.example, repr(failed.inference)) == (0, "<ZeroDivisionError: division by zero>")
    assert (kind, text) == (ZeroDivisionError, "ZeroDivisionError('division by zero')")
    assert "return [1 / number for number in numbers]" in "".join(lines)
    assert batches == []
    assert sorted(SEEN["calls"][0]) == [*range(64)]
    assert len(SEEN["calls"]) == 13  # it, and two halves of each that failed


def test_without_exception_handling_a_bad_row_ends_the_pipeline() -> None:
    pipeline = beam.Pipeline(RUNNER, PipelineOptions([]))
    pipeline | beam.Create([1, 0]) | RunInference(ModelHandler(invert))
    with pytest.raises(Exception, match="division by zero"):
        pipeline.run()


def test_what_fails_before_or_after_the_function_is_a_dead_letter_too() -> None:
    handler = ModelHandler(invert, preprocess=int, postprocess=lambda share: 1 // (share < 1))
    results, letters, _ = infer(handler, ["2", "1", "one"])
    assert results == {"2": 1}
    assert {failed.example: kind for failed, (kind, _, _) in letters} == {
        "1": ZeroDivisionError,
        "one": ValueError,
    }


def copy_at_most_8(items: list[int]) -> list[int]:
    if len(items) > 8:
        raise MemoryError
    keep("calls", items)
    return items


def test_a_batch_that_memory_does_not_suffice_for_is_run_in_parts() -> None:
    handler = ModelHandler(copy_at_most_8, batch_size=32)
    results, letters, batches = infer(handler, range(64))
    assert (results, letters, batches) == ({item: item for item in range(64)}, [], [])
    assert {len(call) for call in SEEN["calls"]} == {8}


def test_items_of_like_length_run_together() -> None:
    texts = ["x" * (7 * number % 64 + 1) for number in range(64)]
    infer(ModelHandler(count, batch_size=8, length=len), texts)
    spans = sorted((min(call), max(call)) for call in SEEN["calls"])
    assert spans == [(first, first + 7) for first in range(1, 65, 8)]


def count(texts: list[str]) -> list[int]:
    keep("calls", [len(text) for text in texts])
    return [len(text) for text in texts]


def test_a_class_is_built_once_per_process() -> None:
    infer(ModelHandler(Inverter, args=(2,), batch_size=4), range(1, 65), threads=2)
    assert len(SEEN["built"]) == 1
    assert len(set(SEEN["callers"])) == 2


class OddError(Exception):
    """One that pickle writes and cannot read."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"{number} is {what}")


def refuse_5(numbers: list[int]) -> list[int]:
    if 5 in numbers:
        raise OddError(5, "odd")
    return numbers


def test_any_error_comes_from_a_model_that_processes_share() -> None:
    results, (letter,), batches = infer(ModelHandler(refuse_5, large_model=True), range(8))
    assert (len(results), batches) == (7, [])
    failed, (_, text, _) = letter
    assert (failed.example, text) == (5, "RemoteError('OddError: 5 is odd')")


def test_a_function_that_is_broken_is_told_from_rows_that_are_bad() -> None:
    handler = ModelHandler(refuse, batch_size=4, length=abs)
    results, letters, ((batch, error),) = infer(handler, range(64))
    assert (results, letters, sorted(batch)) == ({}, [], [*range(64)])
    assert error[0] is batched.errors.RunStopped


def test_a_broken_function_soon_fails_for_all_batches() -> None:
    _, letters, batches = infer(ModelHandler(refuse, batch_size=4), range(200))
    assert len(letters) < 8 * 4
    assert len(letters) + sum(len(batch) for batch, _ in batches) == 200
    assert {error[0] for _, error in batches} == {batched.errors.RunStopped}


def refuse(numbers: list[int]) -> list[int]:
    raise ValueError("no weights")


def fail_as_a_service(numbers: list[int]) -> list[int]:
    raise ConnectionError("down")


def test_dead_letters_of_one_error_have_a_traceback_each() -> None:
    handler = ModelHandler(fail_as_a_service, retry=Retry(attempts=1))
    _, letters, _ = infer(handler, range(32))
    assert len(letters) == 32
    assert len({"".join(lines) for _, (_, _, lines) in letters}) == 1


def double(features: dict[str, Any]) -> Any:
    return features["ids"] * 2


def test_elements_of_several_features_are_padded_to_batches() -> None:
    decorated = batched.inference.dynamically(double)
    items = [{"ids": list(range(length))} for length in (1, 3, 2)]
    handler = ModelHandler(decorated)
    results = list(handler.run_inference(items, handler.load_model()))
    assert [each.inference.tolist() for each in results] == [[0], [0, 2, 4], [0, 2]]


MAIN = """
import sys
import batched
from apache_beam.internal import pickler
from batched.beam import ModelHandler

def plain(items):
    return [item + 1 for item in items]

@batched.dynamically(batch_size=5)
def decorated(items):
    return plain(items)

class Kind:
    def __call__(self, items):
        return plain(items)

    @batched.dynamically
    def method(self, items):
        return plain(items)

for fn in (plain, decorated, Kind, Kind().method, lambda items: plain(items)):
    print(pickler.dumps(ModelHandler(fn, preprocess=lambda item: item * 2)).decode())
"""


def test_handlers_of_a_script_go_to_other_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MAIN)
    printed = subprocess.run([sys.executable, script], capture_output=True, check=True).stdout
    handlers = [pickler.loads(line) for line in printed.splitlines()]
    for handler in handlers:
        results = handler.run_inference([1, 2], handler.load_model())
        assert [each.inference for each in results] == [3, 5]
    assert [each.batch_elements_kwargs()["max_batch_size"] for each in handlers] == [
        32, 5, 32, 32, 32,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ModelHandler(invert, batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: ModelHandler(invert, args=(1,)), "too many positional arguments"),
        (
            lambda: ModelHandler(invert, large_model=1),  # type: ignore[arg-type]
            "large_model must be True or False, got 1",
        ),
        (lambda: ModelHandler(invert, model_copies=0), "model_copies must be at least 1, got 0"),
        (
            lambda: ModelHandler(invert, max_batch_duration_secs=0),
            "max_batch_duration_secs must be at least 1, got 0",
        ),
        (
            lambda: ModelHandler(invert, env_vars={"A": 1}),  # type: ignore[dict-item]
            "env_vars must be a dict of strings, got {'A': 1}",
        ),
        (
            lambda: ModelHandler(invert).validate_inference_args({"k": 5}),
            "are given to the handler, as args= and kwargs=",
        ),
        (
            lambda: ModelHandler(invert).update_model_path("new"),
            "this handler has no model path, and RunInference got 'new'",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()
