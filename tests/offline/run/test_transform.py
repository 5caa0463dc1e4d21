"""Requests of many rows, and the request for one of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched import offline
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Request, Scheduler
from batched.offline.run.transform import Transform, take_row
from batched.offline.run.verdicts import Row

pytestmark = pytest.mark.once


def lengths(texts: list[str], _: str = "") -> list[int]:
    return list(map(len, texts))


def rows(*texts: str) -> list[Row]:
    return [Row(number, (0,), {"text": text}, number) for number, text in enumerate(texts)]


def prepared(texts: str, **settings: Any) -> list[Request]:
    step = offline.Step(lengths, input="text", output="length", **settings)
    requests, dead = Transform(step).prepare(rows(*texts.split()))
    assert dead == []
    return requests


def pairs(request: Request) -> list[tuple[str, str]]:
    """Items, each with the text of its row."""
    items = [row.values["text"] for row in request.waker]
    return list(zip(request.items, items, strict=True))


def test_rows_that_may_share_a_batch_are_one_request() -> None:
    (request,) = prepared("bb a ccc")
    assert pairs(request) == [("bb", "bb"), ("a", "a"), ("ccc", "ccc")]


def test_rows_stay_beside_their_items_in_the_order_of_lengths() -> None:
    (request,) = prepared("bb a ccc", length=len)
    assert pairs(request) == [("ccc", "ccc"), ("bb", "bb"), ("a", "a")]
    assert request.lengths == [3, 2, 1]


def test_rows_of_one_key_are_one_request() -> None:
    requests = prepared("a1 b1 a2 b2", route=lambda text: text[0])
    assert [request.items for request in requests] == [["a1", "a2"], ["b1", "b2"]]


def test_rows_of_which_one_has_no_length_are_requests_of_their_own() -> None:
    def length(text: str) -> int:
        return len(text) if text != "b" else -1

    step = offline.Step(lengths, input="text", output="length", length=length)
    requests, dead = Transform(step).prepare(rows("a", "b", "c"))
    assert [request.items for request in requests] == [["a"], ["c"]]
    assert [(row.number, phase) for row, phase, _ in dead] == [(1, "preprocess")]


@pytest.mark.parametrize("length", [None, len])
@pytest.mark.parametrize("place", range(3))
def test_taking_one_waiting_row_leaves_a_request_for_all_other_waiting_rows(
    length: Any, place: int
) -> None:
    (request,) = prepared("dddd ccc bb a", length=length)
    scheduler = Scheduler(BatchPolicy(batch_size=1))
    scheduler.submit(request, 0.0)
    assert scheduler.take(0.0) is not None
    left = pairs(request)[1:]
    row, rest = take_row(request, place)
    assert rest is not None
    assert row.values["text"] == left.pop(place)[1]
    assert pairs(rest) == left
    assert rest.lengths == (None if length is None else [len(item) for item, _ in left])


def test_taking_the_last_waiting_row_leaves_no_request() -> None:
    (request,) = prepared("a")
    row, rest = take_row(request, 0)
    assert (row.values["text"], rest) == ("a", None)
