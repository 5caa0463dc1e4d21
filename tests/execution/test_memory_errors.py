"""Batches that run out of memory: they run again in parts, and a failed attempt keeps no memory."""

from __future__ import annotations

import asyncio
import sys
import traceback
import weakref
from typing import Any
from unittest.mock import Mock

import numpy
import pytest

import batched
from batched._execution.memory import is_out_of_memory, release_memory
from feature_stage import Make


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory.")], ids=repr)
def test_a_call_that_is_too_large_is_served_in_parts_and_later_ones_fit(
    together: Make, error: BaseException
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if len(features["x"]) > 8:
            raise error
        return {"x": features["x"] * 2, "sum": features["x"].sum(1)}

    one = together(compute, batch_size=64)
    x = numpy.arange(192).reshape(64, 3)
    for _ in range(2):
        result = one.fn({"x": x})
        assert (result["x"] == x * 2).all()
        assert (result["sum"] == x.sum(1)).all()
    failed = [size for size in map(len, (features["x"] for features in one.seen)) if size > 8]
    assert failed == [64, 32, 32, 16, 16, 16, 16]
    stats = one.fn.stats
    assert (stats.memory_errors, stats.total_processed, stats.errors) == (7, 128, 0)


@pytest.mark.usefixtures("uncollected")
def test_a_failed_attempt_is_freed_before_the_next(together: Make) -> None:
    alive: list[weakref.ref[Any]] = []

    def compute(features: dict[str, Any]) -> Any:
        two.seen.clear()
        assert [reference() for reference in alive] == [None] * len(alive)
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


@pytest.mark.usefixtures("uncollected")
def test_an_item_that_runs_out_of_memory_alone_keeps_no_memory_and_shows_every_line() -> None:
    alive: list[weakref.ref[Any]] = []

    def allocate() -> None:
        work = numpy.ones(1)
        alive.append(weakref.ref(work))
        raise MemoryError

    @batched.aio.dynamically(on_oom="split")
    async def fn(items: list[int]) -> list[int]:
        assert [reference() for reference in alive] == [None] * len(alive)
        work = numpy.ones(1)
        alive.append(weakref.ref(work))
        if 0 in items:
            allocate()
        return items

    async def main() -> list[Any]:
        return await asyncio.gather(*map(fn, range(4)), return_exceptions=True)

    error, *results = asyncio.run(main())
    assert results == [1, 2, 3]
    assert [reference() for reference in alive] == [None] * len(alive)
    assert type(error) is MemoryError
    lines = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert lines[-2:] == ["fn", "allocate"]


def test_a_task_that_has_handed_its_error_to_the_function_goes_on() -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[tuple[list[int], asyncio.Future[list[int]]]] = asyncio.Queue()

        async def work() -> None:
            while True:
                items, answer = await queue.get()
                try:
                    if len(items) > 2:
                        raise MemoryError
                    answer.set_result(items)
                except MemoryError as error:
                    answer.set_exception(error)

        @batched.aio.dynamically(on_oom="split")
        async def fn(items: list[int]) -> list[int]:
            answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
            await queue.put((items, answer))
            return await asyncio.wait_for(answer, 20)

        task = asyncio.create_task(work())
        results = await asyncio.gather(*map(fn, range(4)))
        assert task.cancel()
        return results

    assert asyncio.run(main()) == [0, 1, 2, 3]


OF_TORCH_AND_JAX = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "MPS backend out of memory (MPS allocated: 17.76 GB, other allocations: 400 KB)",
    "XPU out of memory. Tried to allocate 20.00 MiB.",
    "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes.",
]
OF_ONNX = [
    "bfc_arena.cc:376 Failed to allocate memory for requested buffer of size 2147483648",
    "CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size)",
]
OTHERS = [
    "The size of tensor a (3) must match the size of tensor b (4)",
    "CUDA error: device-side assert",
    "the queue is out of memory slots",
]


def test_messages_about_memory_are_recognised() -> None:
    module = {"__module__": "onnxruntime.capi.onnxruntime_pybind11_state"}
    of_onnx: Any = type("RuntimeException", (Exception,), module)
    for kind, messages in ((RuntimeError, OF_TORCH_AND_JAX), (of_onnx, OF_ONNX)):
        for message in messages:
            assert is_out_of_memory(kind(message)), message
            assert not is_out_of_memory(ValueError(message)), "quoted, perhaps"
        for message in OTHERS:
            assert not is_out_of_memory(kind(message)), message


def test_errors_are_known_by_their_types() -> None:
    of_torch = type("OutOfMemoryError", (RuntimeError,), {})
    assert is_out_of_memory(of_torch("CUDA ran out of something"))
    assert not is_out_of_memory(OSError(12, "Cannot allocate memory"))
    with pytest.raises(MemoryError) as of_numpy:
        numpy.empty(2**60, numpy.int8)
    assert is_out_of_memory(of_numpy.value)


@pytest.mark.model
def test_the_errors_of_torch_are_recognised() -> None:
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("no message to speak of"))
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.int8)
    assert is_out_of_memory(real.value)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("mps", [False, True])
def test_the_caches_that_are_in_use_are_emptied(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool
) -> None:
    torch = Mock()
    torch.cuda.is_initialized.return_value = cuda
    torch.backends.mps.is_available.return_value = mps
    monkeypatch.setitem(sys.modules, "torch", torch)
    release_memory(ValueError())
    assert torch.cuda.empty_cache.called == cuda
    assert torch.mps.empty_cache.called == mps


def test_without_torch_or_with_another_one_there_is_no_cache_to_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for torch in (None, object(), Mock(**{"cuda.is_initialized.side_effect": RuntimeError})):
        monkeypatch.setitem(sys.modules, "torch", torch)
        release_memory(ValueError())
