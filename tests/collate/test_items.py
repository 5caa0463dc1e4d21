"""Batches of items: the list that the function gets, and one result for each item."""

from __future__ import annotations

import os
import sys
import types
from collections import deque
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any, NamedTuple

import pytest

import batched
from batched._collate.arguments import Arguments
from batched._collate.items import ItemCollator
from batched._core.scheduler import Batch, Request, Slice
from batched.errors import BatchFunctionError, BatchSizeMismatch
from stage import BOUND, Gate

pytestmark = pytest.mark.once

NO_ARGUMENTS = Arguments((), {})


ITEMS = ItemCollator("shop.embed")


def calls(*sizes: int) -> list[Slice]:
    ends = zip(sizes, accumulate(sizes), strict=True)
    numbers = [list(range(end - size, end)) for size, end in ends]
    return [(Request(each, len(each), NO_ARGUMENTS, listed=True), 0, len(each)) for each in numbers]


def rows_of(output: Any, *sizes: int) -> list[Any]:
    return [row for part in ITEMS.split(output, calls(*sizes), None) for row in part]


def test_the_list_that_the_function_gets_is_its_own() -> None:
    for sizes in ((3,), (1,), (2, 1)):
        slices = calls(*sizes)
        (batch,), _, _ = ITEMS.collate(slices, Batch(slices, sum(sizes), "full", 0.0))
        assert type(batch) is list
        batch.clear()
        assert [value for one, _, _ in slices for value in one.items] == list(range(sum(sizes)))


@pytest.mark.parametrize("output", [["a", "b", "c"], ("a", "b", "c"), deque("abc")])
def test_every_call_gets_its_own_results_in_order(output: Any) -> None:
    assert ITEMS.split(output, calls(2, 1), None) == [["a", "b"], ["c"]]
    assert ITEMS.split(output, calls(1, 1, 1), None) == [["a"], ["b"], ["c"]]
    (part,) = ITEMS.split(output, calls(3), None)
    assert part == ["a", "b", "c"]
    assert part is not output, "the function may keep its list, and write to it"


@pytest.mark.parametrize("result", [None, False, 0, "", [], "text", {"a": 1}, BatchSizeMismatch])
def test_any_object_but_an_exception_is_a_result(result: Any) -> None:
    first, second = rows_of([result, 1], 1, 1)
    assert first is result
    assert second == 1


def test_a_list_gets_the_first_exception_in_its_place() -> None:
    first, second = ValueError(), KeyError()
    assert ITEMS.split([1, first, second], calls(3), None) == [first]


@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "U3", "object", pytest.param("tensor", marks=pytest.mark.model)]
)
def test_an_array_has_one_result_in_each_row(dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    output = numpy.arange(6).reshape(3, 2)
    if dtype == "tensor":
        output = pytest.importorskip("torch").from_numpy(output)
    else:
        output = output.astype(dtype)
    rows = rows_of(output, 2, 1)
    assert [row.tolist() for row in rows] == output.tolist()
    assert all(type(row) is type(output) and row.dtype == output.dtype for row in rows)
    assert [type(row) for row in rows_of(output[:, 0], 2, 1)] == [type(output[0, 0])] * 3


@pytest.mark.parametrize(("sizes", "returned"), [((3,), 4), ((1, 2), 2), ((1,), 0), ((1,), 8)])
@pytest.mark.parametrize("make", [list, deque, "array"])
def test_a_wrong_number_of_results_is_an_error_with_both_numbers(
    sizes: tuple[int, ...], returned: int, make: Any
) -> None:
    if make == "array":
        make = pytest.importorskip("numpy").asarray
    with pytest.raises(BatchSizeMismatch) as caught:
        ITEMS.split(make(range(returned)), calls(*sizes), None)
    assert (caught.value.expected, caught.value.actual) == (sum(sizes), returned)
    squeezed = " (squeeze() of one row removes its axis)" if returned == 8 else ""
    assert str(caught.value) == (
        f"shop.embed was given {sum(sizes)} items and returned {returned} results; it must return "
        f"one per item, in order{squeezed}"
    )


NO_ROWS: list[Any] = [
    *(None, "ab", b"ab", bytearray(b"ab"), memoryview(b"ab"), 2, object(), list),
    *({0: "a", 1: "b"}, {"a", "b"}, (letter for letter in "ab"), {0: "a", 1: "b"}.values()),
]


@pytest.mark.parametrize("output", NO_ROWS, ids=lambda output: type(output).__name__)
def test_an_output_without_results_in_order_is_an_error_with_its_type(output: Any) -> None:
    for sizes in ((2,), (1, 1)):
        with pytest.raises(BatchFunctionError) as caught:
            ITEMS.split(output, calls(*sizes), None)
        assert type(caught.value) is BatchFunctionError
        assert str(caught.value) == (
            f"shop.embed returned {type(output).__name__}; it gets a list of items, and must "
            "return a list, tuple, array or tensor with one entry per item"
        )


class Peak(NamedTuple):
    values: Any
    indices: Any


SIZES = (2,), (1, 1), (1,), (3,)


@pytest.mark.parametrize(
    "output",
    [
        Peak([1, 2], [3, 4]),
        os.stat_result(range(10)),
        pytest.param("torch", marks=pytest.mark.model, id="torch.max"),
    ],
    ids=lambda output: type(output).__name__,
)
def test_fields_of_a_named_tuple_are_never_taken_for_rows(output: Any) -> None:
    if output == "torch":
        torch = pytest.importorskip("torch")
        output = torch.max(torch.ones(2, 3), 1)
    several = rf"^shop\.embed returned a {type(output).__name__} of several outputs, not one entry"
    for sizes in SIZES:
        with pytest.raises(BatchFunctionError, match=several):
            ITEMS.split(output, calls(*sizes), None)


@pytest.mark.parametrize("library", ["", "numpy", pytest.param("torch", marks=pytest.mark.model)])
def test_several_outputs_are_never_taken_for_rows(library: str) -> None:
    make: Any = pytest.importorskip(library).ones if library else lambda size: [1.0] * size
    for sizes, more in product(SIZES, (True, False)):
        output = (make(sum(sizes)), make(sum(sizes))) if more else (None, make(3))
        with pytest.raises(BatchFunctionError) as caught:
            ITEMS.split(output, calls(*sizes), None)
        assert str(caught.value) == (
            "shop.embed returned a tuple of several outputs, not one entry per item; return "
            "list(zip(*output)), or list(output) if it has one entry per item"
        )


def test_a_tuple_of_single_values_is_rows(library: Any) -> None:
    row = library.ones(3).sum()
    assert rows_of((row, row), 1, 1) == [3.0, 3.0]


@pytest.mark.parametrize("sizes", [(1,), (1, 1)])
def test_an_array_without_axes_is_a_single_value(library: Any, sizes: tuple[int, ...]) -> None:
    single = r"^shop.embed returned a single value; it must return one per item \("
    with pytest.raises(BatchFunctionError, match=single):
        ITEMS.split(library.ones(()), calls(*sizes), None)
    if library.__name__ == "numpy":
        with pytest.raises(BatchFunctionError, match=r"^shop\.embed returned (a single|float64)"):
            ITEMS.split(library.float64(1.0), calls(*sizes), None)


@pytest.mark.parametrize("layout", [lambda buffer: buffer[:], list], ids=["array", "list"])
def test_a_caller_never_sees_memory_that_the_function_uses_again(
    library: Any, layout: Callable[[Any], Any]
) -> None:
    for sizes in ((3,), (1, 1, 1), (2, 1)):
        output = layout(library.ones((3, 2)))
        rows = rows_of(output, *sizes)
        for row in output:
            row[:] = 7
        assert [row.tolist() for row in rows] == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("company", [False, True])
def test_a_function_that_returns_its_items_gives_no_caller_memory_of_another(
    library: Any, company: bool
) -> None:
    gate = Gate()
    with batched.dynamically(gate) as fn:
        first = fn.submit(None)
        assert gate.entered.wait(BOUND)
        given = [library.ones(2) for _ in range(1 + company)]
        waiting = [fn.submit(item) for item in given]
        gate.opened.set()
        assert first.result(BOUND) is None
        results = [each.result(BOUND) for each in waiting]
    for item in given:
        item[:] = 7
    assert [result.tolist() for result in results] == [[1.0, 1.0]] * len(given)


def size_of_memory(row: Any) -> int:
    """Return the size of the memory that `row` keeps alive, in bytes."""
    if hasattr(row, "untyped_storage"):
        return int(row.untyped_storage().nbytes())
    return int((row if row.base is None else row.base).nbytes)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
@pytest.mark.parametrize(
    "make",
    [
        lambda output: output,
        list,
        lambda output: output.T[:3],
        lambda output: [output[0], *output[:2]],
    ],
    ids=["array", "list of views", "columns", "one row twice"],
)
def test_rows_own_their_memory_if_calls_share_a_batch(
    library: Any, sizes: tuple[int, ...], make: Callable[[Any], Any]
) -> None:
    output = make(library.arange(30.0).reshape(3, 10))
    expected = [row.tolist() for row in output]
    rows = rows_of(output, *sizes)
    assert all(size_of_memory(row) == row.nbytes for row in rows)
    assert [row.tolist() for row in rows] == expected
    rows[0][:] = 7
    assert [row.tolist() for row in rows[1:]] == expected[1:]


@pytest.mark.model
@pytest.mark.parametrize("sizes", [(2,), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("as_list", [False, True])
def test_results_of_inference_mode_may_be_changed_and_learned_from(
    sizes: tuple[int, ...], as_list: bool
) -> None:
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        output = torch.ones(sum(sizes), 2)
        output = list(output) if as_list else output
    for row in rows_of(output, *sizes):
        row += 1
        assert not row.is_inference()
        (row * torch.ones(1, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("state", ["being imported", "absent"])
def test_neither_numpy_nor_torch_is_needed(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    for name in ("numpy", "torch"):
        module = types.ModuleType(name)  # as if another thread were importing it
        monkeypatch.setitem(sys.modules, name, module)
        if state == "absent":
            monkeypatch.delitem(sys.modules, name)
    assert ITEMS.split(["a", "b"], calls(1, 1), None) == [["a"], ["b"]]
