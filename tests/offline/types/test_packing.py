"""Packed columns: values as they were, and nothing but values."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest

from batched.offline.types.packing import join, unpack
from canonical_values import same

pytestmark = pytest.mark.once


def test_rows_of_arrays_are_joined_if_they_have_one_shape() -> None:
    one, two = np.zeros((2, 3), "f4"), np.ones((1, 3), "f4")
    assert same(join([one, two]), np.concatenate([one, two]))
    for other in (np.ones((1, 2), "f4"), np.ones((1, 3)), [None]):
        assert same(join([one, other]), [*one, *other])


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("evil", [Evil(os.system, "true"), os.system, ValueError("x")])
def test_nothing_but_values_is_loaded(evil: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no constructor of values"):
        unpack(pickle.dumps([[evil]]))
