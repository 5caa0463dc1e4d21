"""Agreement of docs/design/ with the code: rooms, names and tests."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
CODE = ROOT / "batched"
DESIGN = ROOT / "docs/design"


def page(name: str) -> str:
    return (DESIGN / name).read_text()


def test_the_table_of_rooms_names_each_room_once() -> None:
    table = page("architecture.md").split("\n## Rooms\n")[1].split("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)`", cells)) == sorted(
        {"batched"}
        | {
            path.stem
            for path in CODE.iterdir()
            if (path.suffix == ".py" or (path / "__init__.py").exists())
            and not path.name.startswith("__")
        }
    )


def test_every_guarantee_has_its_tests() -> None:
    text = page("guarantees.md")
    promises = re.findall(r"^- .*?(?=^- |^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert promises
    for promise in promises:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", promise)
        assert tests, promise
        for path, test in tests:
            made = rf"^(async )?(def )?{test}( =|\()"  # a function, or a state machine's case
            assert re.search(made, (ROOT / path).read_text(), re.MULTILINE), f"{path}::{test}"


@functools.cache
def code_words() -> set[str]:
    """Return the words of all code, comments included, and the names of modules."""
    paths = [
        path for name in ("batched", "benchmarks", "tests") for path in (ROOT / name).rglob("*.py")
    ]
    texts = [f"{path.name} {path.read_text()}" for path in paths if path != Path(__file__)]
    return set(re.findall(r"\w+", " ".join(texts)))


@pytest.mark.parametrize("name", sorted(path.name for path in DESIGN.glob("*.md")))
def test_names_on_the_pages_exist_in_the_code(name: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([A-Za-z_][\w.]*)`", prose):
        assert set(code.split(".")) <= code_words(), code
    for path in re.findall(r"`((?:tests|benchmarks)/[\w/.]+)", prose):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(_\w+/\w+\.py)`", prose):
        assert (CODE / path).exists(), path
