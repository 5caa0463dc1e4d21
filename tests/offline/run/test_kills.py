"""Runs that are killed at any moment, and go on."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("pyarrow")

from trial_runs import committed_in, computed_again
from trials import Ended, Trials

pytestmark = pytest.mark.once

ROWS: Final = 1500
SOON: Final = 30.0
"""Longest time in which the processes of a killed run are to end (s)."""


class Killing:
    """Runs of one function that are killed and started again until they have come to an end."""

    def __init__(self, server: Trials, folder: Path, place: str) -> None:
        self.server = server
        self.folder = folder
        self.log = folder / "log"
        self.place = place
        self.seed = random.randrange(10**6)
        self.chance = random.Random(self.seed)
        undisturbed = self.run(folder / "whole.parquet")
        assert undisturbed.how == "done", undisturbed.lines
        self.whole = (folder / "whole.parquet").read_bytes()
        self.letters = undisturbed.result["letters"]
        self.earliest = undisturbed.result["started_s"]
        self.latest = 1.2 * undisturbed.seconds

    def run(self, dest: Path, kill_after_s: float | None = None) -> Ended:
        self.log.unlink(missing_ok=True)
        return self.server.run(
            "to_be_killed",
            kill_after_s=kill_after_s,
            count=ROWS,
            dest=str(dest),
            log=str(self.log),
            place=self.place,
            seed=self.chance.randrange(1000),
        )

    def kill(self, times: int) -> None:
        """Kill runs so many times, and look at each end and at each start."""
        kills = ends = 0
        began = time.perf_counter()
        while kills < times:
            dest = self.folder / f"{ends}.parquet"
            progress = Path(f"{dest}.progress")
            before = committed_in(progress)
            ended = self.run(dest, self.chance.uniform(self.earliest, self.latest))
            good = {row for row, status in before.items() if status == "ok"}
            again = computed_again(self.log, good)
            assert not again, f"computed again: {again[:5]}, seed {self.seed}"
            if ended.how == "killed":
                kills += 1
                if self.place != "ray":  # processes of Ray may outlive their driver for a minute
                    self.wait_for_the_last_process()
                lost = set(before) - set(committed_in(progress))
                assert not lost, f"lost: {sorted(lost)[:5]}, seed {self.seed}"
                if kills < times:
                    continue
                ended = self.run(dest)
            assert ended.how == "done", ended.lines
            assert dest.read_bytes() == self.whole, f"another result, seed {self.seed}"
            assert ended.result["letters"] == self.letters
            ends += 1
        print(
            f"\n{self.place}: {kills} SIGKILLs of runs to {ends} results, seed {self.seed}, "
            f"{time.perf_counter() - began:.0f} s"
        )

    def wait_for_the_last_process(self) -> None:
        deadline = time.monotonic() + SOON
        while left := self.server.leftovers():
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


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
    Killing(server, tmp_path, place).kill(times)
