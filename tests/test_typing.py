"""The types of decorated functions, as mypy and pyright see them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typing"


def mypy(path: Path) -> dict[int, str]:
    """The errors of mypy --strict by line."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-absolute-path", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent, timeout=240, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(rf"^{re.escape(str(path))}:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert len(found) == done.stdout.count(" error: "), done.stdout
    return {int(line): message for line, message in found}


def pyright(path: Path) -> dict[int, str]:
    """The errors of pyright by line."""
    command = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("pyright is not installed")
    done = subprocess.run(
        [command, "--outputjson", str(path)], capture_output=True, text=True, cwd=HERE.parent.parent, timeout=240, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1: each["message"] for each in report if each["severity"] == "error"}


checkers = pytest.mark.parametrize("check", [mypy, pyright])


@checkers
@pytest.mark.timeout(300)
def test_right_uses_have_their_types(check: Callable[[Path], dict[int, str]]) -> None:
    assert check(HERE / "accepted.py") == {}


@checkers
@pytest.mark.timeout(300)
def test_wrong_uses_are_rejected(check: Callable[[Path], dict[int, str]]) -> None:
    path = HERE / "rejected.py"
    wrong = [number for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# wrong")]
    assert len(wrong) == 19
    assert sorted(check(path)) == wrong
