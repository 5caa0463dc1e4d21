"""What keeps calls from sharing batches is told once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import batched
from stage import BOUND, Gate


def run_in_groups(fn: Any, gate: Gate, arguments: list[dict[str, Any]]) -> None:
    """Let calls with these arguments wait together, and then run."""
    first = fn.submit("first")
    assert gate.entered.wait(BOUND)
    futures = [fn.submit("item", **each) for each in arguments]
    gate.opened.set()
    for future in (first, *futures):
        future.result(BOUND)
    fn.shutdown()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([{"seed": number} for number in range(50)], True),
        ([{"seed": number % 2} for number in range(50)], False),
        ([{"seed": number} for number in range(20)], False),
    ],
)
def test_an_argument_that_differs_in_each_call_is_named_once(
    arguments: list[dict[str, Any]], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    def draw(items: list[str], seed: int = 0, scale: float = 1.0) -> list[str]:
        return gate(items)

    with caplog.at_level(logging.WARNING, "batched"):
        run_in_groups(batched.dynamically(draw), gate, arguments)
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


def test_an_instance_for_each_call_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "batched"):
        for _ in range(40):
            Model().embed(["one", "two"])
        assert caplog.records == [], "larger batches are nothing to tell"
        for _ in range(80):
            Model().embed("text")
    (message,) = [each.getMessage() for each in caplog.records]
    assert message.startswith("32 queues in a row have run Model.embed in batches of one item:")


def test_a_function_decorated_for_each_call_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def handle(*texts: str) -> None:
        @batched.dynamically
        def embed(items: list[str]) -> list[str]:
            return items

        embed([*texts])

    with caplog.at_level(logging.WARNING, "batched"):
        for _ in range(40):
            handle("one", "two")
        assert caplog.records == [], "larger batches are nothing to tell"
        for _ in range(80):
            handle("text")
    (message,) = [each.getMessage() for each in caplog.records]
    assert "Decorate once, outside the function that handles a call" in message
