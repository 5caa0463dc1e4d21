"""Function with metrics, which tests serve in a model process. It needs prometheus-client."""

from __future__ import annotations

from typing import Any

import batched
from batched import metrics


@batched.dynamically(on_batch=metrics.prometheus(), name="counted")
def counted(items: list[Any]) -> list[Any]:
    """Return the items."""
    return items
