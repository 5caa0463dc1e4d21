"""Devices of features and results. A fake torch records the streams of GPUs and their events."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy
import pytest

from batched._collate.features.collate import FeatureCollator
from batched._collate.features.devices import Devices
from batched._collate.features.parse import FeatureParser
from batched._collate.features.settings import FeatureSettings
from batched._core.scheduler import Request
from feature_stage import Make
from stage import in_time

pytestmark = pytest.mark.once


class Device(str):
    __slots__ = ()

    @property
    def type(self) -> str:
        return self.partition(":")[0]


class Tensor:
    """A tensor on some device that can be joined."""

    layout, is_nested = "strided", False
    requires_grad = False

    def __init__(self, device: str, rows: int = 1) -> None:
        self.device = Device(device)
        self.is_cuda = self.device.type == "cuda"
        self.ndim, self.shape = 2, (rows, 3)

    def __len__(self) -> int:
        return self.shape[0]


class FakeTorch(ModuleType):
    """A torch that records streams in `log`. Each thread has a current device of its own."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.log: list[str] = []
        self.Tensor = Tensor
        self.strided = "strided"
        self.current = threading.local()
        self.cuda = SimpleNamespace(
            Event=lambda **_: SimpleNamespace(
                record=self.log.append, synchronize=lambda: self.log.append("wait")
            ),
            current_stream=lambda device: f"stream of {device}",
        )

    def empty(self, *_: int, device: str) -> Tensor:
        return Tensor(f"cuda:{self.current.index}" if device == "cuda" else device)

    def concatenate(self, tensors: list[Tensor]) -> Tensor:
        self.log.append("concatenate")
        return Tensor(tensors[0].device, sum(map(len, tensors)))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_joined_parts_are_complete_before_the_caller_gets_them(torch: FakeTorch) -> None:
    parts = [{"y": Tensor("cuda:1", 2)}, {"y": Tensor("cuda:1")}]
    joined = FeatureCollator("fn", FeatureSettings(), set()).join(Request(None, 3, ()), parts)
    assert len(joined["y"]) == 3
    assert torch.log == ["concatenate", "stream of cuda:1", "wait"]


@pytest.mark.parametrize("setting", ["device", "output_device"])
def test_cuda_means_the_current_device_of_the_first_caller_not_of_the_worker(
    torch: FakeTorch, setting: str
) -> None:
    devices = Devices(**{"device": None, "output_device": None, setting: Device("cuda")})
    parser = FeatureParser("fn", FeatureSettings(), None, devices)

    def call_on(index: int) -> None:
        torch.current.index = index
        parser.parse({"x": numpy.ones((1, 2))})

    call_on(3)
    in_time(lambda: call_on(5))
    assert getattr(devices, setting) == "cuda:3"


@pytest.mark.model
def test_a_device_takes_arrays_of_any_layout(together: Make) -> None:
    real = pytest.importorskip("torch")
    one = together(device="cpu")
    fields = numpy.zeros(3, [("a", "i1"), ("b", "<f8")])
    integers = numpy.arange(6, dtype=">i8").reshape(2, 3)
    for array in (integers, integers[::-1], integers.T, fields["b"]):
        result = one.fn({"x": array})
        assert type(result["x"]) is real.Tensor
        assert result["x"].tolist() == array.tolist()
        results = one.results({"x": array}, {"x": array})
        assert [each["x"].tolist() for each in results] == [array.tolist()] * 2


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["U3", "object", "datetime64[s]"])
def test_elements_that_no_tensor_can_hold_stay_in_an_array(together: Make, dtype: str) -> None:
    pytest.importorskip("torch")
    two = together(device="cpu")
    array = numpy.array([1, 2]).astype(dtype)
    results = two.results({"x": array}, {"x": array})
    assert type(two.seen[0]["x"]) is numpy.ndarray
    assert [result["x"].tolist() for result in results] == [array.tolist()] * 2


@pytest.mark.model
def test_results_are_moved_to_the_output_device(together: Make) -> None:
    pytest.importorskip("torch")
    calls = [{"x": numpy.ones((rows, 2))} for rows in (1, 2)]
    of_numpy = together(output_device="meta").results(*calls)
    assert {type(result["x"]) for result in of_numpy} == {numpy.ndarray}, "only tensors move"
    two = together(device="cpu", output_device="meta")
    moved = [result["x"] for result in two.results(*calls)]
    assert two.seen[0]["x"].device.type == "cpu"
    assert [(each.device.type, len(each)) for each in moved] == [("meta", 1), ("meta", 2)]
