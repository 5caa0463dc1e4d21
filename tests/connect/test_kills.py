"""Kills of clients and of model processes at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from stage import wait_until

KILLS = int(os.environ.get("KILLS", "200"))
CLIENTS = 3
MOST_SECONDS = 2.0
"""Longest time of a call around a kill (s), and time for the rest to end."""


class Client:
    """A client process, and its output."""

    def __init__(self, folder: Path, number: int) -> None:
        self.output = folder / f"{number}.txt"
        support = Path(__file__).parent.parent / "support"
        path = os.pathsep.join([str(support), *filter(None, sys.path)])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "XDG_RUNTIME_DIR": str(folder),
            "SERVED_LOG": str(folder / "computed.txt"),
        }
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(support / "connect_kills.py")],
                stdin=subprocess.PIPE,
                stdout=file,
                cwd=folder,
                env=environment,
            )

    def has_answers(self) -> bool:
        return self.output.stat().st_size > 0

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def servers(folder: Path) -> list[int]:
    """Return the model processes whose socket is in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (
                f"{folder}/batched/".encode() in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def segments(folder: Path) -> list[str]:
    """Return the shared memory of living processes of this trial."""
    marks = [f"{folder}".encode()]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and any(
                mark in (entry / "environ").read_bytes() for mark in marks
            ):
                found += [
                    line
                    for line in (entry / "maps").read_text().split("\n")
                    if "memfd:batched" in line
                ]
        except OSError:
            pass
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_no_call_is_lost_or_wrong_or_computed_twice_whatever_is_killed(short_path: Path) -> None:
    chance = random.Random(0)
    clients = [Client(short_path, number) for number in range(CLIENTS)]
    outputs = [client.output for client in clients]
    for kill in range(KILLS):
        for client in clients:
            wait_until(client.has_answers)
        time.sleep(chance.uniform(0, 0.3))
        if chance.random() < 0.5:
            for pid in servers(short_path):
                os.kill(pid, signal.SIGKILL)
        else:
            client = clients.pop(chance.randrange(CLIENTS))
            client.kill()
            clients.append(Client(short_path, CLIENTS + kill))
            outputs.append(clients[-1].output)
    for client in clients:
        client.end()
    outcomes: Counter[str] = Counter()
    items: Counter[str] = Counter()
    longest = 0.0
    for output in outputs:
        for line in output.read_text().split("\n")[:-1]:
            item, seconds, outcome = line.split(" ", 2)
            items[item] += 1
            outcomes[outcome] += 1
            longest = max(longest, float(seconds))
    print(outcomes, f"longest call {longest:.3f} s")
    assert outcomes.keys() == {"right", "gone"}
    assert set(items.values()) == {1}
    computed = Counter((short_path / "computed.txt").read_text().split())
    del computed["built"]
    assert set(computed.values()) == {1}
    wait_until(lambda: not servers(short_path))
    wait_until(lambda: not list((short_path / "batched").iterdir()))
    assert segments(short_path) == []
    assert longest < MOST_SECONDS
