"""What keeps calls from sharing batches is told once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import batched
from stage import BOUND, Gate


@pytest.mark.parametrize(
    ("seeds", "told"), [(range(50), True), ([0, 1] * 25, False), (range(20), False)]
)
def test_an_argument_that_differs_in_each_call_is_named_once(
    seeds: Iterable[int], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    @batched.dynamically
    def draw(items: list[str], seed: int = 0, scale: float = 1.0) -> list[str]:
        return gate(items)

    with caplog.at_level(logging.WARNING, "batched"):
        futures = [draw.submit("first")]
        assert gate.entered.wait(BOUND)
        futures += [draw.submit("item", seed=seed) for seed in seeds]
        gate.opened.set()
        for future in futures:
            future.result(BOUND)
        draw.shutdown()
    messages = [each.getMessage() for each in caplog.records]
    assert len(messages) == told
    assert all("these differ in seed." in each for each in messages)


def test_items_too_long_for_a_batch_of_two_are_nothing_to_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fn = batched.dynamically(length=len, max_batch_tokens=3)(lambda items: items)
    with caplog.at_level(logging.WARNING, "batched"):
        assert fn(["long"] * 100) == ["long"] * 100
    assert not caplog.records
    fn.shutdown()


class Model:
    @batched.dynamically
    def embed(self, items: list[str]) -> list[str]:
        return items


def by_an_instance(texts: Any) -> None:
    Model().embed(texts)


def by_a_function(texts: Any) -> None:
    @batched.dynamically
    def embed(items: list[str]) -> list[str]:
        return items

    embed(texts)


@pytest.mark.parametrize("handle", [by_an_instance, by_a_function])
def test_a_queue_for_each_call_is_told_once(
    handle: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "batched"):
        for _ in range(40):
            handle(["one", "two"])
        assert caplog.records == [], "larger batches are nothing to tell"
        for _ in range(80):
            handle("text")
    (message,) = [each.getMessage() for each in caplog.records]
    assert message.startswith("32 queues in a row have run ")
    assert ".embed in batches of one item: " in message
    assert "Decorate once, outside the function that handles a call" in message
