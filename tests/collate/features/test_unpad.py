"""Axes of outputs that follow the rows of a feature, learned from several runs or declared."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from batched.errors import BatchFunctionError, BatchSizeMismatch
from feature_models import same
from feature_stage import Make, Together, hidden, tokens
from stage import wait_until

pytestmark = pytest.mark.once

Function = Callable[[dict[str, Any]], Any]

# ---------------------------------------------------------------- cut to the caller's own length


@pytest.mark.parametrize(
    ("side", "last"),
    [("right", [[70, 0, 0], [80, 90, 100]]), ("left", [[0, 0, 70], [80, 90, 100]])],
)
def test_outputs_per_token_are_as_long_as_the_callers_own_rows(
    together: Make, side: str, last: list[Any]
) -> None:
    three = together(lambda features: features["ids"] * 10, padding_side=side)
    results = three.results(tokens(2), tokens(4, first=3), tokens(1, 3, first=7))
    assert [result.tolist() for result in results] == [[[10, 20]], [[30, 40, 50, 60]], last]
    assert three.seen[0]["ids"].shape == (4, 4)


def attentions(features: dict[str, Any]) -> Any:
    ids = features["ids"]
    return ids[:, None, :, None] * ids[:, None, None, :] * numpy.ones((5, 1, 1), int)


@pytest.mark.parametrize(
    ("compute", "shapes"),
    [
        (hidden, [(1, 3, 5), (1, 5, 5)]),
        (lambda features: hidden(features).swapaxes(1, 2), [(1, 5, 3), (1, 5, 5)]),
        (lambda features: hidden(features).sum(1), [(1, 5), (1, 5)]),
        (attentions, [(1, 5, 3, 3), (1, 5, 5, 5)]),
    ],
    ids=["hidden size", "hidden size before the length", "vector", "heads"],
)
def test_a_size_equal_to_the_padded_length_by_chance_is_not_cut(
    together: Make, compute: Function, shapes: list[Any]
) -> None:
    assert [result.shape for result in together(compute).results(tokens(3), tokens(5))] == shapes


# ---------------------------------------------------------------- how it is learned


def test_a_first_batch_runs_in_two_parts_and_later_ones_run_whole(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        return {
            "hidden": hidden(features),
            "more": (hidden(features, 6), features["ids"].sum(1)),
            "ids": features["ids"] * 2,
        }

    three = together(compute)
    results = three.results(tokens(3), tokens(5), tokens(4))
    assert [batch["ids"].shape for batch in three.seen] == [(3, 5), (1, 3), (2, 5)]
    assert [result["hidden"].shape for result in results] == [(1, 3, 5), (1, 5, 5), (1, 4, 5)]
    results = three.results(tokens(6), tokens(5), tokens(3))
    assert [batch["ids"].shape for batch in three.seen[3:]] == [(3, 6)]
    assert [result["hidden"].shape for result in results] == [(1, 6, 5), (1, 5, 5), (1, 3, 5)]


def test_a_batch_that_runs_in_parts_counts_once(together: Make) -> None:
    two = together(hidden)
    two.results(tokens(3), tokens(5))
    stats = two.fn.stats
    assert len(two.seen) == 3
    # a decoy among them
    assert (stats.total_batches, stats.total_processed, stats.calls) == (2, 3, 3)


def test_few_batches_of_many_lengths_run_in_parts(together: Make) -> None:
    many = together(lambda features: {"hidden": hidden(features), "ids": features["ids"]})
    source = numpy.random.default_rng(0)
    for _ in range(100):
        widths = source.integers(1, 100, 4).tolist()
        results = many.results(*map(tokens, widths))
        assert [result["hidden"].shape for result in results] == [(1, width, 5) for width in widths]
    assert sum([len(batch["ids"]) for batch in many.seen]) == 404, "of the first batch alone"
    assert len(many.seen) == 104, "two more of that one, and one for each row shorter than any yet"


def test_evidence_of_one_kind_of_call_does_not_count_for_another(together: Make) -> None:
    two = together(lambda features, size=1: hidden(features, size))
    extra = ({"size": 5}, {"size": 5})
    assert [result.shape for result in two.results(tokens(3), tokens(4))] == [(1, 3, 1), (1, 4, 1)]
    assert [result.shape for result in two.results(tokens(3), tokens(5), extra=extra)] == [
        (1, 3, 5),
        (1, 5, 5),
    ]


def test_evidence_keeps_no_extra_arguments_alive(together: Make) -> None:
    class Session:
        pass

    two = together(lambda features, session, size: hidden(features, size))
    refs = []
    for size in (1, 2, 1, 2):
        session = Session()
        refs.append(weakref.ref(session))
        two.results(tokens(3), tokens(5), extra=({"session": session, "size": size},) * 2)
        two.extra.clear()
        del session
    two.fn.shutdown()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4
    plain = together(lambda features, size: hidden(features, size))
    for size in (1, 2, 1, 2):
        plain.results(tokens(3), tokens(5), extra=({"size": size},) * 2)
        gc.collect()
    assert len(plain.seen) == 8, "a batch for each size ran in parts"


def test_a_failure_for_short_rows_reaches_their_callers_only_and_leaves_no_garbage(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if features["ids"].shape[1] < 3:
            raise RuntimeError("too short")
        return hidden(features)

    two = together(compute)
    gc.collect()
    gc.disable()
    try:
        calls = [{"ids": numpy.ones((2, width), int)} for width in (1, 4, 2)]
        refs = [weakref.ref(call["ids"]) for call in calls]
        kinds = [str(getattr(answer, "shape", answer)) for answer in two.answers(*calls)]
        assert kinds == ["too short", "(2, 4, 5)", "too short"]
        del calls
        wait_until(lambda: not any(ref() is not None for ref in refs))
    finally:
        gc.enable()


def test_a_function_that_takes_one_length_only_gets_a_warning_and_no_cuts(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        assert features["ids"].shape[1] == 8
        return features["ids"] * 10

    two = together(compute, pad_to_multiple_of=8, name="shop.embed")
    for _ in range(3):
        results = two.results(tokens(3), tokens(5))
        assert [result.tolist() for result in results] == [
            [[10, 20, 30, 0, 0, 0, 0, 0]],
            [[10, 20, 30, 40, 50, 0, 0, 0]],
        ]
    (record,) = [each for each in caplog.records if "mask" not in each.message]
    assert record.levelname == "WARNING"
    for part in ("shop.embed", "not cut", "unpad"):
        assert part in record.message


def test_a_function_of_one_length_only_needs_no_declaration_for_vectors(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        assert features["ids"].shape[1] == 8
        return features["ids"].sum(1, keepdims=True) * numpy.ones(3)

    two = together(compute, pad_to_multiple_of=8)
    assert two.fn(tokens(3)).tolist() == [[6.0] * 3]
    results = two.results(tokens(2), tokens(3), tokens(8))
    assert [result.tolist() for result in results] == [[[3.0] * 3], [[6.0] * 3], [[36.0] * 3]]


# ---------------------------------------------------------------- axes that follow no feature


def vectors(rows: int) -> dict[str, Any]:
    return {"vector": numpy.arange(rows * 4.0).reshape(rows, 4)}


def test_an_output_as_long_as_the_batch_has_rows_is_warned_of_once(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Each caller gets similarities to the rows of other callers."""

    def compute(features: dict[str, Any]) -> Any:
        rows = features["vector"]
        return {"rows": rows, "similarities": rows @ rows.T}

    two = together(compute, name="shop.compare")
    assert two.fn(vectors(1))["similarities"].shape == (1, 1)
    assert not caplog.records
    assert two.fn(vectors(2))["similarities"].shape == (2, 2)
    assert not caplog.records
    for _ in range(2):
        results = two.results(vectors(1), vectors(2))
        assert [result["similarities"].shape for result in results] == [(1, 3), (2, 3)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(
        "shop.compare: axis 1 of 'similarities' in the output is as long as the batch has rows, "
        "with 1, 2, 3 rows. Rows that see each other"
    )


def test_an_output_that_was_once_not_as_long_causes_no_warning_of_rows(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A first column is added: by chance, the output is sometimes as long as there are rows."""

    def compute(features: dict[str, Any]) -> Any:
        return numpy.pad(features["ids"], [(0, 0), (1, 0)])

    two = together(compute)
    for rows, width in ((4, 7), (2, 1), (3, 2), (4, 3), (5, 4)):
        ids = numpy.ones((rows, width), int)
        assert two.fn({"ids": ids}).shape == (rows, width + 1)
    assert "Rows that see each other" not in caplog.text


def test_an_output_that_varies_by_its_content_causes_no_warning_of_rows(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = iter([3, 4, 2, 6])

    def compute(features: dict[str, Any]) -> Any:
        return numpy.ones((len(features["vector"]), next(lengths)))

    two = together(compute)
    for rows in (1, 2, 3, 5):
        two.fn(vectors(rows))
    assert not caplog.records


def test_an_output_with_a_structure_that_depends_on_the_length_is_no_error(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        states = hidden(features)
        return states if states.shape[1] % 2 else {"states": states}

    two = together(compute)
    for _ in range(3):
        odd, even = two.results(tokens(3), tokens(4))
        assert (odd.shape, even["states"].shape) == ((1, 3, 5), (1, 4, 5))
    (record,) = [each for each in caplog.records if "mask" not in each.message]
    assert "structure" in record.message


def longer_by_one(features: dict[str, Any]) -> Any:
    ids = features["ids"]
    return numpy.concatenate([ids[:, :1], ids], axis=1)


def test_an_axis_that_follows_no_feature_costs_one_warning_and_never_an_error(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    two = together(lambda features: {"deep": [longer_by_one(features)]}, name="shop.embed")
    for width in (2, 4):
        two.results(tokens(width))
    assert not caplog.records, "callers alone lose nothing"
    for _ in range(3):
        results = two.results(tokens(3), tokens(5), tokens(3))
        assert [result["deep"][0].shape for result in results] == [(1, 4), (1, 6), (1, 4)]
    assert [batch["ids"].shape for batch in two.seen[2:]] == [(1, 5), (2, 3)] * 3
    two.results(tokens(3), tokens(3))  # no evidence: a run of the same length
    two.results(tokens(3), tokens(5))
    assert [batch["ids"].shape for batch in two.seen[8:]] == [(2, 3), (1, 5), (1, 3)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("shop.embed", "axis 1", "deep.0", "ids to 4", "unpad"):
        assert part in record.message


def test_after_one_odd_call_other_calls_run_together(together: Make) -> None:
    two = together(lambda features: features["ids"][:, :16])
    for width in (3, 5, 20):
        two.results(tokens(width))
    for _ in range(4):
        results = two.results(tokens(4), tokens(7))
        assert [result.shape for result in results] == [(1, 4), (1, 7)]
    assert [batch["ids"].shape for batch in two.seen[-3:]] == [(2, 7)] * 3


def test_once_a_run_agrees_with_an_odd_one_callers_share_runs_again(together: Make) -> None:
    two = together(lambda features: features["ids"][:, :16])
    for width in (3, 20, 30):
        two.results(tokens(width))
    assert [result.shape for result in two.results(tokens(20), tokens(30))] == [(1, 16), (1, 16)]
    assert two.seen[-1]["ids"].shape == (2, 30)


LENGTHS: dict[str, Callable[[int, int], int]] = {
    "one size": lambda a, b: 5,
    "a feature": lambda a, b: b,
    "the longer of two features": max,
    "the shorter of two features": min,
    "both features": lambda a, b: a + b,
    "the difference": lambda a, b: abs(a - b),
    "cut off": lambda a, b: min(a, 6),
    "at least": lambda a, b: max(a, 6),
    "in steps": lambda a, b: -(-a // 3),
    "rounded up": lambda a, b: -(-a // 4) * 4,
}
"""Lengths of the output of a function, by the lengths of the rows of two features."""


@pytest.mark.parametrize("kind", LENGTHS)
def test_an_axis_that_depends_on_lengths_in_any_way_is_as_long_as_in_a_call_alone(
    together: Make, kind: str
) -> None:
    def length(features: dict[str, Any]) -> int:
        return LENGTHS[kind](features["a"].shape[1], features["b"].shape[1])

    for seed in range(4):
        chance = random.Random(seed)
        many = together(lambda features: numpy.ones((len(features["a"]), length(features))))
        for _ in range(10):
            calls = [
                {name: numpy.ones((1, chance.randint(1, 9)), int) for name in "ab"}
                for _ in range(chance.randint(1, 4))
            ]
            for call, result in zip(calls, many.results(*calls), strict=True):
                assert result.shape == (1, length(call))


# ---------------------------------------------------------------- many callers of odd functions


def call(width: int, first: int = 1) -> dict[str, Any]:
    return {"ids": numpy.arange(first, first + width)[None]}


def per_token(features: dict[str, Any], size: int = 8) -> dict[str, Any]:
    return {"hidden": hidden(features, size), "sums": features["ids"].sum(1)}


def truncating(features: dict[str, Any]) -> Any:
    """Read 16 tokens at most, as a model with so many positions."""
    return per_token({"ids": features["ids"][:, :16]})


def one_longer(features: dict[str, Any]) -> Any:
    return per_token({"ids": longer_by_one(features)})


def serve(many: Together, compute: Function, longest: int = 24) -> None:
    """Make calls of random lengths at the same time. Each must get the result of a call alone."""
    chance = random.Random(0)
    for _ in range(50):
        calls = [call(chance.randint(1, longest), first) for first in range(8)]
        for features, result in zip(calls, many.results(*calls), strict=True):
            same(result, compute(features))
    assert many.fn.stats.errors == 0


@pytest.mark.parametrize(
    ("compute", "odd", "longest"),
    [
        (truncating, 20, 16),  # all calls but one fit
        (truncating, 20, 24),
        (one_longer, 5, 24),
    ],
)
def test_one_call_that_comes_back_longer_or_shorter_harms_no_other(
    together: Make, compute: Function, odd: int, longest: int
) -> None:
    many = together(compute)
    many.results(call(5), call(9))
    same(many.fn(call(odd)), compute(call(odd)))
    serve(many, compute, longest)


def test_calls_of_all_lengths_survive_the_reload_of_a_model_with_another_output_width(
    together: Make,
) -> None:
    size = 4

    def model(features: dict[str, Any]) -> Any:
        return per_token(features, size)

    many = together(model)
    serve(many, model)
    size = 6
    assert many.fn(call(5))["hidden"].shape == (1, 5, 6)
    serve(many, model)


# ---------------------------------------------------------------- declared, or not at all


def test_declared_axes_are_cut_without_a_run_apart_and_no_other_axes(together: Make) -> None:
    two = together(
        lambda features: {"hidden": hidden(features), "ids": features["ids"]},
        unpad={"hidden": {1: "ids"}},
    )
    results = two.results(tokens(3), tokens(5))
    assert [result["hidden"].shape for result in results] == [(1, 3, 5), (1, 5, 5)]
    assert [result["ids"].shape for result in results] == [(1, 5), (1, 5)]
    assert len(two.seen) == 1


@pytest.mark.parametrize("axis", [1, -2])
def test_a_declaration_may_have_an_empty_path_and_a_negative_axis(
    together: Make, axis: int
) -> None:
    two = together(hidden, unpad={"": {axis: "ids"}})
    assert [result.shape for result in two.results(tokens(3), tokens(5))] == [(1, 3, 5), (1, 5, 5)]


def test_a_path_includes_all_paths_below_it(together: Make) -> None:
    two = together(
        lambda features: {"states": (hidden(features), [hidden(features)])},
        unpad={"states": {1: "ids"}},
    )
    first, second = two.results(tokens(3), tokens(5))
    assert [first["states"][0].shape, first["states"][1][0].shape] == [(1, 3, 5)] * 2
    assert [second["states"][0].shape, second["states"][1][0].shape] == [(1, 5, 5)] * 2


@pytest.mark.parametrize(
    ("unpad", "said"),
    [
        ({"logits": {1: "ids"}}, ["'logits'", "not in the output; its paths are 'hidden'"]),
        ({"hid": {1: "ids"}}, ["'hid'", "not in the output; its paths are 'hidden'"]),
        ({"hidden": {1: "mask"}}, ["'mask'", "ids"]),
        ({"hidden": {3: "ids"}}, ["axis 3", "'hidden'", "(2, 5, 4)"]),
        ({"hidden": {2: "ids"}}, ["axis 2", "'hidden'", "(2, 5, 4)"]),
        ({"hidden": {-3: "ids"}}, ["axis -3", "'hidden'", "(2, 5, 4)"]),
    ],
)
def test_a_declaration_that_does_not_fit_the_output_is_an_error(
    together: Make, unpad: Any, said: list[str]
) -> None:
    two = together(lambda features: {"hidden": hidden(features, 4)}, unpad=unpad, name="shop.embed")
    for answer in two.answers(tokens(3), tokens(5)):
        assert type(answer) is BatchFunctionError, repr(answer)
        for part in ["shop.embed", "unpad", *said]:
            assert part in str(answer)


def test_with_unpad_false_no_axis_is_cut(together: Make) -> None:
    two = together(hidden, unpad=False)
    results = two.results(tokens(3), tokens(5))
    assert [result.shape for result in results] == [(1, 5, 5), (1, 5, 5)]
    assert results[0][0, :, 0].tolist() == [1, 2, 3, 0, 0]
    assert len(two.seen) == 1


def test_a_list_of_rows_is_an_error_that_says_what_a_list_holds(together: Make) -> None:
    two = together(lambda features: list(features["ids"]))
    for answer in two.answers(tokens(5), tokens(5)):
        assert isinstance(answer, BatchSizeMismatch)
        assert "2 items and returned 5 results in '0' of its output" in str(answer)
        assert "a list or tuple holds arrays, not rows" in str(answer)
