"""Axes of outputs that follow the rows of a feature, learned from several runs or declared."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from batched.errors import BatchFunctionError, BatchSizeMismatch
from feature_stage import Make, hidden, tokens
from stage import wait_until

pytestmark = pytest.mark.once

Function = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize("side", ["right", "left"])
def test_outputs_per_token_are_as_long_as_the_callers_own_rows(together: Make, side: str) -> None:
    three = together(lambda features: features["ids"] * 10, padding_side=side)
    last = [[70, 0, 0] if side == "right" else [0, 0, 70], [80, 90, 100]]
    for _ in range(2):
        results = three.results(tokens(2), tokens(4, first=3), tokens(1, 3, first=7))
        assert [result.tolist() for result in results] == [[[10, 20]], [[30, 40, 50, 60]], last]
    assert three.seen[-1]["ids"][0].tolist() == ([1, 2, 0, 0] if side == "right" else [0, 0, 1, 2])


@pytest.mark.parametrize(
    ("compute", "shapes"),
    [
        (hidden, [(1, 3, 5), (1, 5, 5)]),
        (lambda features: hidden(features).swapaxes(1, 2), [(1, 5, 3), (1, 5, 5)]),
        (lambda features: hidden(features).sum(1), [(1, 5), (1, 5)]),
    ],
)
def test_a_size_equal_to_the_padded_length_by_chance_is_not_cut(
    together: Make, compute: Function, shapes: list[Any]
) -> None:
    assert [result.shape for result in together(compute).results(tokens(3), tokens(5))] == shapes


def test_a_first_batch_runs_in_two_parts_and_later_ones_run_whole(together: Make) -> None:
    many = together(lambda features: {"hidden": hidden(features), "ids": features["ids"]})
    source = numpy.random.default_rng(0)
    for _ in range(20):
        widths = source.permutation(40)[:4] + 1
        results = many.results(*map(tokens, widths))
        assert [result["hidden"].shape for result in results] == [(1, width, 5) for width in widths]
    assert [len(batch["ids"]) for batch in many.seen] == [1, 3, *[4] * 19]


def test_evidence_of_one_kind_of_call_does_not_count_for_another(together: Make) -> None:
    two = together(lambda features, size=1: hidden(features, size))
    for size in (1, 5, 1, 5):
        results = two.results(tokens(3), tokens(5), extra=({"size": size},) * 2)
        assert [result.shape for result in results] == [(1, 3, size), (1, 5, size)]
    assert len(two.seen) == 6, "a batch for each size ran in parts"


@pytest.mark.usefixtures("uncollected")
def test_a_failure_for_short_rows_reaches_their_callers_only_and_leaves_no_garbage(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if features["ids"].shape[1] < 3:
            raise RuntimeError("too short")
        return hidden(features)

    two = together(compute)
    calls = [{"ids": numpy.ones((2, width), int)} for width in (1, 4, 2)]
    refs = [weakref.ref(call["ids"]) for call in calls]
    kinds = [str(getattr(answer, "shape", answer)) for answer in two.answers(*calls)]
    assert kinds == ["too short", "(2, 4, 5)", "too short"]
    two.seen.clear()
    del calls
    wait_until(lambda: not any(ref() is not None for ref in refs))


def per_token(features: dict[str, Any]) -> Any:
    return {"deep": [hidden(features)], "sums": features["ids"].sum(1)}


def truncating(features: dict[str, Any]) -> Any:
    return per_token({"ids": features["ids"][:, :16]})


def of_two_structures(features: dict[str, Any]) -> Any:
    output = per_token(features)
    return output if features["ids"].shape[1] % 2 else output["deep"]


@pytest.mark.parametrize("compute", [truncating, of_two_structures])
def test_an_axis_that_follows_no_feature_costs_one_warning_and_changes_no_result(
    together: Make, compute: Function, caplog: pytest.LogCaptureFixture
) -> None:
    many = together(compute, name="shop.embed")
    chance = random.Random(0)
    for width in (5, 9, 20):
        alone = compute({"ids": numpy.arange(1, width + 1)[None]})
        assert repr(many.fn(tokens(width))) == repr(alone)
    assert not caplog.records, "callers alone lose nothing"
    for _ in range(20):
        ids = [numpy.arange(chance.randint(1, 24))[None] for _ in range(6)]
        results = many.results(*({"ids": each} for each in ids))
        assert repr(results) == repr([compute({"ids": each}) for each in ids])
    (record,) = [each for each in caplog.records if "mask" not in each.message]
    for part in ("shop.embed: axis 1 of 'deep.0' in the output", "run apart", "unpad={...}"):
        assert part in record.message


@pytest.mark.parametrize("axis", [1, -2])
def test_declared_axes_are_cut_without_a_run_apart_and_no_other_axes(
    together: Make, axis: int
) -> None:
    two = together(
        lambda features: {"states": (hidden(features), [hidden(features)]), "ids": features["ids"]},
        unpad={"states": {axis: "ids"}},
        pad_to_multiple_of=8,
    )
    for result, width in zip(two.results(tokens(3), tokens(5)), (3, 5), strict=True):
        assert [result["states"][0].shape, result["states"][1][0].shape] == [(1, width, 5)] * 2
        assert result["ids"].shape == (1, 8)
    assert [batch["ids"].shape for batch in two.seen] == [(2, 8)]
    whole = together(hidden, unpad={"": {axis: "ids"}})
    assert whole.results(tokens(3), tokens(5))[0].shape == (1, 3, 5)


@pytest.mark.parametrize(
    "unpad",
    [
        {"hid": {1: "ids"}},
        {"hidden": {1: "mask"}},
        {"hidden": {2: "ids"}},
        {"hidden": {3: "ids"}},
        {"hidden": {-3: "ids"}},
    ],
)
def test_a_declaration_that_does_not_fit_the_output_is_an_error(together: Make, unpad: Any) -> None:
    two = together(lambda features: {"hidden": hidden(features, 4)}, unpad=unpad, name="shop.embed")
    ((place, axes),) = unpad.items()
    ((axis, feature),) = axes.items()
    for answer in two.answers(tokens(3), tokens(5)):
        assert type(answer) is BatchFunctionError, repr(answer)
        assert f"unpad says that axis {axis} of {place!r} follows {feature!r}" in str(answer)
        assert "{'hidden': (2, 5, 4)}, and features were padded to {'ids': 5}" in str(answer)


def test_with_unpad_false_no_axis_is_cut(together: Make) -> None:
    two = together(hidden, unpad=False)
    short, long = two.results(tokens(3), tokens(5))
    assert (short[0, :, 0].tolist(), long.shape) == ([1, 2, 3, 0, 0], (1, 5, 5))
    assert len(two.seen) == 1


def test_a_list_of_rows_is_an_error_that_says_what_a_list_holds(together: Make) -> None:
    (answer,) = together(lambda features: list(features["ids"])).answers(tokens(5, 5))
    assert isinstance(answer, BatchSizeMismatch)
    assert "2 items and returned 5 results in '0' of its output" in str(answer)
    assert "a list or tuple holds arrays, not rows" in str(answer)
