"""Agreement of pyproject, workflows, the check of a change, and the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import batched

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TESTS = (ROOT / ".github/workflows/tests.yml").read_text()
CHECK = (ROOT / ".ci/run").read_text()
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_each_extra_of_a_hint_exists() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "batched").rglob("*.py"))
    named = set(re.findall(r'\bneeds\(.*, "(\w+)"\)', code))  # imports
    named |= set(re.findall(r'\badd\(\s+"\w+",\s+"[.:\w]+",\s+"(\w+)",', code))  # commands
    assert {"chat", "bench"} <= named
    assert named <= PYPROJECT["project"]["optional-dependencies"].keys()


def test_the_version_is_in_one_place_and_the_changelog_begins_with_it() -> None:
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert "version:" not in (ROOT / ".github/CITATION.cff").read_text().replace("cff-version:", "")
    latest = re.search(r"^## (\S+),", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)
    assert latest is not None
    assert latest[1] == batched.__version__


DEVELOPERS = {"demo", "docs", "lint", "test", "test-core"}


def test_the_extras_for_users_pin_no_torch_and_the_metadata_has_no_address() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert extras.keys() > DEVELOPERS
    for name in extras.keys() - DEVELOPERS:
        assert not [each for each in extras[name] if each.startswith("torch==")]
    assert "urls" not in PYPROJECT["project"]


def test_the_workflow_tests_the_pythons_of_the_classifiers() -> None:
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(PYPROJECT["project"]["classifiers"]))
    matrix = re.search(r"^ +python: \[(.*)\]$", TESTS, re.MULTILINE)
    assert matrix is not None
    assert re.findall(r'"(.*?)"', matrix[1]) == classified
    assert PYPROJECT["project"]["requires-python"] == f">={classified[0]}"


def test_the_workflow_runs_the_commands_of_the_check() -> None:
    for command in (
        r'-m "not \(.*\)"',  # tests without a model
        r"--deselect tests/test_typing\.py",
        r"coverage report --fail-under=100",
        r'--include="batched/.*"',
        r"ruff check \.",
        r"ruff format --check \.",
    ):
        [found] = set(re.findall(command, CHECK))
        assert found in TESTS


def test_the_files_of_the_quick_tests_exist() -> None:
    named = re.findall(r"tests/[\w/.]+", (ROOT / "tests/quick.txt").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_each_action_is_pinned_to_a_commit_that_has_a_version() -> None:
    used = [
        line.strip().removeprefix("- ")
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses:" in line and "uses: ./" not in line
    ]
    assert used
    for line in used:
        assert re.fullmatch(r"uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", line), line
