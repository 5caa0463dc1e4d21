"""Values of all kinds, for tests of types and of the progress file."""

from __future__ import annotations

from datetime import UTC, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batched.offline.types.values import read

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLAT = [
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    INTEGERS,
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.binary(max_size=5),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.datetimes(timezones=st.just(UTC)),
    st.timedeltas(timedelta(days=-(10**8)), timedelta(days=10**8)),
    st.decimals(-(10**9), 10**9, places=2),
    st.just(Decimal("1E+3")),
]
DTYPES = "?", "i1", "u2", "i8", "u8", "f2", "f4", "f8", ">f4"
VECTORS = hnp.arrays(st.sampled_from(DTYPES), st.integers(0, 3))
ARRAYS = hnp.arrays(
    st.sampled_from(DTYPES), hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=3)
)


def nested(*leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values, and lists and dicts of values of each strategy."""

    def inside(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        names = st.sampled_from(["a", "b", "é"])
        return (
            st.lists(items, max_size=3)
            | st.lists(items, max_size=3).map(tuple)
            | st.dictionaries(names, items, max_size=3)
        )

    return st.one_of([leaf | st.recursive(leaf, inside, max_leaves=6) for leaf in leaves])


VALUES = nested(*FLAT, VECTORS)
"""Values that come back from Arrow as they are, and values that cannot be stored."""
ALL_VALUES = nested(*FLAT, VECTORS, ARRAYS, st.one_of(FLAT))


def form_of(value: Any) -> list[Any]:
    """Return the canonical form of a value as the only item of a list; nothing if there is none."""
    try:
        return [read(value)[0]]
    except Exception:
        return []


def same(one: Any, other: Any) -> bool:
    """Return whether values and their types are equal; arrays by dtype, shape and bytes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(repr(one) == repr(other))
