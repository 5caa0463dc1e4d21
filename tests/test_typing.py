"""The types of decorated functions, as mypy and pyright infer them for two files."""

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
FILES = [HERE / "accepted.py", HERE / "rejected.py"]
Errors = dict[tuple[str, int], str]  # by file and line

pytestmark = pytest.mark.once


def run(command: list[str]) -> str:
    """Return the output of a checker, run without coverage."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [*command, *map(str, FILES)],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy() -> Errors:
    """Return the errors of mypy --strict."""
    pytest.importorskip("mypy")
    output = run([sys.executable, "-m", "mypy", "--strict", "--no-error-summary"])
    found = re.findall(r"(\w+\.py):(\d+): error: (.*)$", output, re.MULTILINE)
    assert len(found) == output.count(" error: "), output
    return {(name, int(line)): message for name, line, message in found}


def pyright() -> Errors:
    """Return the errors of pyright."""
    command = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("pyright is not installed")
    report = json.loads(run([command, "--outputjson", "--pythonpath", sys.executable]))[
        "generalDiagnostics"
    ]
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in report
        if each["severity"] == "error"
    }


@pytest.mark.parametrize("check", [mypy, pyright])
@pytest.mark.timeout(300)
def test_right_uses_have_their_types_and_wrong_ones_are_rejected(
    check: Callable[[], Errors],
) -> None:
    wrong = [
        (path.name, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("# wrong")
    ]
    assert len(wrong) == 45
    found = check()
    assert sorted(found) == wrong, found
