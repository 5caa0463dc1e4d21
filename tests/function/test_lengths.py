"""`length` and `max_batch_tokens`: like lengths run together, and results keep their order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import batched


def test_a_list_call_runs_longest_first_and_is_answered_in_its_own_order() -> None:
    chance, batches = random.Random(0), list[list[str]]()

    @batched.dynamically(batch_size=8, length=len)
    def fn(texts: list[str]) -> list[str]:
        batches.append(texts.copy())
        return [text.upper() for text in texts]

    texts = [f"{number:0{chance.randint(4, 103)}}x" for number in range(50)]
    assert fn(texts) == [text.upper() for text in texts]
    lengths = [len(text) for batch in batches for text in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert fn(["only"]) == ["ONLY"]


def test_the_budget_holds_for_own_lengths_of_items_unless_there_is_the_setting_length() -> None:
    sizes: list[int] = []

    def fn(texts: list[str]) -> list[str]:
        sizes.append(len(texts))
        return texts

    texts = ["long" * 10, "long" * 20]
    settings: Any
    for settings in ({}, {"length": lambda _: 0.3}):
        assert batched.dynamically(max_batch_tokens=2, **settings)(fn)(texts) == texts
    assert sizes == [1, 1, 2]


@pytest.mark.parametrize("number", [np.uint8, np.float32])
def test_lengths_are_numbers_of_any_kind_and_measured_by_the_caller(number: Any) -> None:
    threads: set[int] = set()

    def length(text: str) -> Any:
        threads.add(threading.get_ident())
        return number(len(text))

    fn = batched.dynamically(length=length)(lambda items: items)
    assert fn(["four", "eightlet"]) == ["four", "eightlet"]
    assert fn.stats.padding_waste == 0.25
    assert threads == {threading.get_ident()}


def test_an_item_without_len_needs_the_setting_length() -> None:
    fn: Any = batched.dynamically(max_batch_tokens=10, name="fn")(lambda items: items)
    with pytest.raises(TypeError, match=r"fn has max_batch_tokens, .* of a int; pass length="):
        fn(3)
    assert fn("text") == "text"


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [
        (lambda item: -1, ValueError, "length must return a number from 0 to [0-9]+, got -1"),
        (lambda item: None, TypeError, "length must return a number of at least 0, got None"),
        (lambda item: float("inf"), TypeError, "a number of at least 0, got inf"),
        (lambda item: 10**400, ValueError, "a number from 0 to [0-9]+, got 1000"),
    ],
)
def test_an_item_without_a_length_fails_alone(
    length: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    fn: Any = batched.dynamically(length=lambda item: length(item) if item == "odd" else 1)(
        lambda items: items
    )
    for call in (fn, fn.submit, lambda item: fn(["even", item])):
        with pytest.raises(error, match=text):
            call("odd")
    assert fn("even") == "even"
    assert fn.stats.calls == 1
