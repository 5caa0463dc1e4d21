"""The types of decorated functions, as mypy and pyright see them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typing"


def run(command: list[str]) -> str:
    """What a checker prints. It is not to be measured along where this suite is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(path: Path) -> dict[int, str]:
    """The errors of mypy --strict by line."""
    pytest.importorskip("mypy")
    output = run([sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(path)])
    found = re.findall(rf"{re.escape(path.name)}:(\d+): error: (.*)$", output, re.MULTILINE)
    assert len(found) == output.count(" error: "), output
    return {int(line): message for line, message in found}


def pyright(path: Path) -> dict[int, str]:
    """The errors of pyright by line."""
    command = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("pyright is not installed")
    output = run([command, "--outputjson", str(path)])
    report = json.loads(output)["generalDiagnostics"]
    return {
        each["range"]["start"]["line"] + 1: each["message"]
        for each in report
        if each["severity"] == "error"
    }


checkers = pytest.mark.parametrize("check", [mypy, pyright])


@checkers
@pytest.mark.timeout(300)
def test_right_uses_have_their_types(check: Callable[[Path], dict[int, str]]) -> None:
    assert check(HERE / "accepted.py") == {}


@checkers
@pytest.mark.timeout(300)
def test_wrong_uses_are_rejected(check: Callable[[Path], dict[int, str]]) -> None:
    path = HERE / "rejected.py"
    wrong = [
        number
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("# wrong")
    ]
    assert len(wrong) == 31
    assert sorted(check(path)) == wrong
