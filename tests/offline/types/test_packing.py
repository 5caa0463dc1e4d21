"""Packed columns: values as they were, and nothing but values."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from batched.offline.types.packing import pack, unpack
from canonical_values import ALL_VALUES, form_of, same


@settings(max_examples=200, deadline=None)
@given(groups=st.lists(st.lists(ALL_VALUES, max_size=4), min_size=1, max_size=3))
def test_values_are_unpacked_as_they_were_however_they_are_grouped(groups: list[list[Any]]) -> None:
    forms = [[form for value in group for form in form_of(value)] for group in groups]
    whole = [form for group in forms for form in group]
    joined = unpack(b"".join([pack([group, list(range(len(group)))]) for group in forms]))
    assert same(joined, [whole, [number for group in forms for number in range(len(group))]])
    assert same(unpack(pack([whole])), [whole])


def test_rows_of_arrays_are_joined_if_they_have_one_shape() -> None:
    one, two = np.zeros((2, 3), "f4"), np.ones((1, 3), "f4")
    assert same(unpack(pack([one]) + pack([two])), [np.concatenate([one, two])])
    for other in (np.ones((1, 2), "f4"), np.ones((1, 3)), [None]):
        (column,) = unpack(pack([one]) + pack([other]))
        assert same(column, [*one, *other])


def test_unpacked_arrays_can_be_changed() -> None:
    (column,) = unpack(pack([[np.zeros(2), np.zeros(2)]]))
    column[0] += 1
    assert column[1][0] == 0


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "evil",
    [
        Evil(os.system, "true"),
        Evil(getattr, "", "join"),
        Evil(np.load, "file"),
        Evil(np.frombuffer, b""),
        Evil(eval, "1"),
        os.system,
        ValueError("x"),
    ],
)
def test_nothing_but_values_is_loaded(evil: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no constructor of values"):
        unpack(pickle.dumps([[evil]]))


@pytest.mark.parametrize("dtype", ["O", "V8", "M8[s]"])
def test_no_array_of_objects_is_loaded(dtype: str) -> None:
    data = pickle.dumps([[Evil(np.ndarray, (1,), dtype, bytes(8))]])
    if dtype == "O":
        with pytest.raises(ValueError, match="OBJECT"):
            unpack(data)
    else:
        assert len(unpack(data)) == 1
