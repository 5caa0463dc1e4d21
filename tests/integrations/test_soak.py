"""Random calls and faults of all kinds, and proof that a soak notices each broken promise."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from soak import callers, episodes
from soak.callers import ThreadCaller
from soak.episodes import KINDS, Crowd, episode, quiet
from soak.subject import Subject

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings(
        "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

SEED = os.environ.get("SOAK_SEED", "3")
FEW, MANY = 3, int(os.environ.get("SOAK_EPISODES", "400"))
"""Episodes of the fast tier and of the slow one."""


def run(index: int, calls: int) -> Counter[str]:
    """Run one episode, and return its faults. The same seed and index give the same episode."""
    with quiet():
        report = episode(random.Random(f"{SEED} {index}"), f"soak{index}", calls)
    assert not report.verdicts, f"SOAK_SEED={SEED}, {index}\n" + "\n".join(report.details)
    assert report.outcomes
    return report.faults


@pytest.mark.parametrize("index", range(FEW))
def test_every_accepted_call_ends_once_and_rightly(index: int) -> None:
    run(index, calls=200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_accepted_call_ends_once_and_rightly_in_random_mixtures_of_faults() -> None:
    faults = sum((run(index, calls=1000) for index in range(MANY)), Counter[str]())
    assert [kind for kind in KINDS if not faults[kind]] == []


@pytest.mark.parametrize("verdict", ["lost", "wrong", "duplicated"])
def test_each_broken_promise_is_noticed(verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(item: int, *args: Any, **more: Any) -> Any:
        if verdict == "lost":
            return Future[Any]()
        if verdict == "wrong":
            return fn.submit(item + 1000, *args, **more)
        fn.__wrapped__([item], *args, **more)
        return fn.submit(item, *args, **more)

    monkeypatch.setattr(callers, "BOUND", 0.5)
    monkeypatch.setattr(episodes, "PATIENCE", 1.0)
    settings = {"batch_size": 8, "flush": "eager", "max_queue_size": None, "on_batch": None}
    subject = Subject(random.Random(5), "broken", "threads", **settings)
    subject.features = False
    fn, subject.fn = subject.fn, SimpleNamespace(submit=submit)
    crowd = Crowd(subject.books)
    caller = ThreadCaller(subject, random.Random(1), 0.0)
    for _ in range(8):
        crowd.start(caller.burst)
    hung = not crowd.join("burst")
    fn.shutdown()
    report = subject.books.close(fn.stats, [*subject.books.open.values()] if hung else [])
    assert verdict in report.verdicts
