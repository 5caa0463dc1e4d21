"""Outputs: types that a function may return, and the share of each caller."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest

from batched.errors import BatchFunctionError, BatchSizeMismatch
from feature_stage import Make
from stage import wait_until


def tokens(*widths: int, first: int = 1) -> dict[str, Any]:
    """A call with rows of these lengths, the tokens of which are numbered."""
    rows = []
    for width in widths:
        rows.append(numpy.arange(first, first + width))
        first += width
    return {"ids": rows}


def hidden(features: dict[str, Any], size: int = 5) -> Any:
    return features["ids"][:, :, None] * numpy.ones(size, int)


def of_shape(*shape: int) -> dict[str, Any]:
    return {"x": numpy.ones(shape)}


# ---------------------------------------------------------------- cut to the caller's own length


def test_outputs_per_token_are_as_long_as_the_callers_own_rows(together: Make) -> None:
    three = together(lambda features: features["ids"] * 10)
    results = three.results(tokens(2), tokens(4, first=3), tokens(1, 3, first=7))
    assert [result.tolist() for result in results] == [
        [[10, 20]],
        [[30, 40, 50, 60]],
        [[70, 0, 0], [80, 90, 100]],
    ]
    assert three.seen[0]["ids"].shape == (4, 4)


def test_padding_on_the_left_is_cut_from_the_left(together: Make) -> None:
    three = together(
        lambda features: features["ids"] * 10, padding_side="left", pad_token={"ids": 9}
    )
    results = three.results(tokens(2), tokens(4, first=3), tokens(1, 3, first=7))
    assert [result.tolist() for result in results] == [
        [[10, 20]],
        [[30, 40, 50, 60]],
        [[90, 90, 70], [80, 90, 100]],
    ]


def test_a_hidden_size_as_large_as_the_padded_length_is_not_cut(together: Make) -> None:
    two = together(hidden)
    results = two.results(tokens(3), tokens(5))
    assert [result.shape for result in results] == [(1, 3, 5), (1, 5, 5)]


def test_a_hidden_size_before_the_length_is_not_cut_either(together: Make) -> None:
    two = together(lambda features: hidden(features).swapaxes(1, 2))
    results = two.results(tokens(3), tokens(5))
    assert [result.shape for result in results] == [(1, 5, 3), (1, 5, 5)]


def test_a_vector_as_long_as_the_padded_rows_is_not_cut(together: Make) -> None:
    two = together(lambda features: features["ids"].sum(1)[:, None] * numpy.ones(5, int))
    results = two.results(tokens(3), tokens(5))
    assert [result.tolist() for result in results] == [[[6] * 5], [[15] * 5]]


def test_attentions_are_cut_on_two_axes_and_their_heads_are_not_even_if_they_are_as_many(
    together: Make,
) -> None:
    def attentions(features: dict[str, Any]) -> Any:
        ids = features["ids"]
        return ids[:, None, :, None] * ids[:, None, None, :] * numpy.ones((4, 1, 1), int)

    two = together(attentions)
    results = two.results(tokens(3), tokens(4))
    assert [result.shape for result in results] == [(1, 4, 3, 3), (1, 4, 4, 4)]
    assert results[0][0, 3].tolist() == [[1, 2, 3], [2, 4, 6], [3, 6, 9]]


def test_two_features_of_different_length_are_told_apart(together: Make) -> None:
    two = together(
        lambda features: {
            "b": features["b"] + 0,
            "a": features["a"] + 0,
            "pairs": features["a"][:, :, None] * features["b"][:, None],
        }
    )
    calls = [
        {"a": numpy.ones((1, 2), int), "b": numpy.ones((1, 4), int)},
        {"a": numpy.ones((1, 4), int), "b": numpy.ones((1, 3), int)},
    ]
    first, second = two.results(*calls)
    assert {name: array.shape for name, array in first.items()} == {
        "b": (1, 4),
        "a": (1, 2),
        "pairs": (1, 2, 4),
    }
    assert {name: array.shape for name, array in second.items()} == {
        "b": (1, 3),
        "a": (1, 4),
        "pairs": (1, 4, 3),
    }


def test_features_without_padding_leave_nothing_to_cut(together: Make) -> None:
    two = together(lambda features: features["x"] * 2)
    results = two.results(of_shape(1, 3, 4, 4), of_shape(1, 3, 4, 4))
    assert [result.shape for result in results] == [(1, 3, 4, 4), (1, 3, 4, 4)]
    assert len(two.seen) == 1


def test_padding_to_a_multiple_is_cut_too(together: Make) -> None:
    two = together(lambda features: (hidden(features, 8), features["ids"]), pad_to_multiple_of=8)
    results = two.results(tokens(3), tokens(5))
    assert [(first.shape, second.shape) for first, second in results] == [
        ((1, 3, 8), (1, 3)),
        ((1, 5, 8), (1, 5)),
    ]
    (alone,) = two.results(tokens(6))
    assert [part.shape for part in alone] == [(1, 6, 8), (1, 6)]


# ---------------------------------------------------------------- how it is learned


def test_a_first_batch_that_cannot_be_split_runs_in_two_parts_and_later_ones_run_whole(
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


def test_a_batch_runs_whole_where_ones_of_different_length_have_told_before(
    together: Make,
) -> None:
    two = together(lambda features: {"hidden": hidden(features), "ids": features["ids"]})
    two.results(tokens(2))
    two.results(tokens(4))
    results = two.results(tokens(3), tokens(5))
    assert [result["hidden"].shape for result in results] == [(1, 3, 5), (1, 5, 5)]
    assert two.seen[-1]["ids"].shape == (2, 5)


def test_a_run_that_is_shorter_in_one_feature_only_tells_nothing(together: Make) -> None:
    def ids(question: int, document: int) -> dict[str, Any]:
        return {
            "q": numpy.ones((1, question), dtype=int),
            "d": numpy.ones((1, document), dtype=int),
        }

    joined = together(lambda features: numpy.concatenate([features["q"], features["d"]], axis=1))
    joined.results(ids(3, 5))
    joined.results(ids(5, 3))  # which is as long
    results = joined.results(ids(3, 5), ids(3, 4))
    assert [result.shape for result in results] == [(1, 8), (1, 7)]


def test_evidence_is_kept_for_extra_arguments_of_any_kind(together: Make) -> None:
    class Pool(enum.Enum):
        MEAN = 1

    for argument in (Pool.MEAN, numpy.float16, numpy.dtype("float16"), None):
        many = together(lambda features, pool=None: hidden(features))
        for _ in range(6):
            many.results(tokens(3), tokens(5), extra=({"pool": argument},) * 2)
        assert len(many.seen) <= 10, argument


def test_few_batches_run_in_parts_however_many_lengths_there_are(together: Make) -> None:
    many = together(lambda features: {"hidden": hidden(features), "ids": features["ids"]})
    source = numpy.random.default_rng(0)
    for _ in range(100):
        widths = source.integers(1, 100, 4).tolist()
        results = many.results(*map(tokens, widths))
        assert [result["hidden"].shape for result in results] == [(1, width, 5) for width in widths]
    assert sum([len(batch["ids"]) for batch in many.seen]) == 404, "of the first batch alone"
    assert len(many.seen) == 104, "two more of that one, and one for each row shorter than any yet"


def test_a_batch_runs_whole_while_all_callers_have_rows_of_one_length(together: Make) -> None:
    two = together(hidden)
    results = two.results(tokens(5), tokens(5))
    assert [result.shape for result in results] == [(1, 5, 5)] * 2
    assert len(two.seen) == 1


def test_what_one_kind_of_call_has_taught_is_not_taken_for_true_of_another(together: Make) -> None:
    two = together(lambda features, size=1: hidden(features, size))
    extra = ({"size": 5}, {"size": 5})
    assert [result.shape for result in two.results(tokens(3), tokens(4))] == [(1, 3, 1), (1, 4, 1)]
    assert [result.shape for result in two.results(tokens(3), tokens(5), extra=extra)] == [
        (1, 3, 5),
        (1, 5, 5),
    ]


def test_what_fails_for_rows_of_one_length_fails_callers_with_such_rows_and_no_others(
    together: Make,
) -> None:
    error = RuntimeError("too short")

    def compute(features: dict[str, Any]) -> Any:
        if features["ids"].shape[1] < 4:
            raise error
        return hidden(features)

    three = together(compute)
    for answer in (answers := three.answers(tokens(3), tokens(5), tokens(3)))[::2]:
        assert type(answer) is RuntimeError
        assert answer.args == error.args
    assert answers[1].shape == (1, 5, 5)


def test_an_axis_that_is_cut_off_at_some_length_is_not_taken_for_fixed(together: Make) -> None:
    two = together(lambda features: features["ids"][:, :32])
    for length in (32, 64):
        two.results(tokens(length))
    assert [result.shape for result in two.results(tokens(8), tokens(40))] == [(1, 8), (1, 32)]


def test_what_is_declared_is_looked_for_in_every_output(together: Make) -> None:
    alone = together(
        lambda features: {"last_hidden_state": hidden(features)}, unpad={"last_hidden": {1: "ids"}}
    )
    with pytest.raises(
        BatchFunctionError, match="'last_hidden', which is not in the output: 'last_hidden_state'"
    ):
        alone.fn(tokens(3))


def test_a_list_of_rows_is_told_to_be_no_list_of_outputs(together: Make) -> None:
    two = together(lambda features: list(features["ids"]))
    for answer in two.answers(tokens(5), tokens(5)):
        assert isinstance(answer, BatchSizeMismatch)
        assert "2 items and returned 5 results in '0' of its output" in str(answer)
        assert "a list or tuple holds arrays, not rows" in str(answer)


def test_rounded_rows_of_a_function_that_takes_one_length_only_are_not_cut_and_a_warning_says_so(
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
    for _ in range(2):
        results = two.results(vectors(1), vectors(2))
        assert [result["similarities"].shape for result in results] == [(1, 3), (2, 3)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(
        "shop.compare: axis 1 of 'similarities' in the output is as long as the batch has rows: "
        "1 of 1, 3 of 3."
    )


def test_an_output_that_varies_by_its_content_is_not_taken_for_one_of_the_whole_batch(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = iter([3, 4, 2, 6])

    def compute(features: dict[str, Any]) -> Any:
        return numpy.ones((len(features["vector"]), next(lengths)))

    two = together(compute)
    for rows in (1, 2, 3, 5):
        two.fn(vectors(rows))
    assert not caplog.records


def test_a_function_of_one_length_only_needs_no_declaration_where_no_axis_is_as_long(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        assert features["ids"].shape[1] == 8
        return features["ids"].sum(1, keepdims=True) * numpy.ones(3)

    two = together(compute, pad_to_multiple_of=8)
    assert two.fn(tokens(3)).tolist() == [[6.0] * 3]
    assert [result.tolist() for result in two.results(tokens(2), tokens(3), tokens(8))] == [
        [[3.0] * 3],
        [[6.0] * 3],
        [[36.0] * 3],
    ]


def test_a_part_that_fails_leaves_no_garbage(together: Make) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if features["ids"].shape[1] < 3:
            raise RuntimeError("too short")
        return hidden(features)

    two = together(compute)
    gc.collect()
    gc.disable()
    try:
        calls = [{"ids": numpy.ones((2, width), int)} for width in (1, 2, 4)]
        refs = [weakref.ref(call["ids"]) for call in calls]
        assert [isinstance(answer, RuntimeError) for answer in two.answers(*calls)] == [
            True,
            True,
            False,
        ]
        del calls
        wait_until(lambda: not any(ref() is not None for ref in refs))
    finally:
        gc.enable()


def test_axes_are_known_by_extra_arguments_without_keeping_those_alive(together: Make) -> None:
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


def test_an_output_that_changes_its_structure_reaches_each_caller_as_if_it_were_alone(
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
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("shop.embed", "axis 1", "deep.0", "ids to 4", "unpad"):
        assert part in record.message


def test_an_axis_that_follows_no_feature_is_found_out_in_the_very_first_batch(
    together: Make,
) -> None:
    two = together(longer_by_one)
    assert [result.shape for result in two.results(tokens(3), tokens(5))] == [(1, 4), (1, 6)]


def test_an_axis_that_grows_in_steps_is_not_taken_for_fixed(together: Make) -> None:
    two = together(lambda features: features["ids"][:, ::4] * 10)  # as convolutions shorten sounds
    for width in (8, 7):  # which become equally long
        two.results(tokens(width))
    assert [result.shape for result in two.results(tokens(8), tokens(4))] == [(1, 2), (1, 1)]


def test_an_axis_as_long_as_the_longer_of_two_features_is_not_taken_for_either(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        return numpy.ones((len(features["a"]), max(array.shape[1] for array in features.values())))

    def call(a: int, b: int) -> dict[str, Any]:
        return {"a": numpy.ones((1, a), int), "b": numpy.ones((1, b), int)}

    two = together(compute)
    for widths in ((5, 3), (2, 1)):
        two.results(call(*widths))
    for _ in range(3):
        results = two.results(call(5, 3), call(2, 4))
        assert [result.shape for result in results] == [(1, 5), (1, 4)]


def test_an_axis_of_rows_that_the_function_rounds_up_itself_is_cut_to_what_a_caller_gets_alone(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        return numpy.pad(features["ids"], ((0, 0), (0, -features["ids"].shape[1] % 8)))

    two = together(compute)
    for width in (8, 16):  # which the function leaves as they are
        two.results(tokens(width))
    for _ in range(3):
        results = two.results(tokens(16), tokens(12), tokens(3))
        assert [result.shape for result in results] == [(1, 16), (1, 16), (1, 8)]


def test_lone_odd_calls_do_not_keep_others_from_running_together(together: Make) -> None:
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


# ---------------------------------------------------------------- declared, or not at all


def test_what_is_declared_is_cut_without_a_run_apart(together: Make) -> None:
    two = together(
        lambda features: {"hidden": hidden(features), "sums": features["ids"].sum(1)},
        unpad={"hidden": {1: "ids"}},
    )
    results = two.results(tokens(3), tokens(5))
    assert [result["hidden"].shape for result in results] == [(1, 3, 5), (1, 5, 5)]
    assert len(two.seen) == 1


def test_what_is_not_declared_is_not_cut(together: Make) -> None:
    two = together(
        lambda features: {"hidden": hidden(features), "ids": features["ids"]},
        unpad={"hidden": {1: "ids"}},
    )
    results = two.results(tokens(3), tokens(5))
    assert [result["ids"].shape for result in results] == [(1, 5), (1, 5)]


@pytest.mark.parametrize("axis", [1, -2])
def test_a_path_may_mean_the_whole_output_and_an_axis_be_counted_from_the_end(
    together: Make, axis: int
) -> None:
    two = together(hidden, unpad={"": {axis: "ids"}})
    assert [result.shape for result in two.results(tokens(3), tokens(5))] == [(1, 3, 5), (1, 5, 5)]


def test_a_path_may_mean_all_that_is_below_it(together: Make) -> None:
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
        ({"logits": {1: "ids"}}, ["'logits'", "'hidden'"]),
        ({"hidden": {1: "mask"}}, ["'mask'", "ids"]),
        ({"hidden": {3: "ids"}}, ["axis 3", "'hidden'", "(2, 5, 4)"]),
        ({"hidden": {2: "ids"}}, ["axis 2", "'hidden'", "(2, 5, 4)"]),
        ({"hidden": {-3: "ids"}}, ["axis -3", "'hidden'", "(2, 5, 4)"]),
    ],
)
def test_a_declaration_that_does_not_fit_the_output_is_an_error_that_says_so(
    together: Make, unpad: Any, said: list[str]
) -> None:
    two = together(lambda features: {"hidden": hidden(features, 4)}, unpad=unpad, name="shop.embed")
    for answer in two.answers(tokens(3), tokens(5)):
        assert type(answer) is BatchFunctionError, repr(answer)
        for part in ["shop.embed", "unpad", *said]:
            assert part in str(answer)


def test_nothing_is_cut_where_that_is_wanted(together: Make) -> None:
    two = together(hidden, unpad=False)
    results = two.results(tokens(3), tokens(5))
    assert [result.shape for result in results] == [(1, 5, 5), (1, 5, 5)]
    assert results[0][0, :, 0].tolist() == [1, 2, 3, 0, 0]
    assert len(two.seen) == 1


# ---------------------------------------------------------------- accepted outputs


class Pair(NamedTuple):
    tokens: Any
    pooled: Any


@dataclass
class Plain:
    tokens: Any
    pooled: Any


@dataclass(frozen=True)
class Frozen:
    tokens: Any
    pooled: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    tokens: Any
    pooled: Any


@dataclass(frozen=True)
class SlottedByHand:
    __slots__ = ("pooled", "tokens")
    tokens: Any
    pooled: Any


@dataclass
class Made:
    """Has a field that its constructor does not take."""

    tokens: Any
    pooled: Any = field(init=False)


class Listed(list[Any]):
    pass


class Mapped(dict[str, Any]):
    pass


class Outputs(MutableMapping[str, Any]):
    """A mapping of an author's own, which keeps its entries in another."""

    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def made(tokens: Any, pooled: Any) -> Made:
    output = Made(tokens)
    output.pooled = pooled
    return output


def parts(output: Any) -> list[Any]:
    """Tokens and pooled, in this order, of any of the containers."""
    if isinstance(output, (list, tuple)):
        return list(output)
    return (
        [output["tokens"], output["pooled"]]
        if hasattr(output, "__getitem__")
        else [output.tokens, output.pooled]
    )


def values(output: Any) -> list[Any]:
    return [part.tolist() for part in parts(output)]


CONTAINERS: list[Any] = [
    pytest.param(lambda tokens, pooled: (tokens, pooled), id="tuple"),
    pytest.param(lambda tokens, pooled: [tokens, pooled], id="list"),
    pytest.param(lambda tokens, pooled: Listed([tokens, pooled]), id="list of an author's own"),
    pytest.param(Pair, id="named tuple"),
    pytest.param(lambda tokens, pooled: {"tokens": tokens, "pooled": pooled}, id="dict"),
    pytest.param(
        lambda tokens, pooled: Mapped(tokens=tokens, pooled=pooled), id="dict of an author's own"
    ),
    pytest.param(
        lambda tokens, pooled: OrderedDict(pooled=pooled, tokens=tokens), id="ordered dict"
    ),
    pytest.param(
        lambda tokens, pooled: defaultdict(list, {"tokens": tokens, "pooled": pooled}),
        id="default dict",
    ),
    pytest.param(Plain, id="dataclass"),
    pytest.param(Frozen, id="frozen dataclass"),
    pytest.param(Slotted, id="dataclass with slots"),
    pytest.param(SlottedByHand, id="dataclass with slots by hand"),
    pytest.param(made, id="dataclass with a field that is set later"),
]


@pytest.mark.parametrize("container", CONTAINERS)
def test_each_caller_gets_its_rows_in_what_the_function_returned_them_in(
    together: Make, container: Callable[[Any, Any], Any]
) -> None:
    returned: list[Any] = []

    def compute(features: dict[str, Any]) -> Any:
        returned.append(container(features["ids"] * 10, features["ids"].sum(1)))
        return returned[-1]

    two = together(compute)
    results = two.results(tokens(2), tokens(1, 3, first=3))
    assert [type(result) for result in results] == [type(returned[0])] * 2
    assert [values(result) for result in results] == [
        [[[10, 20]], [3]],
        [[[30, 0, 0], [40, 50, 60]], [3, 15]],
    ]
    assert len(parts(returned[0])[0]) == 3, "the function may have kept its output"
    if isinstance(results[0], dict):
        assert list(results[0]) == list(returned[0])


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_caller_alone_and_one_whose_call_was_split_get_the_same_container(
    together: Make, container: Callable[[Any, Any], Any]
) -> None:
    one = together(
        lambda features: container(features["ids"] * 10, features["ids"].sum(1)), batch_size=2
    )
    for call in (tokens(2, 2), tokens(2, 1, 2)):
        (result,) = one.results(call)
        assert type(result) is type(container(1, 2))
        assert [part.shape for part in parts(result)] == [
            (len(call["ids"]), 2),
            (len(call["ids"]),),
        ]


@pytest.mark.parametrize(
    "container",
    [MappingProxyType, lambda entries: Outputs(**entries), UserDict],
    ids=["view", "mapping of an author's own", "user dict"],
)
def test_a_mapping_that_is_no_dict_or_cannot_be_changed_reaches_its_callers_as_a_dict(
    together: Make, container: Callable[[Any], Any]
) -> None:
    two = together(lambda features: container({"ids": features["ids"] * 2}))
    results = two.results(tokens(2), tokens(2, first=3))
    assert [type(result) for result in results] == [dict, dict]
    assert [result["ids"].tolist() for result in results] == [[[2, 4]], [[6, 8]]]


def test_two_heads_of_a_batch_of_two_are_not_taken_for_rows(together: Make) -> None:
    for kind in (tuple, list, Pair._make):
        two = together(
            lambda features, kind=kind: kind([features["ids"].sum(1), -features["ids"].sum(1)])
        )
        first, second = two.results(tokens(2), tokens(2, first=3))
        assert (type(first), type(second)) == (type(kind([1, 2])),) * 2
        assert [[head.tolist() for head in each] for each in (first, second)] == [
            [[3], [-3]],
            [[7], [-7]],
        ]


def test_outputs_may_be_nested_as_deep_as_they_go(together: Make) -> None:
    two = together(
        lambda features: {
            "a": [{"b": (Frozen(features["ids"], [features["ids"]]),)}],
            3: features["ids"].sum(1),
        }
    )
    first, second = two.results(tokens(2), tokens(3))
    assert [result["a"][0]["b"][0].tokens.tolist() for result in (first, second)] == [
        [[1, 2]],
        [[1, 2, 3]],
    ]
    assert [result["a"][0]["b"][0].pooled[0].tolist() for result in (first, second)] == [
        [[1, 2]],
        [[1, 2, 3]],
    ]
    assert [result[3].tolist() for result in (first, second)] == [[3], [6]]


def test_what_is_none_stays_none(together: Make) -> None:
    two = together(lambda features: {"ids": features["ids"], "loss": None, "more": (None, [None])})
    for result in two.results(tokens(2), tokens(2)):
        assert (list(result), result["loss"], result["more"]) == (
            ["ids", "loss", "more"],
            None,
            (None, [None]),
        )


def test_the_output_may_be_of_another_dtype_than_the_features(together: Make) -> None:
    two = together(
        lambda features: (
            features["ids"].astype(numpy.float16) / 2,
            features["ids"] > 1,
            features["ids"].astype("U2"),
        )
    )
    first, _ = two.results(tokens(2), tokens(3))
    assert [(part.dtype.str, part.tolist()) for part in first] == [
        ("<f2", [[0.5, 1.0]]),
        ("|b1", [[False, True]]),
        ("<U2", [["1", "2"]]),
    ]


@pytest.mark.model
def test_an_output_of_a_model_keeps_its_type(together: Make) -> None:
    torch = pytest.importorskip("torch")
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def compute(features: dict[str, Any]) -> Any:
        states = features["ids"][:, :, None] * torch.ones(5)
        return outputs.BaseModelOutputWithPooling(
            last_hidden_state=states,
            pooler_output=states.sum(1),
            hidden_states=(states, states * 2),
        )

    two = together(compute, pad_token={"ids": 0})
    for number, result in enumerate(
        [
            *two.results({"ids": torch.ones(1, 3)}, {"ids": torch.ones(1, 5)}),
            two.fn({"ids": torch.ones(1, 4)}),
        ]
    ):
        width = (3, 5, 4)[number]
        assert type(result) is outputs.BaseModelOutputWithPooling
        assert list(result) == ["last_hidden_state", "pooler_output", "hidden_states"]
        assert result.attentions is None
        assert result.last_hidden_state is result["last_hidden_state"]
        assert result.last_hidden_state.shape == (1, width, 5)
        assert [state.shape for state in result.hidden_states] == [(1, width, 5)] * 2
        assert result[1].shape == (1, 5)


@pytest.mark.model
def test_an_output_of_a_model_keeps_entries_that_were_added_to_it(together: Make) -> None:
    torch = pytest.importorskip("torch")
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def compute(features: dict[str, Any]) -> Any:
        output = outputs.BaseModelOutput(last_hidden_state=features["ids"] * 2)
        output["scores"] = features["ids"].sum(1)
        return output

    two = together(compute)
    for result in [
        *two.results({"ids": torch.ones(1, 2)}, {"ids": torch.ones(1, 2)}),
        two.fn({"ids": torch.ones(1, 2)}),
    ]:
        assert type(result) is outputs.BaseModelOutput
        assert result["scores"].tolist() == [2.0]


@pytest.mark.model
@pytest.mark.parametrize("reduction", ["max", "sort", "topk"])
def test_what_reductions_of_torch_return_is_split(together: Make, reduction: str) -> None:
    torch = pytest.importorskip("torch")
    compute: Any = {
        "max": lambda x: torch.max(x, 1),
        "sort": lambda x: torch.sort(x, 1, descending=True),
        "topk": lambda x: torch.topk(x, 1),
    }[reduction]
    two = together(lambda features: compute(features["x"]))
    rows = [torch.tensor([[1.0, 3.0]]), torch.tensor([[6.0, 5.0]])]
    results = two.results(*({"x": row} for row in rows))
    for row, result in zip(rows, results, strict=True):
        assert type(result) is type(compute(row))
        assert torch.equal(result.values, compute(row).values)
        assert torch.equal(result.indices, compute(row).indices)


# ---------------------------------------------------------------- refused outputs


class Thing:
    pass


class DynamicCache:
    """Named as that of transformers."""


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda ids: {"logits": ids, "loss": 0.5}, ["'loss'", "float"]),
        (lambda ids: {"logits": ids, "loss": ids.sum()}, ["'loss'", "int64"]),
        (lambda ids: {"logits": ids, "loss": numpy.array(0.5)}, ["'loss'", "single value"]),
        (lambda ids: {"logits": ids, "count": 3}, ["'count'", "int"]),
        (lambda ids: {"logits": ids, "labels": ["a", "b"]}, ["'labels.0'", "str", "tolist()"]),
        (lambda ids: ids.tolist(), ["'0.0'", "int", "return an array or tensor"]),
        (lambda ids: ["a", "b"], ["'0'", "str"]),
        (lambda ids: ["ab" for _ in ids], ["'0'", "str"]),
        (lambda ids: {"a": [ids, {"b": Thing()}]}, ["'a.1.b'", "Thing"]),
        (lambda ids: Plain(ids, "text"), ["'pooled'", "str"]),
        (
            lambda ids: {"logits": ids, "past_key_values": DynamicCache()},
            ["'past_key_values'", "DynamicCache", "use_cache=False"],
        ),
        (lambda ids: {"logits": ids, "ids": {1, 2}}, ["'ids'", "set"]),
        (lambda ids: Plain, ["type"]),
        (lambda ids: numpy.array(1.0), ["single value"]),
        (lambda ids: "text", ["str"]),
        (lambda ids: None, ["NoneType"]),
        (lambda ids: {}, ["dict"]),
        (lambda ids: {"a": None, "b": ()}, ["dict"]),
    ],
)
@pytest.mark.parametrize("callers", [1, 2])
def test_what_cannot_be_split_is_an_error_that_names_its_path(
    together: Make, output: Any, said: list[str], callers: int
) -> None:
    wrong = [True]
    some = together(
        lambda features: output(features["ids"]) if wrong else features["ids"], name="shop.embed"
    )
    for answer in some.answers(*[tokens(2)] * callers):
        assert type(answer) is BatchFunctionError, repr(answer)
        for part in ["shop.embed", *said]:
            assert part in str(answer)
    wrong.clear()
    assert some.fn(tokens(2)).tolist() == [[1, 2]]


@pytest.mark.model
def test_the_cache_of_a_real_model_is_an_error_that_says_what_to_do(together: Make) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    ).eval()

    def compute(features: dict[str, Any], use_cache: bool = True) -> Any:
        with torch.inference_mode():
            return model(**features, use_cache=use_cache)

    two = together(compute)
    calls = [{"input_ids": torch.ones(1, width, dtype=torch.int64)} for width in (3, 5)]
    for answer in two.answers(*calls):
        assert type(answer) is BatchFunctionError
        assert "past_key_values" in str(answer)
        assert "use_cache=False" in str(answer)
    results = two.results(*calls, extra=({"use_cache": False},) * 2)
    for call, result in zip(calls, results, strict=True):
        alone = compute(call, use_cache=False)
        assert type(result) is type(alone)
        assert torch.allclose(result.logits, alone.logits, atol=1e-5)


@pytest.mark.model
def test_a_sparse_output_is_split_or_refused_by_its_path(together: Make) -> None:
    torch = pytest.importorskip("torch")
    two = together(lambda features: {"weights": features["x"].to_sparse()})
    for number, answer in enumerate(
        two.answers({"x": torch.tensor([[1.0, 0.0]])}, {"x": torch.tensor([[0.0, 2.0]])})
    ):
        if isinstance(answer, Exception):
            assert type(answer) is BatchFunctionError, repr(answer)[:200]
            assert "'weights'" in str(answer)
        else:
            assert answer["weights"].to_dense().tolist() == [[[1.0, 0.0]], [[0.0, 2.0]]][number]


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "output",
    [lambda array: array, lambda array: {"fine": numpy.zeros(3), "a": [array]}],
    ids=["bare", "nested"],
)
def test_a_wrong_number_of_rows_is_an_error_with_both_numbers_to_every_caller(
    together: Make, output: Any, rows: int
) -> None:
    wrong = [True]
    two = together(
        lambda features: output(numpy.zeros((rows, 2))) if wrong else features["ids"],
        name="shop.embed",
    )
    for call in ((tokens(2, 2), tokens(2)), (tokens(2, 2, 2),)):
        for answer in two.answers(*call):
            assert type(answer) is BatchSizeMismatch
            assert (answer.expected, answer.actual) == (3, rows)
            assert "shop.embed" in str(answer)
    wrong.clear()
    assert two.fn(tokens(2)).tolist() == [[1, 2]]


def test_parts_of_a_call_whose_outputs_are_of_different_structure_cannot_be_joined(
    together: Make,
) -> None:
    one = together(
        lambda features: (
            {"a": features["ids"]} if len(features["ids"]) == 2 else {"b": features["ids"]}
        ),
        batch_size=2,
    )
    (answer,) = one.answers(tokens(2, 2, 2))
    assert type(answer) is BatchFunctionError
    assert "structure" in str(answer)


def test_parts_of_a_call_whose_outputs_are_of_different_shape_cannot_be_joined(
    together: Make,
) -> None:
    one = together(
        lambda features: numpy.zeros((len(features["ids"]), len(features["ids"]))),
        batch_size=2,
        unpad=False,
    )
    (answer,) = one.answers(tokens(2, 2, 2))
    assert type(answer) is BatchFunctionError
    assert "joined" in str(answer)


# ---------------------------------------------------------------- results own their memory


REUSED: dict[str, Callable[[Any], Any]] = {
    "array": lambda buffer: buffer,
    "view": lambda buffer: buffer[:],
    "in a dict": lambda buffer: {"y": buffer},
    "views in a list": lambda buffer: [buffer[:, :1], buffer[:, 1:]],
    "in a named tuple": lambda buffer: Pair(buffer, None),
}
"""Outputs in memory that a function writes to again."""


def leaves(output: Any) -> list[Any]:
    if isinstance(output, dict):
        output = list(output.values())
    return (
        [leaf for leaf in output if leaf is not None]
        if isinstance(output, (list, tuple))
        else [output]
    )


@pytest.mark.parametrize("callers", [1, 2])
@pytest.mark.parametrize("output", REUSED)
def test_a_caller_never_sees_memory_that_the_function_uses_again(
    together: Make, library: Any, callers: int, output: str
) -> None:
    buffer = library.zeros((callers, 5))

    def compute(features: dict[str, Any]) -> Any:
        buffer[:] = features["x"]
        return REUSED[output](buffer)

    some = together(compute)
    rounds = [some.results(*[{"x": library.ones((1, 5)) * n}] * callers) for n in (1, 2)]
    buffer[:] = 7
    for n, results in enumerate(rounds, 1):
        for result in results:
            assert {number for leaf in leaves(result) for number in leaf[0].tolist()} == {n}


@pytest.mark.parametrize("callers", [1, 2])
def test_a_function_that_returns_its_features_gives_nobody_memory_of_a_caller(
    together: Make, library: Any, callers: int
) -> None:
    some = together()
    calls = [{"x": library.ones((1, 2))} for _ in range(callers)]
    results = some.results(*calls)
    for call in calls:
        call["x"][:] = 7
    assert [result["x"].tolist() for result in results] == [[[1, 1]]] * callers
    for result in results:
        result["x"][:] = 8
    assert [call["x"].tolist() for call in calls] == [[[7, 7]]] * callers


def views(features: dict[str, Any]) -> Any:
    whole = features["ids"][:, :, None] * numpy.ones((2, 3, 1, 1), int)[..., None][0, 0]
    return {
        "whole": features["ids"] * 2,
        "views": list(numpy.stack([features["ids"], features["ids"]])),
        "turned": whole.swapaxes(1, 2),
        "broadcast": numpy.broadcast_to(features["ids"].sum(1)[:, None], (len(features["ids"]), 7)),
        "flat": features["ids"].sum(1),
    }


@pytest.mark.parametrize("batch_size", [2, 32])
def test_arrays_that_were_split_off_own_their_memory(together: Make, batch_size: int) -> None:
    two = together(views, batch_size=batch_size)
    for result in two.results(tokens(2, 2, 1), tokens(4)):
        for array in (
            result["whole"],
            *result["views"],
            result["turned"],
            result["broadcast"],
            result["flat"],
        ):
            assert array.base is None
            assert array.flags.writeable


@pytest.mark.model
@pytest.mark.parametrize("batch_size", [2, 32])
def test_tensors_that_were_split_off_own_their_memory(together: Make, batch_size: int) -> None:
    torch = pytest.importorskip("torch")

    def compute(features: dict[str, Any]) -> Any:
        ids = features["ids"]
        return [
            ids * 2,
            *torch.stack([ids, ids]),
            (ids[:, :, None] * torch.ones(5)).transpose(1, 2),
            ids[:, :1].expand(-1, 7),
            ids.sum(1),
        ]

    two = together(compute, batch_size=batch_size, pad_token={"ids": 0})
    for result in two.results({"ids": torch.ones(3, 2)}, {"ids": torch.ones(1, 4)}):
        for tensor in result:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_callers_do_not_see_what_others_write_nor_in_one_output_what_they_write_to_another(
    together: Make,
) -> None:
    two = together(lambda features: {"one": features["ids"], "same": features["ids"]})
    first, second = two.results(tokens(2), tokens(2, first=3))
    first["one"][:] = 7
    assert first["same"].tolist() == [[1, 2]]
    assert (second["one"].tolist(), second["same"].tolist()) == ([[3, 4]], [[3, 4]])


@pytest.mark.model
def test_outputs_that_are_part_of_a_graph_reach_callers_without_it(together: Make) -> None:
    torch = pytest.importorskip("torch")
    weights = torch.ones(2, 5, requires_grad=True)
    two = together(
        lambda features: {"y": features["x"] @ weights, "all": [features["x"] @ weights]},
        batch_size=2,
    )
    results = two.results({"x": torch.ones(1, 2)}, {"x": torch.ones(1, 2)}, {"x": torch.ones(3, 2)})
    for result in [*results, two.fn({"x": torch.ones(1, 2)})]:
        for tensor in (result["y"], result["all"][0]):
            assert not tensor.requires_grad
            assert tensor.grad_fn is None
            assert tensor.tolist() == [[2.0] * 5] * len(tensor)


@pytest.mark.model
@pytest.mark.parametrize("widths", [(2,), (2, 3)])
def test_a_function_in_inference_mode_returns_tensors_that_may_be_changed_and_learned_from(
    together: Make, widths: tuple[int, ...]
) -> None:
    torch = pytest.importorskip("torch")

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is loaded at run time
    def compute(features: dict[str, Any]) -> Any:
        return features["x"] * 2

    two = together(compute, pad_token={"x": 0})
    for result in two.results(*({"x": torch.ones(1, width)} for width in widths)):
        result += 1
        assert not result.is_inference()
        (result * torch.ones(1, requires_grad=True)).sum().backward()


def test_a_copy_of_a_dataclass_is_no_neighbours(together: Make) -> None:
    two = together(lambda features: Plain(features["ids"], features["ids"].sum(1)))
    first, second = two.results(tokens(2), tokens(2, first=3))
    first.tokens = None
    assert second.tokens.tolist() == [[3, 4]]
    assert [each.name for each in dataclasses.fields(first)] == ["tokens", "pooled"]


class Sharing(MutableMapping[str, Any]):
    """A mapping with copies that share its entries."""

    __slots__ = ("entries",)

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_callers_share_no_entries_of_a_mapping(together: Make) -> None:
    three = together(lambda features: Sharing({"a": features["x"], "b": features["x"] * 2}))
    results = three.results(*[{"x": numpy.full((1, 1), number)} for number in range(3)])
    assert [(result["a"].item(), result["b"].item()) for result in results] == [
        (0, 0),
        (1, 2),
        (2, 4),
    ]


@dataclass
class Labelled:
    logits: Any

    def __post_init__(self) -> None:
        self.labels = self.logits.argmax(1)

    @functools.cached_property
    def most(self) -> Any:
        return self.logits.max(1)


class Noted(dict[str, Any]):
    sums: Any = None


def test_what_an_output_has_of_the_whole_batch_beside_its_fields_is_no_callers(
    together: Make,
) -> None:
    def labelled(features: dict[str, Any]) -> Any:
        output = Labelled(features["x"])
        assert len(output.most) == len(features["x"])
        return output

    def noted(features: dict[str, Any]) -> Any:
        output = Noted(x=features["x"])
        output.sums = features["x"].sum(1)
        return output

    calls = [{"x": numpy.full((1, 2), number)} for number in range(3)]
    for number, result in enumerate(together(labelled).results(*calls)):
        assert result.logits.tolist() == [[number] * 2]
        assert result.most.tolist() == [number]
        assert not hasattr(result, "labels")
    for number, result in enumerate(together(noted).results(*calls)):
        assert (type(result), result["x"].tolist(), result.sums) == (Noted, [[number] * 2], None)


def test_a_split_call_gets_the_mask_of_a_masked_array(together: Make) -> None:
    x = numpy.arange(5)
    masked = numpy.ma.masked_array
    (result,) = together(
        lambda features: masked(features["x"], features["x"] < 2), batch_size=2
    ).results({"x": x})
    assert repr(result) == repr(masked(x, x < 2))
