"""Predictor and BatchPredictor: each row has its own outcome, by the rules of runs, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import batched
from batched import offline
from batched.errors import RunStopped, SourceError
from batched.offline.predictor import Predictor
from offline_steps import Counted
from stage import python

AT_ONCE = offline.Retry(wait_initial=0, wait_jitter=0)
BAD = repr(ValueError("bad row"))


def outcomes(predictor: Predictor, numbers: Sequence[int]) -> list[Any]:
    """Return the results for numbers, with errors as text."""
    results = predictor.rows([{"n": number} for number in numbers])
    return [repr(each) if isinstance(each, BaseException) else each for each in results]


def predictor(fn: Callable[..., Any], **settings: Any) -> Predictor:
    return Predictor(offline.Step(fn, input="n", output="m", **settings))


def of_batches(fn: Callable[..., Any], **settings: Any) -> offline.BatchPredictor:
    return offline.BatchPredictor(fn, **{"input": "n", "output": "m", **settings})


def test_the_size_that_memory_allows_is_remembered_from_call_to_call() -> None:
    fn = Counted(most=16)
    ready = predictor(fn, batch_size=64)
    assert outcomes(ready, range(64)) == [2 * n for n in range(64)]
    assert fn.sizes[0] == 64
    fn.calls.clear()
    assert outcomes(ready, range(64)) == [2 * n for n in range(64)]
    assert fn.sizes == [16] * 4


def test_a_preprocess_that_never_works_ends_the_job() -> None:
    def invert(number: int) -> float:
        return 1 / (number % 10)

    some = outcomes(predictor(lambda items: items, preprocess=invert), range(5000))
    assert sum("ZeroDivisionError" in str(each) for each in some) == 500
    ready = predictor(Counted(), preprocess=lambda _: 1 / 0)
    with pytest.raises(RunStopped, match="no result for any of the last rows.*division by zero"):
        for _ in range(10):
            outcomes(ready, range(100))


def test_a_class_is_built_once_and_when_the_predictor_is() -> None:
    built: list[str] = []

    class Scale:
        def __init__(self, factor: str) -> None:
            built.append(factor)
            self.factor = int(factor)

        def __call__(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

    ready = predictor(Scale, args=("3",))
    assert built == ["3"]
    assert [outcomes(ready, [1, 2]) for _ in range(2)] == [[3, 6], [3, 6]]
    assert built == ["3"]
    with pytest.raises(ValueError, match="invalid literal"):
        predictor(Scale, args=("three",))


def test_rows_that_a_service_fails_for_are_told_apart_while_it_answers_other_rows() -> None:
    ready = predictor(Counted([5], ConnectionError), retry=AT_ONCE, batch_size=4)
    bad = repr(ConnectionError("bad row"))
    assert outcomes(ready, range(8)) == [0, 2, 4, 6, 8, bad, 12, 14]


def test_a_broken_function_is_so_until_a_batch_succeeds() -> None:
    fn = Counted(bad=range(1000))
    ready = predictor(fn, batch_size=4)
    assert [outcomes(ready, [n]) for n in range(15)] == [[BAD]] * 15
    for _ in range(3):
        with pytest.raises(RunStopped, match=r"never succeeded, in 1\d rows.*bad row"):
            outcomes(ready, [7])
    fn.bad.clear()
    assert outcomes(ready, [7]) == [14]
    fn.bad.add(8)
    assert outcomes(ready, [8]) == [BAD]


def test_a_function_that_still_works_is_not_called_broken() -> None:
    fn = Counted(bad=range(4, 1000))
    ready = predictor(fn, batch_size=4, retry=AT_ONCE)
    assert outcomes(ready, range(100)) == [0, 2, 4, 6, *[BAD] * 96]
    fn.bad.update(range(4))  # now it is broken, for good
    with pytest.raises(RunStopped):
        outcomes(ready, range(100))
    fn.bad.clear()  # the next call is served
    assert outcomes(ready, [7]) == [14]


@pytest.mark.parametrize("setting", [{"workers": 2}, {"processes": True}, {"num_gpus": 1}])
def test_settings_that_only_runs_can_follow_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))} is for runs"):
        predictor(Counted(), **setting)


def as_numpy(columns: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: np.array(values) for name, values in columns.items()}


def as_pandas(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


def as_lists(batch: Any, *names: str) -> dict[str, list[Any]]:
    return {name: batch[name].tolist() for name in names or list(batch)}


FORMATS = pytest.mark.parametrize("make", [as_numpy, as_pandas])


@FORMATS
def test_a_batch_comes_back_as_it_came_with_columns_added(make: Callable[..., Any]) -> None:
    batch = make({"n": [3, 1, 2], "text": ["c", "a", "b"]})
    result = of_batches(Counted(bad=[1]))(batch)
    assert type(result) is type(batch)
    assert list(result) == ["n", "text", "m", "_status", "_error"]
    assert as_lists(result) == {
        "n": [3, 1, 2],
        "text": ["c", "a", "b"],
        "m": [6, None, 4],
        "_status": ["ok", "failed", "ok"],
        "_error": ["", "ValueError: bad row", ""],
    }


def test_failed_rows_of_one_operator_are_passed_on_by_the_next() -> None:
    fn = Counted(bad=[4])
    first = of_batches(Counted(bad=[1]), output="n")({"n": np.arange(4)})
    assert as_lists(of_batches(fn)(first), "m", "_status", "_error") == {
        "m": [0, None, None, 12],
        "_status": ["ok", "failed", "failed", "ok"],
        "_error": ["", *["ValueError: bad row"] * 2, ""],
    }
    assert all(None not in items for items in fn.calls)


def test_several_outputs_are_columns_and_a_result_that_does_not_fit_is_a_failure() -> None:
    def split(items: list[int]) -> list[dict[str, int]]:
        return [{"a": n, "b": -n} if n != 1 else {"a": n} for n in items]

    result = of_batches(split, output=["a", "b"])({"n": np.arange(3)})
    assert as_lists(result, "a", "b") == {"a": [0, None, 2], "b": [0, None, -2]}
    assert "a dict with 'a', 'b'" in result["_error"][1]


def vectors(items: list[int]) -> list[Any]:
    if min(items) < 0:
        raise ValueError("bad row")
    return [np.full(3, n, "f4") for n in items]


@FORMATS
def test_arrays_of_one_shape_are_one_array_and_failed_rows_nan(make: Callable[..., Any]) -> None:
    predict = of_batches(vectors)
    for numbers in ([1, -1], [-1, -1]):  # in the second batch nothing tells the shape
        column = np.stack(predict(make({"n": numbers}))["m"])
        assert column.dtype == np.float32
        np.testing.assert_array_equal(column, [[n if n > 0 else np.nan] * 3 for n in numbers])


def test_arrays_of_several_shapes_stay_apart() -> None:
    def ragged(items: list[int]) -> list[Any]:
        if -1 in items:
            raise ValueError("bad row")
        return [np.arange(n) for n in items]

    first, failed, last = of_batches(ragged)({"n": np.array([1, -1, 2])})["m"]
    assert (first.tolist(), failed, last.tolist()) == ([0], None, [0, 1])


def test_tensors_come_as_arrays_and_other_values_as_values_of_python() -> None:
    got: list[Any] = []

    def note(rows: list[dict[str, Any]]) -> list[int]:
        got.extend(rows)
        return [0] * len(rows)

    batch = {"image": np.zeros((1, 2, 2)), "n": np.array([1]), "text": np.array(["a"], "O")}
    of_batches(note, input=["image", "n", "text"])(batch)
    (row,) = got
    assert row["image"].shape == (2, 2)
    assert [type(row["n"]), type(row["text"])] == [int, str]


def test_a_batch_is_called_whole_unless_a_size_is_given() -> None:
    def sizes(decorate: Any = lambda fn: fn, **settings: Any) -> list[int]:
        fn = Counted()
        of_batches(decorate(fn.__call__), **settings)({"n": np.arange(100)})
        return fn.sizes

    assert sizes() == [100]
    assert sizes(batched.dynamically(batch_size=64)) == [64, 36]
    assert sizes(batch_size=64) == [64, 36]
    assert sizes(length=lambda n: 2, max_batch_tokens=100) == [50, 50]


def test_a_wrong_batch_is_refused_with_a_sentence() -> None:
    predict = of_batches(Counted())
    with pytest.raises(SourceError, match="the batch has no column 'n'; its columns are 'N'"):
        predict({"N": np.arange(3)})
    with pytest.raises(TypeError, match=r"a batch must be a dict .*, got a list"):
        predict([1, 2])


def test_ray_is_imported_by_nobody_who_does_not_use_it() -> None:
    done = python(
        """
        import sys
        from batched import offline
        offline.BatchPredictor(lambda rows: rows, input="n", output="m")({"n": [1]})
        assert not {"ray", "pandas"} & set(sys.modules)
        """
    )
    assert not done.returncode, done.stderr
