"""Contest: the same questions to this project and to its peers, each in an environment and a
process of its own.

Environments are created in `.peers` at the root of the repository and kept there. A peer's own
packages come first in its environment. Behind them it sees the packages of this environment, so
that torch is installed only once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import Peer

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".peers"
INSTALLING = 360.0
"""Longest time for the creation of an environment (s)."""
ANSWERING = 600.0
"""Longest time for the answers of a peer (s)."""

BEHIND = "packages_behind.pth"
"""File that makes further packages visible in an environment."""
ANSWERS = "[{"
"""First characters of the line with the answers; a peer may print other lines."""

ROUNDS = "Runs of each: {}, in rounds in which all took their turns; figures are medians."
"""Note below a table."""

Question = dict[str, Any]


class Unavailable(Exception):
    """A peer cannot be measured; the message is the reason."""


@dataclass
class Found:
    """Answers to all questions."""

    runs: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    """Figures of all rounds, by question, row and figure."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reasons why figures are missing, by row."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the peers."""

    def add(self, question: str, row: str, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.missing[f"{question}: {row}"] = answer["error"]
            return
        for name, value in answer.items():
            self.runs.setdefault((question, row, name), []).append(value)


def version(peer: Peer) -> str:
    """Return the version of a peer, as installed in its environment. Create the environment if
    needed.

    Raises:
        Unavailable: The peer cannot be installed.
    """
    found = _installed(peer)
    if found is None:
        _install(peer)
        found = _installed(peer)
    if found is None:
        raise Unavailable(f"pip installed no {peer.distribution}")
    _look_behind(peer)
    return found


def interpreter(peer: Peer) -> str:
    return (
        str(ENVIRONMENTS / peer.distribution / "bin" / "python")
        if peer.requirement
        else sys.executable
    )


def environment(peer: Peer) -> dict[str, str]:
    """Return the environment variables of a peer's processes; only ours can import this project."""
    paths = [HERE] if peer.requirement else [HERE, HERE.parent]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONWARNINGS": "ignore",
    }


def _installed(peer: Peer) -> str | None:
    code = f"import importlib.metadata; print(importlib.metadata.version({peer.distribution!r}))"
    try:
        done = subprocess.run(
            [interpreter(peer), "-c", code],
            env=environment(peer),
            cwd=HERE,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return None
    pinned = peer.requirement.partition("==")[2]
    return (
        done.stdout.strip()
        if done.returncode == 0 and pinned in ("", done.stdout.strip())
        else None
    )


def _install(peer: Peer) -> None:
    """Create the environment of a peer, in which pip sees only the peer's own packages."""
    home = ENVIRONMENTS / peer.distribution
    print(f"installing {peer.requirement}", file=sys.stderr, flush=True)
    pip = [
        interpreter(peer),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "1",
        peer.requirement,
        *peer.beside.split(),
    ]
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", home],
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALLING,
        )
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=INSTALLING)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not installed within {INSTALLING:g} s") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"not installed: {last_line(error.stderr)}") from None


def _look_behind(peer: Peer) -> None:
    """Let the environment of a peer see the packages of this one, behind its own."""
    [packages] = (ENVIRONMENTS / peer.distribution).glob("lib/python*/site-packages")
    seen = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / BEHIND).write_text("".join(f"{path}\n" for path in seen), encoding="utf-8")


def last_line(text: str) -> str:
    """Return the last line of an output, which most likely tells the error."""
    return (text.strip().splitlines() or ["no reason given"])[-1][:200]


def ask(peer: Peer, questions: list[Question], timeout: float = ANSWERING) -> list[dict[str, Any]]:
    """Return the answers of a peer, from a process that ends afterwards.

    Raises:
        Unavailable: The peer has no answer.
    """
    command = [interpreter(peer), "-m", "peers.questions"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        command, cwd=HERE, env=environment(peer), text=True, start_new_session=True, **pipes
    ) as process:
        try:
            output, errors = process.communicate(json.dumps(questions), timeout)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"no answers within {timeout:g} s") from None
        finally:
            end(process)
    if process.returncode:
        raise Unavailable(last_line(errors))
    answers: list[dict[str, Any]] = json.loads(
        next(line for line in reversed(output.splitlines()) if line.startswith(ANSWERS))
    )
    return answers


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and all processes of its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def contest(
    questions: Callable[[Peer, dict[str, Any]], Sequence[Question]],
    rounds: int,
    *,
    ours: Sequence[Peer],
    peers: Sequence[Peer] = (),
    rounds_of_peers: int | None = None,
) -> Found:
    """Ask all peers in turn, round after round, so that noise affects all alike. Our rows share one
    process, and all of them answer a question before the next.

    Args:
        questions: Returns the questions of a row. Each question has a `question` and
            a unique `title`.
        rounds: Number of rounds for our rows.
        ours: Rows that run in this environment.
        peers: All other rows.
        rounds_of_peers: Number of rounds for the peers, if different.

    Raises:
        Unavailable: One of our rows cannot be measured.
    """
    found = Found()
    rounds_of_peers = rounds if rounds_of_peers is None else rounds_of_peers
    for round_ in range(rounds):
        _ask_all(ours, questions, found)
        for peer in peers if round_ < rounds_of_peers else ():
            if peer.name in found.missing:
                continue
            try:
                found.versions[peer.package] = version(peer)
                _ask_all([peer], questions, found)
            except Unavailable as reason:
                found.missing[peer.name] = str(reason)
    return found


def _ask_all(
    peers: Sequence[Peer],
    questions: Callable[[Peer, dict[str, Any]], Sequence[Question]],
    found: Found,
) -> None:
    """Add the answers of the peers of one environment to `found`."""
    asked = [
        (row, question | {"module": peer.module})
        for peer in peers
        for row, settings in peer.labels().items()
        for question in questions(peer, dict(settings))
    ]
    titles = [question["title"] for _, question in asked]
    asked.sort(key=lambda each: titles.index(each[1]["title"]))
    if not asked:
        return
    answers = ask(peers[0], [question for _, question in asked])
    for (row, question), answer in zip(asked, answers, strict=True):
        if "error" in answer and not peers[0].requirement:
            # without what it is about, there is no result
            raise Unavailable(f"{question['title']}: {row}: {answer['error']}")
        found.add(question["title"], row, answer)
