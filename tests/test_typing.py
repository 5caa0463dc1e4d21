"""The types of decorated functions, as mypy and pyright infer them for one file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pages import ROOT, environment

USES = ROOT / "tests/typing/uses.py"
Errors = dict[int, str]  # by line

pytestmark = pytest.mark.once


def run(*command: str) -> str:
    done = subprocess.run(
        [*command, str(USES)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        check=False,
        env=environment(Path(sys.executable)),
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy() -> Errors:
    pytest.importorskip("mypy")
    output = run(sys.executable, "-m", "mypy", "--strict", "--no-error-summary")
    found = re.findall(r"uses\.py:(\d+): error: (.*)$", output, re.MULTILINE)
    assert len(found) == output.count(" error: "), output
    return {int(line): message for line, message in found}


def pyright() -> Errors:
    command = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("pyright is not installed")
    report = json.loads(run(command, "--outputjson", "--pythonpath", sys.executable))
    return {
        each["range"]["start"]["line"] + 1: each["message"]
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    }


@pytest.mark.parametrize("check", [mypy, pyright])
@pytest.mark.timeout(300)
def test_right_uses_have_their_types_and_wrong_ones_are_rejected(
    check: Callable[[], Errors],
) -> None:
    lines = enumerate(USES.read_text().splitlines(), 1)
    wrong = [number for number, line in lines if line.endswith("# wrong")]
    assert len(wrong) == 44
    found = check()
    assert sorted(found) == wrong, found
