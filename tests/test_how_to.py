"""Each page of docs/how-to runs as pasted: its own installation, its files, its commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from pages import LIMIT_S, ROOT, blocks, environment, paste, with_free_ports

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(sys.platform == "win32", reason="the pages are for a POSIX shell"),
]

PAGES: Final = sorted(set(ROOT.glob("docs/how-to/*.md")) - {ROOT / "docs/how-to/index.md"})
INDEX: Final = (ROOT / "docs/how-to/index.md").read_text()
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
QUICK: Final = {"cache.md": "cachetools", "pydantic.md": "pydantic", "sql.md": "sqlite3"}
"""Pages that run with each change, and a package that they need. They load no model, and start no
server.
"""
WORDS: Final = range(150, 601)
"""Words of a page; code counts."""
OWN: Final = re.compile(r"^batched-dynamically(?:\[([\w,]+)\])?$")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the wheel of this checkout, and the release of torch to install."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", str(ROOT)]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    (torch,) = (each for each in PROJECT["optional-dependencies"]["demo"] if "torch==" in each)
    (folder / "constraints.txt").write_text(torch)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs_as_pasted_in_a_fresh_environment(
    page: Path, wheels: Path, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    (folder := tmp_path / "empty").mkdir()
    text, ports = with_free_ports(page.read_text())
    found = f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}"
    paste(
        text,
        folder,
        environment(
            tmp_path / "fresh/bin/python",
            PIP_FIND_LINKS=found,
            PIP_CONSTRAINT=str(wheels / "constraints.txt"),
            PIP_REQUIRE_VIRTUALENV="1",
            PIP_QUIET="1",
            PIP_NO_COMPILE="no",  # pip reads "no" as --no-compile; most modules are never imported
            **ports,
        ),
    )


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_page_runs_in_the_environment_of_the_tests(name: str, tmp_path: Path) -> None:
    pytest.importorskip(QUICK[name])
    text = (ROOT / "docs/how-to" / name).read_text()
    (_, install), *_ = blocks(text, "sh")
    paste(
        text.replace(install, ":\n"),
        tmp_path,
        environment(Path(sys.executable), PYTHONPATH=str(ROOT)),
    )


def test_each_page_is_short_and_on_the_list_and_first_installs_extras_that_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(text.split()) in WORDS, page
        assert f"]({page.name})" in INDEX
        (language, block), *_ = blocks(text, r"\w+")
        words = shlex.split(block)
        assert (language, words[:4]) == ("sh", ["python", "-m", "pip", "install"])
        (own,) = (match for word in words[4:] if (match := OWN.match(word)))
        assert set((own[1] or "demo").split(",")) <= set(PROJECT["optional-dependencies"])
