"""The counts of a batcher, and the snapshot that shows them."""

from __future__ import annotations

import copy
import dataclasses
import math
import random

import pytest

import batched
from batched._core.scheduler import Batch
from batched._runtime import observer
from batched._runtime.recorder import MOST_UNREAD, Recorder
from batched.stats import Percentiles, Stats
from scheduling import call, ran, scheduler

DAY = 24 * 3600.0


def ended_batch(size: int, seconds: float) -> Batch:
    return Batch([], size, "eager", 0.0, ended=seconds)


def snapshot(recorder: Recorder) -> Stats:
    return recorder.snapshot(0, 0, 0)


def recorded(*durations: float) -> Percentiles:
    recorder = Recorder()
    for duration in durations:
        recorder.ended(ended_batch(1, duration), errors=0)
    return snapshot(recorder).processing_time


def test_percentiles_from_a_microsecond_to_a_day_are_exact_within_1_percent() -> None:
    """Shorter durations, and those of a clock that steps back a little, count as a microsecond."""
    rng = random.Random(1)
    durations = sorted(1e-6 * (DAY / 1e-6) ** rng.random() for _ in range(3000))
    found = recorded(*durations)
    for value, share in ((found.p50, 0.50), (found.p95, 0.95), (found.p99, 0.99)):
        exact = durations[math.ceil(share * len(durations)) - 1]
        assert value == pytest.approx(exact, rel=0.01)
    for duration in durations[::10]:
        assert recorded(duration).p50 == pytest.approx(duration, rel=0.01)
    for duration in (0.0, 9.99e-7, -1e-9):
        assert recorded(duration).p99 == pytest.approx(1e-6, rel=0.06)


def test_a_duration_reads_as_three_digits_and_a_unit() -> None:
    texts = {0.0: "0 us", 1e-9: "0.001 us", 9.994e-4: "999 us", 9.996e-4: "1 ms", 999.6: "1,000 s"}
    for seconds, text in texts.items():
        assert str(Percentiles(seconds, seconds, seconds)) == f"p50 {text}, p95 {text}, p99 {text}"


def test_the_queue_wait_is_that_of_calls_until_their_first_batch() -> None:
    """A call of many items counts once, and its later parts do not count again."""
    queue, recorder = scheduler(batch_size=4), Recorder()
    queue.submit(call(9), 6.0)
    queue.submit(call(1), 9.0)
    for now in (10.0, 500.0, 500.0):
        recorder.ended(ran(queue, now), errors=0)
    wait = snapshot(recorder).queue_wait
    assert wait.p50 == pytest.approx(1.0, rel=0.01)
    assert wait.p99 == pytest.approx(4.0, rel=0.01)


def test_many_batches_are_counted_before_anyone_looks() -> None:
    recorder = Recorder()
    for _ in range(2 * MOST_UNREAD + 1):
        recorder.accept()
        recorder.ended(ended_batch(2, 1.0), errors=0)
    counted = snapshot(recorder)
    assert snapshot(recorder) == counted  # looking counts no call
    assert (counted.calls, counted.total_batches) == (2 * MOST_UNREAD + 1,) * 2


def test_a_count_begins_at_zero_also_after_a_reset_and_a_snapshot_does_not_change() -> None:
    recorder = Recorder()

    def use() -> None:
        recorder.accept()
        recorder.count("cancelled")
        recorder.count("rejected")
        recorder.waited([0.5, 0.25])
        recorder.ended(ended_batch(3, 1.0), errors=1)

    counted = dataclasses.asdict(recorder.snapshot(3, 1, 2))
    present = {name: counted.pop(name) for name in ("queue_size", "blocked", "in_flight")}
    assert present == {"queue_size": 3, "blocked": 1, "in_flight": 2}
    nothing = dataclasses.asdict(Percentiles(0.0, 0.0, 0.0))
    assert all(value in (0, {}, nothing) for value in counted.values())
    use()
    once = snapshot(recorder)
    assert once.queue_wait.p50 == pytest.approx(0.25, rel=0.01)
    kept = copy.deepcopy(once)
    use()
    assert once == kept
    recorder.reset()
    assert snapshot(recorder) == snapshot(Recorder())
    use()
    assert snapshot(recorder) == once == kept


def test_a_snapshot_reads_as_a_sentence() -> None:
    recorder = Recorder()
    recorder.add({"calls": 1234, "error": 1, "cancelled": 2, "rejected": 11})
    for _ in range(40):
        recorder.ended(ended_batch(30, 0.0625), errors=0)
    busy = recorder.snapshot(5678, 0, 32)
    assert repr(busy) == (
        "Stats(1,200 items in 40 batches of 30.0 on average, 62.5 ms each; 5,678 waiting, 32 in "
        "flight; calls 1,234, errors 1, cancelled 2, rejected 11; "
        f"queue wait {busy.queue_wait}; processing {busy.processing_time}; left because eager 40)"
    )


def test_other_processes_see_when_a_call_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = batched.dynamically(lambda items: items)
    seen: list[int] = []
    monkeypatch.setattr(observer, "share", lambda: seen.append(fn.stats.calls))
    monkeypatch.setattr(observer, "meters", [lambda *_: None])
    assert fn(1) == 1
    fn.shutdown()
    assert seen == [1, 1]
