"""Keys: strings and integers exactly; any other value is a fault of its row."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batched.offline.sources.base import Window
from batched.offline.sources.keys import keys_of


def window(values: Any, first: int = 0) -> Window:
    return Window(first, len(values), {"id": values})


@pytest.mark.parametrize("kind", [list, pa.array])
def test_strings_and_integers_of_64_bits_are_keys_exactly(kind: Any) -> None:
    texts = ["", "00000", "a\0b", "\u00e9", "e\u0301", "\U0001f600"]
    assert keys_of(window(kind(texts)), "id") == texts
    assert keys_of(window(kind([-(2**63), 0, 2**63 - 1])), "id") == [-(2**63), 0, 2**63 - 1]


def test_equals_of_strings_and_integers_become_plain_ones() -> None:
    keys = keys_of(window([np.uint8(7), uuid.UUID(int=5)]), "id")
    assert repr(keys) == "[7, '00000000-0000-0000-0000-000000000005']"


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, np.True_, 1.0, float("nan"), b"a", ("a",), np.array([1, 2])),
        *("\ud800", 2**63, -(2**63) - 1, np.uint64(2**63)),
    ],
    ids=repr,
)
def test_a_value_that_is_no_key_is_a_fault_of_its_row(value: Any) -> None:
    rows = window(["fine", value], first=2048)
    assert keys_of(rows, "id") == ["fine", None]
    assert list(rows.faults) == [1]
    message = rows.faults[1]
    assert message.startswith(
        f"row 2049 (counted from 0): the key in column 'id', {type(value).__name__} "
    )
    assert repr(value)[:20] in message
    assert message.endswith("cannot be used; keys are valid text or signed 64-bit integers")
