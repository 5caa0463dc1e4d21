"""Features and results on a GPU: transfers, and work that has not ended when its launch returns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

import batched
from feature_stage import Make

torch: Any = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

A_WHILE = 200_000_000
"""Cycles of a GPU, about a tenth of a second."""


def test_pinned_memory_is_not_written_before_its_transfer_has_ended() -> None:
    @batched.inference.dynamically(
        device="cuda", batch_size=4, max_concurrent_batches=2, pad_token={"x": 0}
    )
    def fn(features: dict[str, Any]) -> Any:
        assert features["x"].is_cuda
        torch.cuda._sleep(A_WHILE // 20)
        return features["x"] + 1

    with fn, ThreadPoolExecutor(8) as pool:
        calls = [{"x": numpy.full((1, 10_000 + number % 3), number)} for number in range(100)]
        for number, result in enumerate(pool.map(fn, calls)):
            assert result.shape == (1, 10_000 + number % 3)
            assert (result == number + 1).all()


@pytest.mark.parametrize("callers", [1, 3])
def test_a_batch_waits_for_inputs_that_the_callers_stream_still_computes(
    together: Make, callers: int
) -> None:
    some = together(lambda features: {"x": features["x"] * 2}, pad_token={"x": 0})
    calls = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(callers):
            x = torch.zeros(1, 1000 + number, device="cuda")
            torch.cuda._sleep(A_WHILE)
            x += 3
            calls.append({"x": x})
        results = some.results(*calls)
    for number, result in enumerate(results):
        assert (result["x"].is_cuda, result["x"].shape) == (True, (1, 1000 + number))
        assert (result["x"] == 6).all()


@pytest.mark.parametrize("callers", [1, 3])
@pytest.mark.parametrize("output_device", [None, "cpu"])
def test_results_are_complete_on_every_stream(
    together: Make, callers: int, output_device: str | None
) -> None:
    def slow(features: dict[str, Any]) -> Any:
        torch.cuda._sleep(A_WHILE)
        return features["x"] * 2

    some = together(slow, device="cuda", output_device=output_device)
    results = some.results(*({"x": numpy.full((1, 1000 + number), 3)} for number in range(callers)))
    assert {result.device.type for result in results} == {output_device or "cuda"}
    with torch.cuda.stream(torch.cuda.Stream()):
        assert all((result.cpu() == 6).all() for result in results)
