"""Libraries of arrays."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["numpy", pytest.param("torch", marks=pytest.mark.model)])
def library(request: pytest.FixtureRequest) -> Any:
    """Return numpy, then torch, for functions that both have under one name."""
    return pytest.importorskip(request.param)
