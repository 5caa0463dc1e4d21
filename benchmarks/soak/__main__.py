"""Soak: every accepted call ends exactly once, with its own result, under faults of all kinds.

Calls and faults are mixed at random for some minutes.

In `benchmarks/`: `python -m soak --minutes 10 --seed 1`. The exit status is 1 if a call was lost,
answered twice or wrongly, or hung. `--first 17 --episodes 1` with the same seed runs one episode
alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import itertools
import os
import platform
import random
import sys
import threading
import time
from collections.abc import Iterator

from soak.books import VERDICTS, Report
from soak.mixed import KINDS, run_episodes

STUCK = 300.0
"""Longest time of an episode, in which every wait has its own bound (s)."""


def for_minutes(minutes: float, first: int) -> Iterator[int]:
    """Yield numbers from `first` on until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    for index in itertools.count(first):
        if time.monotonic() > deadline:
            return
        # not faulthandler's: a forked child could not set its own
        watch = threading.Timer(STUCK, _give_up, (index,))
        watch.daemon = True
        watch.start()
        yield index
        watch.cancel()


def _give_up(index: int) -> None:
    print(f"episode {index} does not end", flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def show(report: Report, seconds: float, seed: int, episodes: int) -> None:
    """Print the outcome."""
    packages = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("batched-dynamically", "anyio", "trio", "uvloop", "numpy")
    )
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{packages}; command: {' '.join(sys.argv)}"
    )
    faults = sum(report.faults.values())
    rate = report.accepted / seconds
    print(
        f"seed {seed}: {report.accepted:,} calls accepted in {episodes:,} episodes and "
        f"{seconds:,.0f} s, {rate:,.0f} a second"
    )
    for outcome, count in report.outcomes.most_common():
        print(f"  {outcome:<40} {count:>10,}")
    print(f"faults injected: {faults:,}")
    for kind in [*KINDS, *sorted(report.faults.keys() - set(KINDS))]:
        print(f"  {kind:<40} {report.faults[kind]:>10,}")
    print(", ".join(f"{verdict} {report.verdicts[verdict]}" for verdict in VERDICTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed if not given")
    parser.add_argument("--first", type=int, default=0, help="number of the first episode")
    parser.add_argument(
        "--episodes", type=int, default=None, help="number of episodes, instead of minutes"
    )
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 20) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    began, count = time.monotonic(), itertools.count()
    if arguments.episodes is None:
        indices = for_minutes(arguments.minutes, arguments.first)
    else:
        indices = iter(range(arguments.first, arguments.first + arguments.episodes))
    counted = (index for index, _ in zip(indices, count, strict=False))
    report = run_episodes(seed, counted, write=lambda line: print(line, flush=True))
    show(report, time.monotonic() - began, seed, next(count))
    sys.exit(1 if report.verdicts else 0)


if __name__ == "__main__":
    main()
