"""Blocks of the page on offline runs: the tutorial as one script, and each recipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from chat_server import chat_server
from object_store import Bucket, object_store
from pages import FILE, ROOT, blocks

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

TUTORIAL, HOW_TO = (ROOT / "docs/offline.md").read_text().split("\n## Recipes\n")
NEEDS: Final = {"offline.Ray": "ray", "s3://": "moto", "ChatClient": "openai"}
"""Texts of blocks, and the packages that these blocks need."""
CHAT_SERVICE: Final = "http://localhost:8000/v1"
"""Address that the pages write for a chat service."""
LIMIT_S: Final = 240.0
"""Time for one script (s)."""
SHELL: Final = """
import subprocess
from pathlib import Path
def run_shell(text):
    subprocess.run(["sh", "-e", "-c", text], check=True)
"""


def script(text: str) -> str:
    """Return the Python blocks of a text. A block of the shell is a call, and a block that begins
    with the name of a file is written to that file.
    """
    lines = [SHELL]
    for language, block in blocks(text, "python|sh"):
        if language == "sh":
            lines.append(f"run_shell({block!r})")
        elif file := FILE.match(block):
            lines.append(f"Path({file[1]!r}).write_text({block!r})")
        else:
            lines.append(block)
    return "\n".join(lines)


def run(text: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a script in a folder, as a user would."""
    (folder / "script.py").write_text(text)
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": commands,
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": "local",  # a cluster of its own
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """Yield environment variables for a store with a bucket, which speaks the protocol of S3."""
    with object_store() as port:
        Bucket(port, "bucket")
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }


def test_the_tutorial_runs_from_its_first_block_to_its_last(tmp_path: Path) -> None:
    run(script(TUTORIAL), tmp_path, {})
    ((_, shown),) = blocks(TUTORIAL, "json")
    assert (tmp_path / "lengths.jsonl").read_text().startswith(shown)


INTRODUCTION, *RECIPES = re.split(r"^### ", HOW_TO, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(each, id=each.partition("\n")[0]) for each in RECIPES]
)
def test_each_recipe_runs_after_the_introduction(
    recipe: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = script(INTRODUCTION + recipe)
    for mark, package in NEEDS.items():
        if mark in text:
            pytest.importorskip(package)
    environment = request.getfixturevalue("store") if "s3://" in text else {}
    if CHAT_SERVICE not in text:
        run(text, tmp_path, environment)
        return
    with chat_server() as server:
        run(text.replace(CHAT_SERVICE, server.url), tmp_path, {"OPENAI_API_KEY": "key"})
