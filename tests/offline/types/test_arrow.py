"""Values of Arrow arrays as Python objects, without loss."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batched.offline.types.arrow import to_python
from canonical_values import same


def tensors() -> Any:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    storage = pa.array([np.arange(6, dtype="f4"), None, np.ones(6, "f4")], kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)


VALUES: list[tuple[Any, list[Any]]] = [
    (pa.array([[1, None], None, []], pa.list_(pa.int8())), [[1, None], None, np.array([], "i1")]),
    (pa.array([[1, 2], None], pa.list_(pa.float32(), 2)), [np.array([1, 2], "f4"), None]),
    (pa.array([[1], None], pa.large_list(pa.float16())), [np.array([1], "f2"), None]),
    (pa.array([{"a": [1]}, None]), [{"a": [1]}, None]),
    (pa.array([{}], pa.struct([])), [{}]),
    (tensors(), [np.arange(6, dtype="f4").reshape(2, 3), None, np.ones((2, 3), "f4")]),
    (
        pa.array([[1000]], pa.list_(pa.timestamp("ns", "UTC"))),
        [[datetime(1970, 1, 1, microsecond=1, tzinfo=UTC)]],
    ),
    (pa.array([2000], pa.time64("ns")), [time(microsecond=2)]),
    (pa.array([2000], pa.duration("ns")), [timedelta(microseconds=2)]),
]


@pytest.mark.parametrize(("array", "expected"), VALUES, ids=[str(each.type) for each, _ in VALUES])
def test_values_are_read_without_loss_also_in_slices(array: Any, expected: list[Any]) -> None:
    assert same(to_python(array), expected)
    for start in range(len(array)):
        assert same(to_python(array.slice(start, 1)), expected[start : start + 1])


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1001], pa.timestamp("ns", "UTC")),
        pa.array([1001], pa.duration("ns")),
        pa.array([[1001]], pa.list_(pa.time64("ns"))),
    ],
    ids=lambda array: str(array.type),
)
def test_nanoseconds_are_refused_not_cut(array: Any) -> None:
    with pytest.raises(pa.ArrowInvalid, match="would lose data"):
        to_python(array)


def test_values_of_another_column_may_be_changed() -> None:
    one, other = to_python(pa.array([[1.0], [2.0]], pa.list_(pa.float64(), 1)))
    one += 5
    assert other[0] == 2.0
