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

from batched.offline.types.packing import join, pack, unpack
from canonical_values import ALL_VALUES, form_of, same

pytestmark = pytest.mark.once


@settings(max_examples=60, deadline=None)
@given(values=st.lists(ALL_VALUES, max_size=8))
def test_values_are_unpacked_as_they_were(values: list[Any]) -> None:
    forms = [form for value in values for form in form_of(value)]
    assert same(unpack(pack([forms, list(range(len(forms)))])), [forms, list(range(len(forms)))])


def test_rows_of_arrays_are_joined_if_they_have_one_shape() -> None:
    one, two = np.zeros((2, 3), "f4"), np.ones((1, 3), "f4")
    assert same(join([one, two]), np.concatenate([one, two]))
    for other in (np.ones((1, 2), "f4"), np.ones((1, 3)), [None]):
        assert same(join([one, other]), [*one, *other])


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
