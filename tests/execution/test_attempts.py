"""Attempts at a batch, without a queue, waker, lock or clock."""

from __future__ import annotations

import pytest

from batched._collate.arguments import Arguments
from batched._collate.items import ItemCollator
from batched._core.scheduler import Batch, Request
from batched._execution.attempts import passes
from batched._execution.execution import Execution, is_failure
from batched._execution.memory import is_out_of_memory

NO_ARGUMENTS = Arguments((), {})


class Model:
    """Its method has memory for eight items, and fails for some of them."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.calls = 0

    def function(self, items: list[int]) -> list[int]:
        self.calls += 1
        if len(items) > 8:
            raise MemoryError("too many")
        for item in items:
            if item in self.bad:
                raise ValueError(f"bad row {item}")
        return [item * 10 for item in items]


METHOD = Execution(Model.function, ItemCollator("fn"), splits=is_out_of_memory, isolates=is_failure)


def batch_of(*requests: Request) -> Batch:
    slices = [(request, 0, request.size) for request in requests]
    return Batch(slices, sum([request.size for request in requests]), "full", 0.0)


def rows(count: int, owner: object = None) -> Batch:
    """Return a batch of one call for each row, without a waker."""
    return batch_of(*(Request(row, 1, NO_ARGUMENTS, owner=owner) for row in range(count)))


@pytest.mark.parametrize("bad", range(20))
def test_twenty_rows_with_one_bad_and_memory_for_eight_take_13_calls_or_fewer(bad: int) -> None:
    model = Model({bad})
    batch = rows(20, model)
    slices, results, _ = METHOD.run(batch)
    found = {request.items: result for (request, _, _), result in zip(slices, results, strict=True)}
    assert repr(found.pop(bad)) == f"ValueError('bad row {bad}')"
    assert found == {row: row * 10 for row in range(20) if row != bad}
    assert model.calls == batch.attempts <= 13
    assert not batch.fitted


def test_a_call_sorted_by_length_gets_the_error_of_its_first_bad_item() -> None:
    lengths, order = [9, 8, 7, 6], [3, 2, 1, 0]  # the longest came last
    call = Request([3, 2, 1, 0], 4, NO_ARGUMENTS, None, True, Model({3, 0}), lengths, order)
    errors = [result for result in METHOD.run(batch_of(call))[1] if isinstance(result, ValueError)]
    assert [str(error) for error in errors] == ["bad row 0", "bad row 3"]


def test_a_test_of_an_error_that_fails_counts_as_false() -> None:
    assert not passes(lambda error: bool(1 / 0), ValueError())
