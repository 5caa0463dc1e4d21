"""Devices of features and results. A fake torch records the streams of GPUs and their events."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest

from batched._collate.features.collate import FeatureCollator
from batched._collate.features.devices import Devices
from batched._collate.features.parse import FeatureParser
from batched._collate.features.settings import FeatureSettings
from batched._core.scheduler import Request
from feature_stage import Make, Together


class Device:
    def __init__(self, kind: Any, index: int | None = None) -> None:
        name, _, number = str(kind).partition(":")
        self.type = name
        self.index = int(number) if number else index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))

    def __repr__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Tensor:
    """A tensor on some device that can be joined and sent."""

    layout = "strided"
    is_nested = False
    requires_grad = False

    def __init__(self, device: Any, rows: int = 1) -> None:
        self.device = Device(device)
        self.is_cuda = self.device.type == "cuda"
        self.ndim, self.shape = 2, (rows, 3)

    def __len__(self) -> int:
        return self.shape[0]

    def to(self, device: Any, **_: Any) -> Tensor:
        return Tensor(device, len(self))

    def pin_memory(self) -> Tensor:
        return self


class Stream:
    """A stream with a name."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.log = log

    def __eq__(self, other: object) -> bool:
        return self.name == (other.name if isinstance(other, Stream) else other)

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, _: Any) -> None:
        self.log.append((self.name, "waits"))


class FakeTorch(ModuleType):
    """A torch that records streams in `log`. Each thread has a current device of its own."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.log: list[Any] = []
        self.Tensor = Tensor
        self.device = Device
        self.strided = "strided"
        self.current = threading.local()
        self.cuda = SimpleNamespace(
            Event=lambda **_: SimpleNamespace(
                record=lambda stream: self.log.append(("record", stream)),
                synchronize=lambda: self.log.append("wait"),
            ),
            current_stream=self.current_stream,
        )

    def current_stream(self, device: Any) -> Any:
        """Return the stream of this thread."""
        name = getattr(self.current, "stream", f"stream of {device}")
        return Stream(name, self.log)

    def empty(self, *_: int, device: Device) -> Tensor:
        index = getattr(self.current, "index", 0)
        return Tensor(Device("cuda", index) if device == Device("cuda") else device)

    def concatenate(self, tensors: list[Tensor]) -> Tensor:
        self.log.append("concatenate")
        return Tensor(tensors[0].device, sum(map(len, tensors)))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Run a function in another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def test_joined_parts_are_complete_before_the_caller_gets_them(
    torch: FakeTorch,
) -> None:
    collator = FeatureCollator("fn", FeatureSettings(), set())
    joined = collator.join(
        Request(None, 3, ()), [{"y": Tensor("cuda:1", 2)}, {"y": Tensor("cuda:1")}]
    )
    assert len(joined["y"]) == 3
    assert torch.log == ["concatenate", ("record", "stream of cuda:1"), "wait"]


def test_parts_on_the_cpu_are_joined_without_a_wait(torch: FakeTorch) -> None:
    collator = FeatureCollator("fn", FeatureSettings(), set())
    assert len(collator.join(Request(None, 2, ()), [Tensor("cpu"), Tensor("cpu")])) == 2
    assert torch.log == ["concatenate"]


@pytest.mark.parametrize("setting", ["device", "output_device"])
def test_cuda_means_the_current_device_of_the_first_caller_not_of_the_worker(
    torch: FakeTorch, elsewhere: Callable[[Callable[[], Any]], Any], setting: str
) -> None:
    devices = Devices(**{"device": None, "output_device": None, setting: Device("cuda")})
    parser = FeatureParser("fn", FeatureSettings(), None, devices)

    def call_on(index: int) -> None:
        torch.current.index = index
        parser.parse({"x": numpy.ones((1, 2))})

    call_on(3)
    elsewhere(lambda: call_on(5))

    def move() -> Any:  # as a worker does, on GPU 0
        tensor = Tensor("cpu")
        if setting == "device":
            return devices.to_function({"x": tensor})["x"]
        return devices.to_callers(tensor)

    assert elsewhere(move).device == Device("cuda", 3)


@pytest.mark.parametrize("device", ["cuda:2", "cpu", None])
def test_a_device_with_an_index_stays_as_it_is(torch: FakeTorch, device: str | None) -> None:
    given = None if device is None else Device(device)
    devices = Devices(given, given)
    torch.current.index = 3
    devices.resolve()
    assert (devices.device, devices.output_device) == (given, given)


def test_a_decorated_function_resolves_its_device_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    resolve = Devices.resolve

    def noted(devices: Devices) -> None:
        asked.append(threading.current_thread())
        resolve(devices)

    monkeypatch.setattr(Devices, "resolve", noted)
    one = Together()
    assert not asked
    one.fn({"x": numpy.ones(2)})
    assert asked == [threading.current_thread()]
    one.close()


@pytest.mark.model
@pytest.mark.parametrize("rows", [1, 2])
def test_with_a_device_arrays_become_tensors(together: Make, rows: int) -> None:
    real = pytest.importorskip("torch")
    all_of = together(device="cpu")
    call = {
        "ids": numpy.array([[1, 2]]),
        "scores": numpy.ones((1, 2), numpy.float16),
        "flags": numpy.array([True]),
    }
    results = all_of.results(*[call] * rows)
    assert {name: tensor.dtype for name, tensor in all_of.seen[0].items()} == {
        "ids": real.int64,
        "scores": real.float16,
        "flags": real.bool,
    }
    assert [result["ids"].tolist() for result in results] == [[[1, 2]]] * rows
    assert all(type(tensor) is real.Tensor for tensor in results[0].values())


@pytest.mark.model
@pytest.mark.parametrize(
    "kind", ["read-only", "reversed", "byte-swapped", "strided", "turned", "field"]
)
def test_a_device_takes_arrays_of_any_layout(together: Make, kind: str) -> None:
    real = pytest.importorskip("torch")
    array: Any = numpy.arange(6).reshape(2, 3)
    if kind == "read-only":
        array.flags.writeable = False
    else:
        array = {
            "reversed": array[::-1],
            "byte-swapped": array.astype(">i8"),
            "strided": array[:, ::2],
            "turned": array.T,
            "field": numpy.zeros(3, [("a", "i1"), ("b", "<f8")])["b"],
        }[kind]
    one = together(device="cpu")
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
    two = together(output_device="meta")
    results = two.results(
        {"x": numpy.ones((1, 2)), "y": numpy.ones(1)}, {"x": numpy.ones((2, 2)), "y": numpy.ones(2)}
    )
    assert [type(result["x"]) for result in results] == [numpy.ndarray] * 2, (
        "only tensors are anywhere"
    )
    two = together(device="cpu", output_device="meta")
    results = two.results({"x": numpy.ones((1, 2))}, {"x": numpy.ones((2, 2))})
    assert two.seen[0]["x"].device.type == "cpu"
    assert [(result["x"].device.type, tuple(result["x"].shape)) for result in results] == [
        ("meta", (1, 2)),
        ("meta", (2, 2)),
    ]
