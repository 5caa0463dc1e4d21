"""Functions of several lists: with `unpack` each item is a tuple with one part for each list."""

from __future__ import annotations

import asyncio
import collections.abc
from typing import Any

import pytest

import batched


@batched.dynamically(unpack=True)
def score(queries: list[str], passages: list[str], *, scale: float = 1.0) -> list[float]:
    return [scale * (10 * len(q) + len(p)) for q, p in zip(queries, passages, strict=True)]


class Model:
    factor = 2

    @batched.dynamically(unpack=True)
    def score(self, a: list[int], b: list[int], *, plus: int = 0) -> list[int]:
        return [self.factor * x + y + plus for x, y in zip(a, b, strict=True)]

    @batched.aio.dynamically(unpack=True)
    async def later(self, a: list[int], b: list[int]) -> list[int]:
        return [self.factor * x + y for x, y in zip(a, b, strict=True)]


def test_parts_are_arguments_and_lists_are_of_tuples() -> None:
    assert score("a", "bc") == 12
    assert score("a", "bc", scale=2.0) == 24
    assert score([("a", "bc"), ("ab", "c")]) == [12, 21]
    assert score([("a", "bc")], scale=2.0) == [24]
    assert score("a", passages="bc") == 12  # type: ignore[call-overload]  # the types want both
    assert score.submit(("a", "bc"), scale=2.0).result() == 24
    assert list(score.map([("a", "bc"), ("ab", "c")])) == [12, 21]
    assert asyncio.run(score.acall("a", "bc")) == 12
    assert asyncio.run(score.acall([("a", "bc")])) == [12]


def test_methods_take_parts() -> None:
    model = Model()
    assert model.score(3, 4) == 10
    assert model.score([(3, 4), (1, 1)], plus=1) == [11, 4]
    assert Model.score(model, 3, 4) == 10  # type: ignore[call-overload]  # bound ones have types
    assert asyncio.run(model.later(3, 4)) == 10


def test_prepare_length_and_dedupe_get_one_tuple() -> None:
    seen: list[Any] = []

    def note(pair: tuple[int, int]) -> tuple[int, int]:
        seen.append(pair)
        return pair

    @batched.dynamically(
        unpack=True, prepare=note, dedupe=note, length=lambda pair: sum(note(pair))
    )
    def product(a: list[int], b: list[int]) -> list[int]:
        assert len({*zip(a, b, strict=True)}) == len(a), "each is computed once"
        return [x * y for x, y in zip(a, b, strict=True)]

    assert product([(2, 3), (4, 5), (2, 3)]) == [6, 20, 6]
    assert product(2, 3) == 6
    assert {*seen} == {(2, 3), (4, 5)}


@pytest.mark.parametrize(
    "arguments", [("q",), ("q", "p", "r"), (("q", "p"),), ([("q", "p"), ("q",)],), (["qp"],)]
)
def test_a_wrong_number_of_parts_is_refused(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"items of 2 parts, score\(queries, passages\) or score\("):
        score(*arguments)


def test_a_list_as_a_part_is_refused_with_the_way_out() -> None:
    fn: Any = score
    for arguments in ((["q1", "q2"], ["p1", "p2"]), ("q", ["p1", "p2"])):
        with pytest.raises(TypeError, match=r"one list of tuples, score\(\[\(queries, passages\)"):
            fn(*arguments)
    with pytest.raises(TypeError, match=r"one item is a tuple, score\.submit\(\(queries, passages"):
        fn.submit("q", "p")
    assert score.submit((["q"], "p")).result() == 11  # type: ignore[arg-type]  # as a list


def test_two_lists_without_unpack_are_refused_at_the_call() -> None:
    fn: Any = batched.dynamically(lambda items, other: [other for _ in items])
    with pytest.raises(TypeError, match=r"two lists of 2, .* decorate with unpack=True"):
        fn([1, 2], [3, 4])
    assert fn([1, 2], [3]) == [[3], [3]]
    assert fn([1, 2], other=[3, 4]) == [[3, 4], [3, 4]]
    with pytest.raises(TypeError, match="two lists of 33, .* shared, pass a tuple"):
        fn([1] * 33, other=[2] * 33)  # in two batches
    shared: Any = batched.dynamically(lambda items, *, other: [other[0] for _ in items])
    assert shared([1] * 33, other=[2] * 33) == [2] * 33


def test_a_wrong_number_of_lists_is_refused_at_decoration() -> None:
    def two(a: list[int], b: collections.abc.Iterable[int]) -> list[int]: ...  # type: ignore[empty-body]

    def shared(a: list[int], b: list[int] = []) -> list[int]: ...  # type: ignore[empty-body]  # noqa: B006

    with pytest.raises(TypeError, match="takes two lists, .* make it keyword-only"):
        batched.dynamically(two)
    with pytest.raises(TypeError, match="max_batch_tokens needs the length of each item; pass"):
        batched.dynamically(unpack=True, max_batch_tokens=9)(two)
    with pytest.raises(TypeError, match="has unpack=True, so it must take a list for each part"):
        batched.dynamically(unpack=True)(shared)
    assert batched.dynamically(shared) is not None
