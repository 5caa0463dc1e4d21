"""The libraries that arrays are of."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["numpy", pytest.param("torch", marks=pytest.mark.model)])
def library(request: pytest.FixtureRequest) -> Any:
    """numpy, then torch: for what both have under one name."""
    return pytest.importorskip(request.param)
