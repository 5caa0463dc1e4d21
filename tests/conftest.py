"""Stages: a test that asks for one runs for threads, `acall`, both event-loop variants, and
asyncio, uvloop and trio.

One that asks for `numbers` runs for plain items and for features besides, and so for all four
decorators.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from number_stage import FeatureNumberStage, NumberStage
from stage import SCENARIOS, Scenario, Stage


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
    await stage.close()


@pytest.fixture(params=[NumberStage, FeatureNumberStage], ids=["items", "features"])
async def numbers(
    request: pytest.FixtureRequest, scenario: Scenario, anyio_backend: object
) -> AsyncIterator[NumberStage]:
    stage: NumberStage = request.param(scenario)
    yield stage
    await stage.close()
