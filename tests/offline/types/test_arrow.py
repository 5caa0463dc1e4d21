"""Values of Arrow arrays as Python objects, without loss."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")

from batched.offline.types.arrow import to_python, without_views  # noqa: E402  # after the skip
from canonical_values import same  # noqa: E402

BERLIN = ZoneInfo("Europe/Berlin")


def tensors(permutation: list[int] | None = None) -> Any:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=permutation)
    storage = pa.array([np.arange(6, dtype="f4"), None, np.ones(6, "f4")], kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)


VALUES: list[tuple[Any, list[Any]]] = [
    (pa.array([1, None], pa.uint8()), [1, None]),
    (pa.array([0.5, None], pa.float32()), [0.5, None]),
    (pa.array(["a", None], pa.large_string()), ["a", None]),
    (pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
    (pa.array([[1, None], None, []], pa.list_(pa.int8())), [[1, None], None, []]),
    (
        pa.array([[1, 2], None], pa.list_(pa.float32(), 2)),
        [np.array([1, 2], "f4"), None],
    ),
    (
        pa.array([[1], None, []], pa.large_list(pa.float16())),
        [np.array([1], "f2"), None, np.array([], "f2")],
    ),
    (pa.array([{"a": [1]}, None]), [{"a": [1]}, None]),
    (pa.array([{}], pa.struct([])), [{}]),
    (
        pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        [[("a", 1)], None, []],
    ),
    (tensors(), [np.arange(6, dtype="f4").reshape(2, 3), None, np.ones((2, 3), "f4")]),
    (
        pa.array([[1000]], pa.list_(pa.timestamp("ns", "UTC"))),
        [[datetime(1970, 1, 1, microsecond=1, tzinfo=UTC)]],
    ),
    (
        pa.array([{"t": 1000}], pa.struct([("t", pa.timestamp("ns", "Europe/Berlin"))])),
        [{"t": datetime(1970, 1, 1, 1, microsecond=1, tzinfo=BERLIN)}],
    ),
    (pa.array([2000], pa.time64("ns")), [time(microsecond=2)]),
    (pa.array([2000], pa.duration("ns")), [timedelta(microseconds=2)]),
]


@pytest.mark.parametrize(("array", "expected"), VALUES, ids=[str(each.type) for each, _ in VALUES])
def test_values_are_read_without_loss_also_in_slices(array: Any, expected: list[Any]) -> None:
    assert same(to_python(array), expected)
    for start in range(len(array)):
        assert same(to_python(array.slice(start, 1)), expected[start : start + 1])


def test_a_tensor_has_its_logical_shape() -> None:
    (first, *_) = to_python(tensors([1, 0]))
    assert first.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_lists_of_numbers_are_vectors_if_asked() -> None:
    array = pa.array([[1.0], None, [2.0, None], []], pa.list_(pa.float64()))
    assert same(to_python(array), [[1.0], None, [2.0, None], []])
    expected = [np.array([1.0]), None, [2.0, None], np.array([])]
    assert same(to_python(array, vectors=True), expected)
    nested = pa.array([{"v": [1, 2]}], pa.struct([("v", pa.list_(pa.int8()))]))
    assert same(to_python(nested, vectors=True), [{"v": np.array([1, 2], "i1")}])


@pytest.mark.parametrize(
    "kind",
    [
        pa.time64("ns"),
        pa.timestamp("ns"),
        pa.timestamp("ns", "UTC"),
        pa.duration("ns"),
        pa.list_(pa.time64("ns")),
        pa.struct([("t", pa.time64("ns"))]),
    ],
    ids=str,
)
def test_nanoseconds_are_refused_not_cut(kind: Any) -> None:
    value: Any = 1001
    if pa.types.is_nested(kind):
        value = {"t": 1001} if pa.types.is_struct(kind) else [1001]
    with pytest.raises(pa.ArrowInvalid, match="would lose data"):
        to_python(pa.array([value], kind))


def test_values_of_another_column_may_be_changed() -> None:
    one, other = to_python(pa.array([[1.0], [2.0]], pa.list_(pa.float64(), 1)))
    one += 5
    assert other[0] == 2.0


def test_views_of_text_are_text() -> None:
    def nested(text: Any) -> Any:
        lists = [pa.list_(text), pa.large_list(text), pa.list_(text, 2)]
        return pa.struct([(str(place), kind) for place, kind in enumerate(lists)])

    assert without_views(nested(pa.string_view())) == nested(pa.large_string())
    assert without_views(nested(pa.binary_view())) == nested(pa.large_binary())
    assert without_views(pa.int8()) == pa.int8()
    keyed = [pa.dictionary(pa.int8(), text) for text in (pa.string_view(), pa.large_string())]
    assert without_views(keyed[0]) == keyed[1]
