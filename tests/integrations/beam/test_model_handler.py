"""RunInference with the model handler, on Beam's direct runner in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
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
from beam_pipelines import RUNNER, SEEN, Outcome, record, run


def values(outcome: Outcome) -> dict[Any, Any]:
    """Return the inferences by element."""
    return {result.example: result.inference for result in outcome.results}


def invert(numbers: list[int]) -> list[float]:
    record("calls", numbers)
    return [1 / number for number in numbers]


async def invert_later(numbers: list[int]) -> list[float]:
    await asyncio.sleep(0)
    return invert(numbers)


class Inverter:
    def __init__(self, dividend: int) -> None:
        record("built", threading.get_ident())
        self._dividend = dividend

    def __call__(self, numbers: list[int]) -> list[float]:
        return [share * self._dividend for share in invert(numbers)]


FORMS: dict[str, Callable[[], ModelHandler]] = {
    "coroutine": lambda: ModelHandler(invert_later, batch_size=64),
    "decorated": lambda: ModelHandler(batched.dynamically(batch_size=64)(invert)),
    "class": lambda: ModelHandler(Inverter, args=(1,), batch_size=64),
}


@pytest.mark.parametrize(
    ("form", "timeout"), [*((form, None) for form in FORMS), ("decorated", 50)]
)
def test_one_bad_row_in_64_is_one_dead_letter(form: str, timeout: int | None) -> None:
    outcome = run(FORMS[form](), range(64), timeout=timeout)
    assert values(outcome) == {number: 1 / number for number in range(1, 64)}
    ((letter,),) = outcome.failed_after
    failed, (kind, text, lines) = letter
    assert (failed.example, kind, text) == (
        0,
        ZeroDivisionError,
        "ZeroDivisionError('division by zero')",
    )
    assert "return [1 / number for number in numbers]" in "".join(lines)
    assert outcome.failed_batches == []
    assert outcome.counters["num_inferences"] == 64
    assert outcome.counters["failed_elements_counter"] == 1
    assert sorted(SEEN["calls"][0]) == [*range(64)]
    assert len(SEEN["calls"]) == 13  # the batch, then two halves of each batch that failed


def test_without_exception_handling_a_bad_row_ends_the_pipeline() -> None:
    pipeline = beam.Pipeline(RUNNER, PipelineOptions([]))
    pipeline | beam.Create([1, 0]) | RunInference(ModelHandler(invert))
    with pytest.raises(Exception, match="division by zero"):
        pipeline.run()


def test_items_of_like_length_run_together() -> None:
    texts = ["x" * (7 * number % 64 + 1) for number in range(64)]
    SEEN.clear()
    handler = ModelHandler(count, batch_size=8, length=len)
    # a pipeline would cut its elements into batches by the time that they take
    assert len(list(handler.run_inference(texts, handler.load_model()))) == 64
    # a batch is cut short where past times say that its padding costs more than another batch
    assert all(max(call) - min(call) < 8 for call in SEEN["calls"])


def count(texts: list[str]) -> list[int]:
    record("calls", [len(text) for text in texts])
    return [len(text) for text in texts]


def test_a_class_is_built_once_per_process() -> None:
    run(ModelHandler(Inverter, args=(2,), batch_size=4), range(1, 65), threads=2)
    assert len(SEEN["built"]) == 1


class OddError(Exception):
    """Error that pickle can write but not read."""

    def __init__(self, number: int, parity: str) -> None:
        super().__init__(f"{number} is {parity}")


def refuse_5(numbers: list[int]) -> list[int]:
    if 5 in numbers:
        raise OddError(5, "odd")
    return numbers


def test_any_error_comes_from_a_model_that_processes_share() -> None:
    outcome = run(ModelHandler(refuse_5, large_model=True), range(8))
    assert (len(outcome.results), outcome.failed_batches) == (7, [])
    (((failed, (_, text, _)),),) = outcome.failed_after
    assert (failed.example, text) == (5, "RemoteError('OddError: 5 is odd')")


def refuse(numbers: list[int]) -> list[int]:
    raise ValueError("no weights")


def test_a_broken_function_soon_fails_for_all_batches() -> None:
    outcome = run(ModelHandler(refuse, batch_size=4), range(200))
    (letters,) = outcome.failed_after
    assert len(letters) < 8 * 4
    assert len(letters) + sum(len(batch) for batch, _ in outcome.failed_batches) == 200
    assert {error[0] for _, error in outcome.failed_batches} == {batched.errors.RunStopped}
    assert outcome.counters["failed_batches_counter"] == len(outcome.failed_batches)
    assert outcome.counters["failed_elements_counter"] == len(letters)


def fail_as_a_service(numbers: list[int]) -> list[int]:
    raise ConnectionError("down")


def test_a_service_that_is_away_fails_for_the_batch_after_the_time_that_is_given() -> None:
    handler = ModelHandler(fail_as_a_service, retry=Retry(attempts=1), outage_s=0)
    outcome = run(handler, range(4))
    assert {error[0] for _, error in outcome.failed_batches} == {batched.errors.RunStopped}
    assert sorted(number for batch, _ in outcome.failed_batches for number in batch) == [*range(4)]


def refuse_all_but_zero(items: list[int]) -> list[int]:
    if any(items):
        fail_as_a_service(items)
    return items


def test_dead_letters_of_one_error_have_a_traceback_each() -> None:
    handler = ModelHandler(refuse_all_but_zero, retry=Retry(attempts=1))
    model = handler.load_model()
    handler.run_inference([0], model)  # so the service is known to answer
    texts = []
    for failed in handler.run_inference([*range(1, 32)], model):
        with pytest.raises(ConnectionError) as raised:
            _ = failed.inference
        texts.append("".join(traceback.format_exception(raised.value)))
    assert len(texts) == 31
    assert len({*texts}) == 1


def double(features: dict[str, Any]) -> Any:
    return features["ids"] * 2


def test_elements_of_several_features_are_padded_to_batches() -> None:
    decorated = batched.inference.dynamically(double)
    items = [{"ids": list(range(length))} for length in (1, 3, 2)]
    handler = ModelHandler(decorated)
    results = handler.run_inference(items, handler.load_model())
    assert [result.inference.tolist() for result in results] == [[0], [0, 2, 4], [0, 2]]


def test_the_size_of_a_batch_is_estimated_without_pickling() -> None:
    import numpy

    array = numpy.zeros(1000)
    size_of = ModelHandler(invert).get_num_bytes
    assert size_of([array, {"ids": array}]) == 2 * array.nbytes
    assert size_of([lambda: "not picklable", [1] * 100]) > 800


def test_an_update_of_the_model_is_refused_by_its_name() -> None:
    handler: Any = ModelHandler(invert, batch_size=2)
    outcome = run(handler.with_preprocess_fn(int), range(6), update="v2")
    assert outcome.results == []
    assert sorted(len(batch) for batch, _ in outcome.failed_batches) == [2, 2, 2]
    for _, (_, text, _) in outcome.failed_batches:
        assert "got an update of the model to 'v2'" in text
        assert "models are not updated in a running pipeline" in text


GATE = threading.Event()


def wait_for_the_gate(items: list[int]) -> list[int]:
    assert GATE.wait(60)
    return items


def test_a_batch_that_exceeds_the_time_limit_is_a_dead_letter() -> None:
    try:
        outcome = run(ModelHandler(wait_for_the_gate, batch_size=4), range(4), timeout=1)
    finally:
        GATE.set()
    ((batch, error),) = outcome.failed_batches
    assert (outcome.results, sorted(batch), error[0]) == ([], [0, 1, 2, 3], TimeoutError)


MAIN = """
import batched
from apache_beam.internal import pickler
from batched.beam import ModelHandler

def plain(items):
    return [item + 1 for item in items]

@batched.dynamically(batch_size=5)
def decorated(items):
    return plain(items)

def make():
    @batched.dynamically(batch_size=6)
    def nested(items):
        return plain(items)
    return nested

class Kind:
    def __call__(self, items):
        return plain(items)

for fn in (decorated, make(), Kind, lambda items: plain(items)):
    print(pickler.dumps(ModelHandler(fn, preprocess=lambda item: item * 2)).decode())
"""


def test_handlers_of_a_script_go_to_other_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MAIN)
    printed = subprocess.run([sys.executable, script], capture_output=True, check=True).stdout
    handlers = [pickler.loads(line) for line in printed.splitlines()]
    for handler in handlers:
        results = handler.run_inference([1, 2], handler.load_model())
        assert [result.inference for result in results] == [3, 5]
    sizes = [handler.batch_elements_kwargs()["max_batch_size"] for handler in handlers]
    assert sizes == [5, 6, 32, 32]


def test_a_wrong_setting_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ModelHandler(invert, batch_size=0)
    with pytest.raises(TypeError, match="too many positional arguments"):
        ModelHandler(invert, args=(1,))
    with pytest.raises((TypeError, ValueError), match="are given to the handler, as args= and"):
        ModelHandler(invert).validate_inference_args({"k": 5})
