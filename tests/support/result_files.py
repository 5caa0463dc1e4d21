"""Results of tests: rows that are written, hidden or published."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pyarrow as pa

from batched.offline.results.opening import Result, Stamp


def fill(result: Result, columns: Mapping[str, Any]) -> Result:
    rows: Any = pa.table(dict(columns)) if result.is_typed else columns
    writer = result.create(rows.schema if result.is_typed else list(columns))
    writer.write(rows)
    writer.close()
    return result


def publish(result: Result, columns: Mapping[str, Any]) -> Stamp:
    with closing(fill(result, columns)):
        return result.publish(len)[-1]
