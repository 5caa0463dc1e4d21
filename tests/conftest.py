"""The stage fixture: a test that asks for it runs for threads, `acall`, both event-loop variants, and asyncio, uvloop and trio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from stage import BOUND, SCENARIOS, Scenario, Stage


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: f"{scenario.kind}-{scenario.loop}")
def scenario(request: pytest.FixtureRequest) -> Scenario:
    chosen: Scenario = request.param
    return chosen


@pytest.fixture
def anyio_backend(scenario: Scenario) -> tuple[str, dict[str, Any]]:
    return scenario.backend


@pytest.fixture
async def stage(scenario: Scenario, anyio_backend: object) -> AsyncIterator[Stage]:
    stage = Stage(scenario)
    yield stage
    if stage.fn is not None:
        stage.let_through(1000)
        with anyio.fail_after(BOUND):
            await stage.fn.aclose()
