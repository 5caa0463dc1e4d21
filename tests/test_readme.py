"""The README does what it says: its Python blocks run, its commands and settings are the real ones."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from batched._core.policy import BatchPolicy

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"block {number}", marks=[pytest.mark.model] if "sentence_transformers" in block else [])
        for number, block in enumerate(BLOCKS, 1)
    ],
)
@pytest.mark.filterwarnings("default")  # of the model's libraries
def test_every_python_block_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "sentence_transformers" in block:
        pytest.importorskip("sentence_transformers")
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 3
    assert README.count("```python") == len(BLOCKS)


def test_there_are_two_commands() -> None:
    demo, tests = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert demo.strip() == 'python -m pip install -e ".[demo]" && python -m batched demo'
    assert tests.strip() == 'python -m pip install -e ".[test]" && python -m pytest'


def test_the_settings_table_is_true() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", README.split("## Settings")[1].split("## Questions")[0], re.MULTILINE))
    assert table.pop("name") == "the function's"
    defaults = {field.name: field.default for field in fields(BatchPolicy)}
    assert table == {name: f'"{default}"' if isinstance(default, str) else str(default) for name, default in defaults.items()}
