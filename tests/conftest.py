"""Fixtures of the contract suite.

A test with the fixture `stage` runs in seven scenarios, and with `-m matrix` in seven more.
The fixture `together` makes calls of features that share batches.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import batched._function.batched as batched_functions
from batched._core.capacity import Capacity
from feature_stage import Make, Together, unchanged
from stage import SCENARIOS, Scenario, Stage

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # `nohup`, `&`, cron and some services start programs so, and their children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["connect", "integrations/test_soak.py"] if sys.platform == "win32" else []
"""Tests of Unix sockets, and of a benchmark that Windows cannot run."""

USUAL = (
    Scenario("threads", "asyncio"),
    Scenario("acall", "asyncio"),
    Scenario("aio-sync", "asyncio"),
    Scenario("aio-coroutine", "asyncio"),
    Scenario("aio-coroutine", "trio"),
    Scenario("connect", "asyncio"),
    Scenario("aio-connect", "asyncio"),
)
"""Scenarios that run each time. The remaining seven differ only in how a loop is posted to."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, which takes as long as all imports together. It looks
    at none of the imported modules later, either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        with suppress(ImportError):
            import hypothesis  # noqa: F401  # it searches for objects that are hidden from here on
        gc.freeze()
        gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        chosen = metafunc.config.option.markexpr
        is_without = chosen.startswith("not") and "matrix" in chosen  # as the default is
        scenarios = USUAL if is_without else SCENARIOS
        ids = [f"{scenario.kind}-{scenario.loop}" for scenario in scenarios]
        metafunc.parametrize("scenario", scenarios, ids=ids)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        scenario = params.get("scenario", USUAL[0])
        if scenario not in USUAL:
            item.add_marker("matrix")
        if scenario.kind.endswith("connect"):
            item.add_marker("once")  # the socket depends on no Python
            no_sockets = sys.platform == "win32"
            item.add_marker(pytest.mark.skipif(no_sockets, reason="there are no Unix sockets"))


@pytest.fixture(autouse=True)
def _no_queues() -> None:
    """Forget the queues of other tests: many in a row with batches of one item are warned of."""
    batched_functions._latest.clear()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Stop the garbage collector during this test: only reference counts free objects."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def anyio_backend(scenario: Scenario) -> tuple[str, dict[str, Any]]:
    return scenario.backend


@pytest.fixture
async def stage(scenario: Scenario, anyio_backend: object) -> AsyncIterator[Stage]:
    stage = Stage(scenario)
    yield stage
    await stage.close()


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make batched functions of features, and close them in the end. No batch is cut short because
    its padding seems to cost more than another batch.
    """
    monkeypatch.setattr(Capacity, "may_pad", lambda *_: True)
    made: list[Together] = []

    def make(compute: Callable[..., Any] = unchanged, **settings: Any) -> Together:
        made.append(Together(compute, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
