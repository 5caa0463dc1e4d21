"""What keeps calls from sharing batches is told once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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


def embed(items: list[str]) -> list[str]:
    return items


class Model:
    @batched.dynamically
    def embed(self, items: list[str]) -> list[str]:
        return items


HANDLERS: Any = [
    lambda texts: Model().embed(texts),
    lambda texts: batched.dynamically(embed)(texts),
]


@pytest.mark.parametrize("handle", HANDLERS, ids=["instance", "function"])
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
    assert "embed in batches of one item: " in message
    assert "Decorate once, outside the function that handles a call" in message


def test_an_instance_for_each_call_is_told_also_while_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Scorer:
        @batched.dynamically
        def score(self, items: list[str]) -> list[str]:
            together.wait(BOUND)
            return items

    together = threading.Barrier(2)
    with caplog.at_level(logging.WARNING, "batched"), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: Scorer().score("text"), range(200)))
    assert "32 queues in a row have run " in caplog.text
