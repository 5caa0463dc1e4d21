"""`length` and `max_batch_tokens`: like lengths run together, and results keep their order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import batched
from stage import BOUND, wait_until


class Model:
    """A batch function that records its batches, and waits in each until `go` is set."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.go = threading.Event()

    def __call__(self, texts: list[str]) -> list[str]:
        self.batches.append(texts.copy())
        assert self.go.wait(BOUND), "`go` was not set"
        return [text.upper() for text in texts]


def backlog(model: Model, fn: Any, texts: list[str]) -> list[Future[str]]:
    """Return futures of `texts`, which all wait behind a first item."""
    fn.submit("")
    wait_until(lambda: len(model.batches) == 1)
    futures = [fn.submit(text) for text in texts]
    model.go.set()
    return futures


def words(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return ["x" * chance.randint(1, 100) for _ in range(count)]


def test_a_list_call_runs_longest_first_and_is_answered_in_its_own_order() -> None:
    model = Model()
    model.go.set()
    fn = batched.dynamically(batch_size=8, length=len)(model)
    texts = [f"{number:0{len(word) + 3}}" for number, word in enumerate(words(50))]
    assert fn(texts) == texts
    lengths = [len(text) for batch in model.batches for text in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert fn(["only"]) == ["ONLY"]


def test_padded_batches_stay_within_the_budget() -> None:
    model = Model()
    fn = batched.dynamically(batch_size=1000, max_batch_tokens=300, small_batch_threshold=1000)(
        model
    )
    texts = words(120, seed=1)
    futures = backlog(model, fn, texts)
    assert [future.result(BOUND) for future in futures] == [text.upper() for text in texts]
    assert all(len(batch) * max(map(len, batch)) <= 300 for batch in model.batches[1:])


def test_an_item_beyond_the_budget_runs_alone() -> None:
    model = Model()
    fn = batched.dynamically(max_batch_tokens=10)(model)
    futures = backlog(model, fn, ["aaa", "b" * 50, "ccc", "dd"])
    assert futures[1].result(BOUND) == "B" * 50
    assert [future.result(BOUND) for future in futures if future is not futures[1]] == [
        "AAA",
        "CCC",
        "DD",
    ]
    assert ["b" * 50] in model.batches


def test_the_setting_length_replaces_the_own_length_of_items() -> None:
    model = Model()
    fn = batched.dynamically(max_batch_tokens=2, length=lambda _: 0.3)(model)
    backlog(model, fn, ["long" * 10, "long" * 20])[1].result(BOUND)
    assert [len(batch) for batch in model.batches] == [1, 2]


def test_an_item_without_len_needs_the_setting_length() -> None:
    fn: Any = batched.dynamically(max_batch_tokens=10, name="fn")(lambda items: items)
    with pytest.raises(TypeError, match=r"fn has max_batch_tokens, .* takes no int; pass length="):
        fn(3)
    assert fn("text") == "text"


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [
        (lambda item: 1 / 0, ZeroDivisionError, "division"),
        (lambda item: -1, ValueError, "length must return a number from 0 to [0-9]+, got -1"),
        (lambda item: None, TypeError, "length must return a number of at least 0, got None"),
        (lambda item: float("inf"), TypeError, "a number of at least 0, got inf"),
        (
            lambda item: 10**400,
            ValueError,
            "length must return a number from 0 to [0-9]+, got 1000",
        ),
    ],
)
def test_an_item_without_a_length_fails_alone(
    length: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    fn = batched.dynamically(length=lambda item: length(item) if item == "odd" else 1, name="fn")(
        lambda items: items
    )
    with pytest.raises(error, match=text):
        fn("odd")
    with pytest.raises(error, match=text):
        fn(["even", "odd"])
    with pytest.raises(error, match=text):
        fn.submit("odd")
    assert fn("even") == "even"
    assert fn.stats.calls == 1


@pytest.mark.parametrize("length", [lambda: 1, lambda item, more: 1])
def test_a_length_of_another_form_is_told_at_decoration(length: Any) -> None:
    with pytest.raises(TypeError, match="length must be a plain function of an item that returns"):
        batched.dynamically(length=length)


@pytest.mark.parametrize("number", [np.uint8, np.float32])
def test_numbers_of_numpy_are_lengths(number: Any) -> None:
    fn = batched.dynamically(length=lambda item: number(len(item)))(lambda items: items)
    assert fn(["four", "eightlet"]) == ["four", "eightlet"]
    assert fn.stats.padding_waste == 0.25


def test_lengths_are_measured_by_the_callers() -> None:
    threads: set[int] = set()

    def length(_: str) -> int:
        threads.add(threading.get_ident())
        return 1

    fn = batched.dynamically(length=length)(lambda items: items)
    fn(["a", "b"])
    assert threads == {threading.get_ident()}


def test_padding_is_counted() -> None:
    fn = batched.dynamically(length=len)(lambda items: items)
    fn("alone")
    assert fn.stats.padding_waste == 0.0
    fn(["four", "eightlet"])
    assert fn.stats.padding_waste == pytest.approx(4 / 21)
    assert batched.dynamically(lambda items: items).stats.padding_waste == 0.0
