"""Kills of clients and of model processes at random moments."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from served import environment, model_processes

from stage import wait_until

KILLS = int(os.environ.get("KILLS", "200"))
CLIENTS = 3
MOST_SECONDS = 2.0
"""Longest time of a call around a kill (s), and time for the rest to end."""


class Client:
    def __init__(self, folder: Path, number: int) -> None:
        self.output = folder / f"{number}.txt"
        support = Path(__file__).parent.parent / "support"
        log = str(folder / "computed.txt")
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(support / "connect_kills.py")],
                stdin=subprocess.PIPE,
                stdout=file,
                cwd=folder,
                env=environment(TMPDIR=str(folder), SERVED_LOG=log),
            )

    def has_answers(self) -> bool:
        return self.output.stat().st_size > 0

    def end(self) -> int:
        """Let the process end, unless it was killed. Return its exit status."""
        with self.process:
            self.process.communicate()
        return self.process.returncode


def segments(folder: Path) -> list[str]:
    """Return the shared memory of living processes of this trial."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (entry / "environ").read_bytes():
                found += re.findall(".*memfd:batched.*", (entry / "maps").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_no_call_is_lost_or_wrong_or_computed_twice_whatever_is_killed(short_path: Path) -> None:
    chance, sockets = random.Random(0), short_path / f"batched-{os.geteuid()}"
    clients = [Client(short_path, number) for number in range(CLIENTS)]
    outputs = [client.output for client in clients]
    for kill in range(KILLS):
        for client in clients:
            wait_until(client.has_answers)
        time.sleep(chance.uniform(0, 0.3))
        if chance.random() < 0.5:
            for pid in model_processes(sockets):
                os.kill(pid, signal.SIGKILL)
        else:
            client = clients.pop(chance.randrange(CLIENTS))
            client.process.kill()
            client.end()
            clients.append(Client(short_path, CLIENTS + kill))
            outputs.append(clients[-1].output)
    assert [client.end() for client in clients] == [0] * CLIENTS
    calls = [line.split(" ", 2) for each in outputs for line in each.read_text().split("\n")[:-1]]
    items, seconds, outcomes = zip(*calls, strict=True)
    assert set(outcomes) == {"right", "gone"}
    assert len(set(items)) == len(items)
    computed = Counter((short_path / "computed.txt").read_text().split())
    del computed["built"]
    assert set(computed.values()) == {1}
    wait_until(lambda: not model_processes(sockets))
    wait_until(lambda: not list(sockets.iterdir()))
    assert segments(short_path) == []
    assert max(map(float, seconds)) < MOST_SECONDS
