"""Hashes of the values that a step reads of a row, which tell an edited row from an unchanged row.

1. A value counts by its JSON with sorted keys: equal values from Parquet, JSONL or a list have
   equal hashes, in every process and with every Python. Lists, tuples and arrays of equal numbers
   are equal.
2. Types count: `1`, `1.0`, `True`, `"1"` and `None` differ, and `-0.0` differs from `0.0`. All NaN
   are equal. Moments count with their offset from UTC.
3. A value that JSON lacks counts as an object with its type and text, in its canonical form
   (`types.values`): a path by its text, a model of pydantic as a dict. Bytes count by a hash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from xxhash import xxh3_64_digest, xxh3_128_hexdigest

from ..sources.base import Window
from ..types.values import read

_FORM: Final = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATETIME


def hash_inputs(window: Window, columns: Sequence[str]) -> list[int]:
    """Return for each row a signed 64-bit hash of its values in these columns, in this order.

    A value without a stable hash becomes a fault of its row, and the hash is 0.
    """
    hashes = [0] * window.size
    for place, row in enumerate(zip(*map(window.values, columns), strict=True)):
        try:
            hashes[place] = int.from_bytes(xxh3_64_digest(_json(row)), "big", signed=True)
        except Exception as error:  # objects may have methods of any kind
            window.note_fault(
                place,
                f"a value of {' or '.join(map(repr, columns))} has no stable hash ({error}); rows "
                "hold text, bytes, numbers, dates, and lists, dicts and arrays of these (of large "
                "objects, their paths)",
            )
    return hashes


def _json(row: Any) -> bytes:
    try:
        text = orjson.dumps(row, _plain, _FORM)
    except TypeError:
        text = b"null"
    # which also stands for NaN; the standard library tells them apart, and takes any integer
    if b"null" in text:
        text = _STANDARD.encode(row).encode(errors="surrogatepass")
    return text


def _plain(value: Any) -> Any:
    """Return a form in JSON of a value that JSON lacks."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    plain, _ = read(value)
    if isinstance(plain, bytes):
        return {"bytes": xxh3_128_hexdigest(plain)}
    return plain if type(plain) is not type(value) else {type(value).__name__: str(value)}


_STANDARD: Final = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_plain
)
