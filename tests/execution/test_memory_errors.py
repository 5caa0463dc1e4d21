"""Batches that run out of memory: they run again in parts, and a single item fails alone."""

from __future__ import annotations

import asyncio
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import batched
from batched._execution.exceptions import trim_traceback
from batched._execution.memory import drop_locals, free_cache, is_out_of_memory
from feature_stage import Make, Together
from stage import BOUND, Gate

FITS = 8
"""Number of rows that fit the memory of these functions."""

Raise = Callable[[], BaseException]


def torch_error() -> BaseException:
    torch = pytest.importorskip("torch")
    error: BaseException = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB."
    )
    return error


ERRORS: list[Any] = [
    pytest.param(lambda: MemoryError(), id="MemoryError"),
    pytest.param(
        lambda: RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), id="RuntimeError"
    ),
    pytest.param(torch_error, id="torch", marks=pytest.mark.model),
]


def too_large(error: Raise, most: int = FITS) -> Callable[..., Any]:
    error()  # skips the test here if it takes torch and there is none

    def compute(features: dict[str, Any]) -> Any:
        if len(features["x"]) > most:
            raise error()
        return {"x": features["x"] * 2, "sum": features["x"].sum(1)}

    return compute


def attempts_above(together: Together, rows: int) -> int:
    return sum(len(features["x"]) > rows for features in together.seen)


@pytest.mark.parametrize("error", ERRORS)
def test_a_call_that_is_too_large_is_served_in_parts(together: Make, error: Raise) -> None:
    one = together(too_large(error), batch_size=64)
    x = numpy.arange(192).reshape(64, 3)
    result = one.fn({"x": x})
    assert (result["x"] == x * 2).all()
    assert (result["sum"] == x.sum(1)).all()
    stats = one.fn.stats
    assert (stats.total_batches, stats.total_processed, stats.errors) == (1, 64, 0)
    assert stats.memory_errors == attempts_above(one, FITS) > 0


def test_each_part_is_padded_only_as_far_as_it_has_to_be(together: Make) -> None:
    many = together(lambda features: too_large(MemoryError, 1)({"x": features["x"]}))
    results = many.results(*({"x": numpy.ones((1, width), int)} for width in (2, 5, 3)))
    assert [result["x"].shape for result in results] == [(1, 2), (1, 5), (1, 3)]
    assert sorted(features["x"].shape for features in many.seen if len(features["x"]) == 1) == [
        (1, 2),
        (1, 3),
        (1, 5),
    ]


def test_a_row_that_does_not_fit_fails_alone_with_the_original_error(together: Make) -> None:
    error = MemoryError("this one")

    def compute(features: dict[str, Any]) -> Any:
        if (features["x"] == 7).any():
            raise error
        return features["x"] * 2

    many = together(compute)
    calls = [{"x": numpy.array([[number]])} for number in range(10)]
    answers = many.answers(*calls)
    assert answers.pop(7).args == error.args
    assert [answer.tolist() for answer in answers] == [
        [[2 * number]] for number in range(10) if number != 7
    ]
    assert many.fn.stats.errors == 1
    assert many.fn({"x": numpy.array([[1]])}).tolist() == [[2]]


def test_a_batch_that_is_too_large_fails_with_on_oom_raise(together: Make) -> None:
    error = MemoryError("as it is")
    two = together(too_large(lambda: error), on_oom="raise")
    with pytest.raises(MemoryError) as caught:
        two.fn({"x": numpy.ones((9, 1))})
    assert caught.value.args == error.args
    for answer in two.answers({"x": numpy.ones((5, 1))}, {"x": numpy.ones((4, 1))}):
        assert type(answer) is MemoryError
    assert len(two.seen) == 2
    assert two.fn.stats.memory_errors == 0


def test_an_output_that_is_too_large_splits_the_batch(together: Make) -> None:
    class Huge(numpy.ndarray[Any, Any]):
        def copy(self, order: Any = "C") -> Any:
            raise MemoryError

    def compute(features: dict[str, Any]) -> Any:
        doubled = features["x"] * 2
        return doubled.view(Huge) if len(doubled) > 2 else doubled

    four = together(compute)
    results = four.results(*({"x": numpy.array([[number]])} for number in range(4)))
    assert [result.tolist() for result in results] == [[[0]], [[2]], [[4]], [[6]]]


@pytest.mark.usefixtures("uncollected")
def test_a_failed_attempt_is_freed_before_the_next(together: Make) -> None:
    alive: list[weakref.ref[Any]] = []

    def compute(features: dict[str, Any]) -> Any:
        assert [reference() is None for reference in alive] == [True] * len(alive), (
            "the next attempt has less memory than there is"
        )
        two.seen.clear()
        work = numpy.ones(1000)
        alive.extend([weakref.ref(work), weakref.ref(features["x"])])
        if len(features["x"]) > 1:
            try:
                raise ValueError("on the way")
            except ValueError:
                raise MemoryError from None
        alive.clear()
        return features["x"] + 1

    two = together(compute)
    results = two.results(*({"x": numpy.array([[number, number]])} for number in range(5)))
    assert [result.tolist() for result in results] == [[[number + 1.0] * 2] for number in range(5)]


# ---------------------------------------------------------------- the plain variant


def test_the_plain_variant_splits_batches_too_if_asked() -> None:
    sizes: list[int] = []

    @batched.dynamically(on_oom="split", batch_size=64)
    def fn(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > FITS:
            raise MemoryError
        return [item * 2 for item in items]

    with fn:
        assert fn(list(range(64))) == [item * 2 for item in range(64)]
        before = sum(size > FITS for size in sizes)
        assert fn(list(range(64))) == [item * 2 for item in range(64)]
        assert sum(size > FITS for size in sizes) == before == fn.stats.memory_errors


# ---------------------------------------------------------------- how it is recognised

MESSAGES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.98 GiB",
    "HIP error: out of memory",
    "MPS backend out of memory (MPS allocated: 17.76 GB, other allocations: 400 KB)",
    "XPU out of memory. Tried to allocate 20.00 MiB.",
    "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_torch_about_memory_are_recognised(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message)), "quoted, perhaps"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "The size of tensor a (3) must match the size of tensor b (4) at "
            "non-singleton dimension 1"
        ),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("the queue is out of memory slots"),
        RuntimeError(),
        ValueError("too much"),
        KeyError("memory"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:20]}",
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_errors_of_numpy_and_python_are_recognised() -> None:
    with pytest.raises(MemoryError) as of_numpy:
        numpy.empty(2**60, numpy.int8)
    assert is_out_of_memory(of_numpy.value)
    with pytest.raises(MemoryError) as of_python:
        bytes(2**60)
    assert is_out_of_memory(of_python.value)


@pytest.mark.model
def test_the_errors_of_torch_are_recognised() -> None:
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("no message to speak of"))
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.int8)
    assert is_out_of_memory(real.value)


class OutOfMemoryError(RuntimeError):
    """Error with the name of torch's error."""


def test_the_error_of_torch_is_known_by_its_name() -> None:
    assert is_out_of_memory(OutOfMemoryError("CUDA ran out of something"))


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("mps", [False, True])
def test_the_caches_that_are_in_use_are_emptied(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool
) -> None:
    emptied: list[str] = []
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: cuda, empty_cache=lambda: emptied.append("cuda")
        ),
        mps=SimpleNamespace(empty_cache=lambda: emptied.append("mps")),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    free_cache()
    assert emptied == ["cuda"] * cuda + ["mps"] * mps


def test_without_torch_there_is_no_cache_to_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    free_cache()


class Work:
    """Object that an attempt has in memory."""


def lines_of(error: BaseException) -> list[str]:
    """Return the names of the functions in its traceback."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


def test_locals_below_an_error_are_freed_and_its_lines_are_kept() -> None:
    alive: list[weakref.ref[Work]] = []

    def first() -> None:
        work = Work()
        alive.append(weakref.ref(work))
        raise MemoryError("first")

    def fail() -> None:
        work = Work()
        alive.append(weakref.ref(work))
        try:
            first()
        except MemoryError as error:
            raise RuntimeError("CUDA out of memory") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    error = trim_traceback(caught.value)
    assert [reference() is None for reference in alive] == [False, False]
    drop_locals(error)
    assert [reference() is None for reference in alive] == [True, True]
    assert error.__cause__ is not None
    assert (lines_of(error), lines_of(error.__cause__)) == (["fail"], ["fail", "first"])


def test_the_frame_of_a_suspended_generator_is_not_cleared() -> None:
    def generator() -> Iterator[BaseException | int]:
        try:
            raise MemoryError
        except MemoryError as error:
            yield error
        yield 2

    going_on = generator()
    first: Any = next(going_on)

    def fail() -> None:
        try:
            raise first
        finally:
            assert lines_of(first) == ["fail", "generator"]

    with pytest.raises(MemoryError) as caught:
        fail()
    drop_locals(trim_traceback(caught.value))
    assert lines_of(first) == ["fail"]
    with pytest.raises(MemoryError) as caught:
        raise MemoryError from first
    drop_locals(caught.value)
    assert next(going_on) == 2


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("coroutine", [True, False])
def test_an_item_that_runs_out_of_memory_alone_keeps_no_memory_and_shows_every_line(
    coroutine: bool,
) -> None:
    alive: list[weakref.ref[Work]] = []
    gate = Gate()

    def allocate(items: list[int]) -> None:
        assert [reference() is None for reference in alive] == [True] * len(alive)
        work = Work()
        alive.append(weakref.ref(work))
        if 0 in items:
            raise MemoryError

    def compute(items: list[int]) -> list[int]:
        gate(items)
        allocate(items)
        return items

    async def compute_async(items: list[int]) -> list[int]:
        allocate(items)
        return items

    async def answers(fn: Any) -> list[Any]:
        return await asyncio.gather(*map(fn, range(4)), return_exceptions=True)

    if coroutine:
        fn: Any = batched.aio.dynamically(on_oom="split", batch_size=4)(compute_async)
        error, *results = asyncio.run(answers(fn))
    else:
        fn = batched.dynamically(on_oom="split")(compute)
        fn.submit("busy")
        assert gate.entered.wait(BOUND)
        futures = [fn.submit(number) for number in range(4)]
        gate.opened.set()
        error = futures[0].exception(BOUND)
        results = [future.result(BOUND) for future in futures[1:]]
        fn.shutdown()
    assert results == [1, 2, 3]
    assert type(error) is MemoryError
    assert lines_of(error)[-2:] == ["compute_async" if coroutine else "compute", "allocate"]
    assert coroutine or lines_of(error)[0] == "compute"


def test_rows_run_apart_in_more_padding_that_run_out_of_memory_say_nothing_of_the_batch(
    together: Make,
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if features["x"].shape[1] > 8:
            raise MemoryError
        assert features["x"].shape[1] == 8
        return features["x"] * 2

    two = together(compute, pad_to_multiple_of=8)
    results = two.results({"x": numpy.ones((1, 3), int)}, {"x": numpy.ones((2, 5), int)})
    assert [len(result) for result in results] == [1, 2]
    assert two.fn.stats.memory_errors == 0


def test_rows_run_apart_that_run_out_of_memory_are_run_in_smaller_parts(together: Make) -> None:
    tried: list[tuple[int, ...]] = []

    def compute(features: dict[str, Any]) -> Any:
        tried.append(features["x"].shape)
        if len(tried) == 2:
            raise MemoryError
        return features["x"] * 2

    three = together(compute)
    calls = [{"x": numpy.ones((1, width), int)} for width in (3, 5, 3)]
    results = three.results(*calls)
    assert [result.shape for result in results] == [(1, 3), (1, 5), (1, 3)]
    assert tried == [(3, 5), (2, 3), (1, 3), (1, 3), (1, 5)]
    assert three.fn.stats.memory_errors == 1
