"""Pages of the documentation: their blocks, and a shell in which the blocks of a page run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

LIMIT_S: Final = 1800.0
"""Time for the blocks of one page, installation included (s)."""
LOG: Final = "background.log"
"""File with the output of commands in the background."""
FILE: Final = re.compile(r"# (\S+)\n")
"""First line of a block that is a file."""
MEASURED: Final = re.compile(r"\d[\d.,]*(?= (?:s|ms|batches|queries|requests)\b)")
"""A number that differs between runs: a time, or a count that depends on the moments of calls."""
PORTS: Final = ("8000", "8001")
"""Ports of the servers of all pages. Servers take the first one by default."""


def blocks(text: str, languages: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block in these languages."""
    return re.findall(rf"^```({languages})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def with_free_ports(text: str) -> tuple[str, dict[str, str]]:
    """Return the text with free ports, and variables that lead servers to the first one."""
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        ports = [str(free.getsockname()[1]) for free in (first, second)]
    for written, port in zip(PORTS, ports, strict=True):
        text = text.replace(written, port)
    return text, {"UVICORN_PORT": ports[0], "PORT": ports[0]}


def environment(python: Path, **added: str) -> Mapping[str, str]:
    """Return the variables of a shell in which `python` is the Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    path = f"{python.absolute().parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **added}


def without_measures(output: str) -> object:
    return MEASURED.sub("N", output.rstrip())


def paste(
    text: str,
    folder: Path,
    environment: Mapping[str, str],
    shape: Callable[[str], object] = without_measures,
) -> None:
    """Run the blocks of a page in one shell, and compare the shapes of outputs.

    A block that begins with the name of a file in a comment is written to that file. The shell
    runs blocks of the language sh. A block of the language text after one of these is its output.
    Blocks of the language console are transcripts, and are not run.
    """
    lines: list[str] = []
    expected: dict[Path, str] = {}
    found = blocks(text, r"\w+")
    for number, ((language, block), (following, shown)) in enumerate(pairwise([*found, ("", "")])):
        if language == "sh":
            in_background = block.rstrip().endswith("&")
            output = folder / (LOG if in_background else f"{number}.out")
            lines.append(f"{{\n{block}}} >>{output}" + " 2>&1" * in_background)
            if following == "text":
                expected[output] = shown
        elif language not in ("text", "console"):
            name = FILE.match(block)
            assert name, f"no first line names the file of this block:\n{block}"
            lines.append(f"cat >{name[1]} <<'END OF FILE'\n{block}END OF FILE")
    errors = folder / "errors.log"
    with errors.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    try:
        status = shell.wait(LIMIT_S)
    finally:
        with suppress(ProcessLookupError):  # none is left
            os.killpg(shell.pid, signal.SIGKILL)
    outputs = {path: path.read_text() for path in folder.glob("*.out")}
    log = folder / LOG
    told = [*outputs.values(), errors.read_text(), log.read_text() if log.exists() else ""]
    assert status == 0, f"exit status {status}\n" + "\n".join(told)
    for output, shown in expected.items():
        assert shape(outputs[output]) == shape(shown)
