"""Function that tests serve in a model process, whose counts they look for on another page."""

from __future__ import annotations

from typing import Any

import batched


@batched.dynamically(name="counted")
def counted(items: list[Any]) -> list[Any]:
    """Return the items."""
    return items
