"""Batches of features: padding, calls larger than a batch, and memory of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from batched.errors import BatchFunctionError
from feature_stage import Make, hidden, tokens


def test_features_as_long_as_tokens_are_rounded_up_with_them_and_images_are_not(
    together: Make,
) -> None:
    call = {
        "ids": numpy.ones((1, 5), int),
        "boxes": numpy.ones((1, 5, 4), numpy.int64),
        "weights": numpy.ones((1, 5), numpy.float32),
        "image": numpy.ones((1, 5, 4, 4), numpy.uint8),
    }
    one = together(pad_to_multiple_of=8, unpad=False)
    one.results(call)
    assert [array.shape[1] for array in one.seen[0].values()] == [8, 8, 8, 5]


def test_a_function_sees_multiples_only_but_for_one_run_to_learn_from(together: Make) -> None:
    two = together(lambda features: hidden(features, 8), pad_to_multiple_of=8)
    for _ in range(3):
        results = two.results(tokens(3), tokens(6))
        assert [result.shape for result in results] == [(1, 3, 8), (1, 6, 8)]
    shapes = [features["ids"].shape for features in two.seen]
    assert shapes == [(1, 3), (1, 8), (2, 8), (2, 8)]


def test_padded_token_ids_without_a_mask_are_warned_of_once(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    two = together(name="shop.embed")
    calls = [{"x": numpy.ones((1, n)), "words": numpy.ones((1, n), int)} for n in (2, 3)]
    two.results(calls[0], calls[0])
    assert not caplog.records
    for _ in range(2):
        two.results(*calls)
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("batched", "WARNING")
    assert warning.getMessage() == (
        "shop.embed: words is padded, and no mask among the features tells the function so: "
        "results may depend on the calls that share a batch. Pass one, such as attention_mask"
    )


@pytest.mark.parametrize(
    "mask",
    [
        {"attention_mask": numpy.ones((1, 3), int)},
        {"padding_mask": numpy.ones((1, 3), numpy.float32)},
        {"real": numpy.ones((1, 3), bool)},
        {"lengths": numpy.array([3])},
    ],
    ids=lambda mask: next(iter(mask)),
)
def test_a_mask_needs_no_warning(
    together: Make, mask: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    two = together(pad_to_multiple_of=8, unpad=False)
    two.results(*[{"ids": numpy.ones((1, 3), int), **mask}] * 2)
    assert two.seen[0]["ids"].shape == (2, 8)
    assert not caplog.records


def test_the_share_of_padding_is_counted(together: Make) -> None:
    two = together(unpad=False)
    two.results(tokens(2), tokens(4, 4, 4))
    assert two.fn.stats.padding_waste == 2 / 16
    one = together(pad_to_multiple_of=4, unpad=False)
    one.results(tokens(1, 3))  # with padding among its rows
    assert one.fn.stats.padding_waste == 4 / 8
    flat = together()
    flat.results({"x": numpy.ones(3)}, {"x": numpy.ones(1)})
    assert flat.fn.stats.padding_waste == 0.0


def test_a_budget_of_tokens_limits_rows_times_the_padded_length(together: Make) -> None:
    many = together(max_batch_tokens=16, pad_to_multiple_of=4, unpad=False)
    many.results(*[tokens(width) for width in (3, 4, 2, 3, 6, 7, 5, 30)])
    shapes = [batch["ids"].shape for batch in many.seen]
    assert sum(rows for rows, _ in shapes) == 8
    assert all(rows * width <= 16 or rows == 1 for rows, width in shapes), shapes
    assert (1, 32) in shapes, "a row larger than the budget runs alone"
    assert max(rows for rows, _ in shapes) > 1
    few = together(max_batch_tokens=8, length=lambda row: len(row["ids"]))
    few.results(*[tokens(4)] * 3)
    assert [len(batch["ids"]) for batch in few.seen] == [2, 1]


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda ids: {"a": ids} if len(ids) == 2 else {"b": ids}, "structure"),
        (lambda ids: numpy.zeros((len(ids), len(ids))), "joined"),
    ],
)
def test_parts_of_a_call_with_different_outputs_cannot_be_joined(
    together: Make, compute: Callable[[Any], Any], reason: str
) -> None:
    one = together(lambda features: compute(features["ids"]), batch_size=2, unpad=False)
    (answer,) = one.answers(tokens(2, 2, 2))
    assert type(answer) is BatchFunctionError
    assert reason in str(answer)


def test_a_split_call_gets_the_mask_of_a_masked_array(together: Make) -> None:
    one = together(lambda features: numpy.ma.masked_less(features["x"], 2), batch_size=2)
    (result,) = one.results({"x": numpy.arange(5)})
    assert result.tolist() == [None, None, 2, 3, 4]


def test_features_that_are_a_batch_are_passed_on_without_a_copy(
    together: Make, library: Any
) -> None:
    one = together()
    call = {"ids": library.ones((1, 2)), "scores": library.zeros((1, 5)), "n": library.ones(1)}
    one.fn(call)
    assert all(one.seen[0][name] is array for name, array in call.items())


def test_a_function_may_change_its_dict_of_features_and_runs_again_with_the_right_ones(
    together: Make, library: Any
) -> None:
    given: list[list[float]] = []

    def compute(features: dict[str, Any]) -> Any:
        assert sorted(features) == ["ids", "mask"]
        ids, features["more"] = features.pop("ids"), features["mask"]
        given.append(ids[:, 0].tolist())
        if 13 in given[-1]:
            raise ValueError("13 is bad")
        return ids * features["mask"]

    four = together(compute, isolate_errors=True)
    ones = library.ones((1, 2))
    calls: list[dict[str, Any]] = [{"ids": ones * n, "mask": ones} for n in (2, 13, 4, 5)]
    first, bad, *others = four.answers(*calls)
    assert isinstance(bad, ValueError)
    assert [each.tolist() for each in (first, *others)] == [[[n, n]] for n in (2, 4, 5)]
    assert given == [[2, 13, 4, 5], [2, 13], [4, 5], [2], [13]]
    assert [sorted(call) for call in calls] == [["ids", "mask"]] * 4, "they are the callers'"


@pytest.mark.parametrize("callers", [1, 2])
def test_a_caller_never_sees_memory_that_the_function_uses_again(
    together: Make, library: Any, callers: int
) -> None:
    buffer = library.zeros((callers, 5))

    def compute(features: dict[str, Any]) -> Any:
        buffer[:] = features["x"]
        return [buffer, buffer[:, 1:]]

    some = together(compute)
    rounds = [some.results(*[{"x": library.ones((1, 5)) * n}] * callers) for n in (1, 2)]
    buffer[:] = 7
    for n, results in enumerate(rounds, 1):
        for whole, part in results:
            assert {*whole[0].tolist(), *part[0].tolist()} == {n}


@pytest.mark.parametrize("callers", [1, 2])
def test_a_function_that_returns_its_features_gives_no_caller_memory_of_another(
    together: Make, library: Any, callers: int
) -> None:
    some = together(lambda features: {"one": features["x"], "same": features["x"]})
    calls = [{"x": library.ones((1, 2))} for _ in range(callers)]
    results = some.results(*calls)
    for call in calls:
        call["x"][:] = 7
    for result in results:
        result["one"][:] = 8
    assert [result["same"].tolist() for result in results] == [[[1, 1]]] * callers
    assert [call["x"].tolist() for call in calls] == [[[7, 7]]] * callers


@pytest.mark.parametrize("batch_size", [2, 32])
def test_results_own_their_memory(together: Make, library: Any, batch_size: int) -> None:
    def compute(features: dict[str, Any]) -> Any:
        ids = features["ids"]
        return [
            ids * 2,
            *library.stack([ids, ids]),
            (ids[:, :, None] * library.ones(5)).swapaxes(1, 2),
            library.broadcast_to(ids[:, :1], (len(ids), 7)),
            ids.sum(1),
        ]

    two = together(compute, batch_size=batch_size, pad_token={"ids": 0})
    for result in two.results({"ids": library.ones((3, 2))}, {"ids": library.ones((1, 4))}):
        for array in result:
            if hasattr(array, "untyped_storage"):
                assert array.untyped_storage().nbytes() == array.nbytes
            else:
                assert array.base is None
                assert array.flags.writeable
