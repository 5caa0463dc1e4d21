"""The README does what it says: its Python blocks run, its commands and settings are the real
ones.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from batched._batcher import Options
from batched._collate.settings import FeatureSettings
from batched._core.policy import BatchPolicy

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            id=f"block {number}",
            marks=[pytest.mark.model] if "transformers" in block else [],
        )
        for number, block in enumerate(BLOCKS, 1)
    ],
)
@pytest.mark.filterwarnings("default")  # of the model's libraries
def test_every_python_block_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for package in ("sentence_transformers", "fastapi"):
        if package in block:
            pytest.importorskip(package)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 3
    assert README.count("```python") == len(BLOCKS)


def test_there_are_two_commands() -> None:
    demo, tests = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert demo.strip() == 'python -m pip install -e ".[demo]" && python -m batched demo'
    assert tests.strip() == 'python -m pip install -e ".[test]" && python -m pytest'


def shown(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default)


def table(after: str, before: str) -> dict[str, str]:
    """Names and defaults in the table between two headings."""
    return dict(
        re.findall(
            r"^\| `(\w+)` \| `?([^|`]+)`? \|", README.split(after)[1].split(before)[0], re.MULTILINE
        )
    )


def test_the_settings_table_is_true() -> None:
    given = table("## Settings", "## Questions")
    assert given.pop("name") == "the function's"
    own = {
        field.name: field.default
        for field in fields(Options)
        if field.name not in ("policy", "features", "name")
    }
    policy = {field.name: field.default for field in fields(BatchPolicy)}
    assert given == {name: shown(default) for name, default in {**policy, **own}.items()}


def test_the_table_of_the_settings_for_tensors_is_true() -> None:
    given = table("## Arrays and tensors", "## Settings")
    assert given.pop("pad_token") == "0"
    assert given.pop("on_oom") == "split"
    defaults = {
        field.name: field.default for field in fields(FeatureSettings) if field.name != "pad_token"
    }
    assert given == {name: shown(default) for name, default in defaults.items()}
