"""Stages: a test that asks for one runs for threads, `acall`, both event-loop variants, and
asyncio, uvloop and trio.

One that asks for `numbers` runs for plain items and, in four of these scenarios, for features
besides, and so for all four decorators. One that asks for `together` makes calls of features that
share batches.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from batched._core.cost import TimeBySize
from feature_stage import Make, Together, unchanged
from number_stage import FeatureNumberStage, NumberStage
from stage import SCENARIOS, Scenario, Stage

WITH_FEATURES = (
    Scenario("threads", "asyncio"),
    Scenario("acall", "uvloop"),
    Scenario("aio-sync", "asyncio"),
    Scenario("aio-coroutine", "trio"),
)
"""Each kind of caller and of function, and each loop: no code knows both loops and features."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [
        item
        for item in items
        if not isinstance(item, pytest.Function)
        or not hasattr(item, "callspec")
        or item.callspec.params.get("numbers") is not FeatureNumberStage
        or item.callspec.params["scenario"] in WITH_FEATURES
    ]


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """No coverage of this test, which takes a third of the time without. (The mark `no_cover` would
    end coverage in the threads that go on, for good.)
    """
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


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


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make batched functions of features, and close them in the end. No batch is cut short because
    its padding seems to cost more than another batch.
    """
    monkeypatch.setattr(TimeBySize, "_find_fixed_size", lambda _: None)
    made: list[Together] = []

    def make(compute: Callable[..., Any] = unchanged, **settings: Any) -> Together:
        made.append(Together(compute, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
