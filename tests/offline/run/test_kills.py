"""Runs that are killed at any moment, and go on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("pyarrow")

from stage import wait_until
from trial_runs import committed_in, computed_again
from trials import Ended, Trials

pytestmark = pytest.mark.once

ROWS: Final = 1500


def killed(place: str, times: int) -> Any:
    return pytest.param(place, times, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize(
    ("place", "times"),
    [
        pytest.param("threads", 2, marks=pytest.mark.timeout(120)),
        *(killed(place, 100) for place in ("threads", "coroutine", "processes")),
        killed("ray", 20),
    ],
)
def test_a_killed_run_goes_on_loses_nothing_and_computes_nothing_twice(
    server: Trials, tmp_path: Path, place: str, times: int
) -> None:
    if place == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    log = tmp_path / "log"
    seed = random.randrange(10**6)
    print(f"\n{place}: {times} SIGKILLs, seed {seed}")
    chance = random.Random(seed)

    def run(dest: Path, kill_after_s: float | None = None) -> Ended:
        log.unlink(missing_ok=True)
        return server.run(
            "to_be_killed",
            kill_after_s=kill_after_s,
            count=ROWS,
            dest=str(dest),
            log=str(log),
            place=place,
            seed=chance.randrange(1000),
        )

    whole = tmp_path / "whole.parquet"
    undisturbed = run(whole)
    assert undisturbed.how == "done", undisturbed.lines
    kills = ends = 0
    while kills < times:
        dest = tmp_path / f"{ends}.parquet"
        progress = Path(f"{dest}.progress")
        before = committed_in(progress)
        moment = chance.uniform(undisturbed.result["started_s"], 1.2 * undisturbed.seconds)
        ended = run(dest, moment)
        again = computed_again(log, {row for row, status in before.items() if status == "ok"})
        assert not again, f"computed again: {again[:5]}"
        if ended.how == "killed":
            kills += 1
            if place != "ray":  # processes of Ray may outlive their driver for a minute
                wait_until(lambda: not server.leftovers())
            lost = set(before) - set(committed_in(progress))
            assert not lost, f"lost: {sorted(lost)[:5]}"
            if kills < times:
                continue
            ended = run(dest)
        assert ended.how == "done", ended.lines
        assert dest.read_bytes() == whole.read_bytes(), "another result"
        assert ended.result["letters"] == undisturbed.result["letters"]
        ends += 1
