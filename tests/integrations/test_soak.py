"""Every kind of episode at once, and proof that a soak notices each kind of failure."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from batched._core.scheduler import Scheduler
from batched._execution.execution import Execution
from batched._runtime import settling
from batched._runtime.runtime import Runtime
from batched._runtime.wakers import wake_all
from soak import callers, episodes
from soak.books import Report
from soak.callers import ThreadCaller
from soak.episodes import Crowd, concluded, ordinary, seeded
from soak.mixed import EPISODES, KINDS, Episode, quiet, run_episodes
from soak.subject import Subject

pytestmark = pytest.mark.once

SEED = int(os.environ.get("SOAK_SEED", "3"))
FEW = 4
"""Ordinary episodes in the fast tier. Each other kind has one episode."""
CALLS = 200
"""Calls of an ordinary episode in the fast tier."""
MANY = 1000
"""Episodes of the slow tier."""

forgives_what_is_injected = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@forgives_what_is_injected
@pytest.mark.parametrize("episode", EPISODES, ids=lambda episode: episode.__name__)
def test_every_accepted_call_ends_once_and_rightly(episode: Episode) -> None:
    for index in range(FEW if episode is ordinary else 1):
        with quiet():
            report = episode(seeded(SEED, index), f"soak{index}", CALLS)
        assert not report.verdicts, f"SOAK_SEED={SEED}, {index}\n" + "\n".join(report.details)
        assert report.accepted or report.faults


@pytest.mark.slow
@pytest.mark.timeout(1800)
@forgives_what_is_injected
def test_every_accepted_call_ends_once_and_rightly_in_random_mixtures_of_faults() -> None:
    lines: list[str] = []
    report = run_episodes(SEED, iter(range(MANY)), write=lines.append)
    assert not report.verdicts, f"SOAK_SEED={SEED}\n" + "\n".join(lines)
    missing = [kind for kind in KINDS if not report.faults[kind]]
    assert not missing, f"SOAK_SEED={SEED}: no {', '.join(missing)}"


class Broken:
    """Episode with a library that is broken on purpose."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.dropped: list[Any] = []  # wakers left asleep
        monkeypatch.setattr(callers, "BOUND", 0.5)
        monkeypatch.setattr(episodes, "PATIENCE", 1.2)

    def report(self, *ways: str) -> Report:
        rng = random.Random(1)
        subject = Subject(
            rng,
            "broken",
            kind="threads",
            features=False,
            limited=False,
            batch_size=8,
            flush="eager",
        )
        caller = ThreadCaller(subject, rng, 0.0)
        crowd = Crowd(subject.books)
        for way in ways:
            crowd.start(getattr(caller, way))
            hung = not crowd.join(way)
        report = (
            concluded(subject)
            if not hung
            else subject.books.close(subject.fn.stats, list(subject.books.open.values()))
        )
        self.monkeypatch.undo()
        wake_all(self.dropped)  # no thread may wait forever
        subject.fn.shutdown()
        return report

    def drop_one(self) -> None:
        """Leave one caller asleep."""
        answer: Callable[..., None] = Runtime._answer

        def dropping(runtime: Runtime, batch: Any, wakers: dict[Any, Any], settled: Any) -> None:
            if wakers and not self.dropped:
                self.dropped.append(wakers.popitem()[1])
            answer(runtime, batch, wakers, settled)

        self.monkeypatch.setattr(Runtime, "_answer", dropping)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(monkeypatch)


def test_an_unbroken_library_gets_no_verdict(broken: Broken) -> None:
    assert not broken.report("burst", "burst", "single", "many", "map").verdicts


@pytest.mark.parametrize(("way", "verdict"), [("burst", "lost"), ("many", "hung")])
def test_a_caller_who_is_never_answered_is_found(broken: Broken, way: str, verdict: str) -> None:
    broken.drop_one()
    assert broken.report(way).verdicts[verdict]


def test_swapped_results_are_found_wrong(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = settling.settle

    def swapping(*settling: Any) -> Any:
        found = settled(*settling)
        if len(found[0]) > 1:
            one, two, *_ = found[0]
            one.result, two.result = two.result, one.result
        return found

    def is_found() -> bool:
        monkeypatch.setattr("batched._runtime.runtime.settle", swapping)  # a report undoes it
        return broken.report(*["burst"] * 8).verdicts["wrong"] > 0

    assert any(is_found() for _ in range(20))  # a burst may end in batches of one item


def test_errors_that_the_function_did_not_raise_are_found_wrong(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = settling.settle

    def failing(*settling: Any) -> Any:
        found = settled(*settling)
        for request in found[0]:
            request.error = ValueError("out of nowhere")
        return found

    monkeypatch.setattr("batched._runtime.runtime.settle", failing)
    assert broken.report("single").verdicts["wrong"]


def test_items_that_are_computed_twice_are_found_duplicated(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Execution.run

    def twice(execution: Execution, batch: Any, prepared: Any = None) -> Any:
        args, kwargs, _ = execution.collator.collate(batch.slices, batch)
        execution.func(*args, **kwargs)
        return run(execution, batch, prepared)

    monkeypatch.setattr(Execution, "run", twice)
    assert broken.report("single").verdicts["duplicated"]


def test_cancelled_calls_that_are_computed_are_found_wrong(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "cancel", lambda *_: None)
    assert broken.report(*["burst"] * 8).verdicts["wrong"]
