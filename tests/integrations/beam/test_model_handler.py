"""RunInference with the model handler, on Beam's direct runner in this process."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import batched
import batched.errors
import batched.inference

pytest.importorskip("apache_beam")

import apache_beam as beam
from apache_beam.internal import pickler
from apache_beam.ml.inference import base
from apache_beam.options.pipeline_options import PipelineOptions

from batched.beam import FailedPrediction, ModelHandler
from beam_pipelines import RUNNER, SEEN, record, run
from pages import ROOT, blocks


def invert(numbers: list[int]) -> list[float]:
    record("calls", numbers)
    return [1 / number for number in numbers]


@pytest.mark.parametrize("timeout", [None, 50])
def test_one_bad_row_in_64_is_one_dead_letter(timeout: int | None) -> None:
    handler = ModelHandler(batched.dynamically(batch_size=64)(invert))
    outcome = run(handler, range(64), timeout=timeout)
    found = {result.example: result.inference for result in outcome.results}
    assert found == {number: 1 / number for number in range(1, 64)}
    ((letter,),) = outcome.failed_after
    failed, (kind, _, lines) = letter
    assert (failed.example, kind) == (0, ZeroDivisionError)
    assert "return [1 / number for number in numbers]" in "".join(lines)
    assert outcome.failed_batches == []
    assert outcome.counters["num_inferences"] == 64
    assert outcome.counters["failed_elements_counter"] == 1
    assert sorted(SEEN["calls"][0]) == [*range(64)]
    assert len(SEEN["calls"]) == 13  # the batch, then two halves of each batch that failed


def test_without_exception_handling_a_bad_row_ends_the_pipeline() -> None:
    pipeline = beam.Pipeline(RUNNER, PipelineOptions([]))
    pipeline | beam.Create([1, 0]) | base.RunInference(ModelHandler(invert))
    with pytest.raises(Exception, match="division by zero"):
        pipeline.run()


class OddError(Exception):
    """Error that pickle can write but not read."""

    def __init__(self, number: int, parity: str) -> None:
        super().__init__(f"{number} is {parity}")


async def refuse_5(numbers: list[int]) -> list[int]:
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


def test_dead_letters_of_one_error_have_a_traceback_each() -> None:
    error, texts = ValueError("of all"), set()
    for number in range(9):
        with pytest.raises(ValueError, match="of all") as raised:
            _ = FailedPrediction(number, error).inference
        texts.add("".join(traceback.format_exception(raised.value)))
    assert len(texts) == 1


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


MAIN = """
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

for fn in (decorated, Kind, lambda items: plain(items)):
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
    assert sizes == [5, 32, 32]


def test_arguments_of_the_function_are_given_to_the_handler() -> None:
    with pytest.raises(ValueError, match="are given to the handler, as args= and"):
        ModelHandler(invert).validate_inference_args({"k": 5})


class Divider:
    def __init__(self, dividend: int) -> None:
        self._dividend = dividend

    def __call__(self, numbers: list[int]) -> list[float]:
        return [self._dividend / number for number in numbers]


@pytest.mark.parametrize("per_key", [False, True])
def test_one_bad_element_with_a_key_fails_alone(per_key: bool) -> None:
    models = [
        base.KeyModelMapping([key], ModelHandler(Divider, args=(dividend,)))
        for key, dividend in (("one", 1), ("two", 2))
    ]
    handler = base.KeyedModelHandler(models if per_key else ModelHandler(invert))
    elements = [(key, number) for number in range(16) for key in ("one", "two")]
    outcome = run(handler, elements)
    assert outcome.failed_batches == []
    assert len(outcome.results) == 32
    for key, result in outcome.results:
        if result.example:
            assert result.inference == (2 if per_key and key == "two" else 1) / result.example
        else:
            with pytest.raises(ZeroDivisionError):
                _ = result.inference


@pytest.mark.parametrize("keyed", [False, True])
def test_keys_may_be_left_out(keyed: bool) -> None:
    elements = [("a", 0), ("b", 2)] if keyed else [0, 2]
    outcome = run(base.MaybeKeyedModelHandler(ModelHandler(invert)), elements)
    (result,) = outcome.results
    assert (result[1].inference if keyed else result.inference) == 0.5
    assert len(outcome.failed_after[0]) == 1


def halve(result: Any) -> float:
    if result.inference == 1:
        raise ValueError("one")
    half: float = result.inference / 2
    return half


def test_functions_before_and_after_inference_have_dead_letters_of_their_own() -> None:
    handler = ModelHandler(invert).with_preprocess_fn(int).with_postprocess_fn(halve)
    outcome = run(handler, ["2", "1", "0", "none"])
    assert outcome.results == [0.25]
    ((before,),) = outcome.failed_before
    (function,), (after,) = outcome.failed_after
    assert (before[0], before[1][0]) == ("none", ValueError)
    assert (function[0].example, function[1][0]) == (0, ZeroDivisionError)
    assert (after[0].example, after[1][0]) == (1, ValueError)


def test_elements_may_be_batches_already() -> None:
    outcome = run(ModelHandler(invert).with_no_batching(), [[1, 0], [2]])
    assert sorted(result.inference for result in outcome.results) == [0.5, 1.0]
    assert [failed.example for failed, _ in outcome.failed_after[0]] == [0]


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _, example in blocks((ROOT / "docs/beam.md").read_text(), "python"):
        exec(compile(example, "page", "exec", dont_inherit=True), {"__name__": "page"})
        printed.append(sorted(capsys.readouterr().out.splitlines()))
    german = "('de', {'caption': 'German: gut', 'score': 0.5})"
    english = "('us', {'caption': 'English: good', 'score': 0.5})"
    assert printed == [["good [4.0, 1.0]", "not so good [11.0, 1.0]"], [german, english]]
