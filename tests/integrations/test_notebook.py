"""Batched functions in a notebook: cells that run again, tables, bars and warnings."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

import batched

pytestmark = pytest.mark.once

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(batched.__file__).parent.parent

FIRST = """
import sys
sys.path.insert(0, {root!r})
import threading, time, warnings
warnings.simplefilter("error")
import batched

def workers():
    "The threads of batched functions, once all have ended or ten seconds have passed."
    for _ in range(1000):
        names = [thread.name for thread in threading.enumerate() if "batched" in thread.name]
        if not names:
            break
        time.sleep(0.01)
    return names
"""

DEFINITION = """
@batched.dynamically{settings}
def embed(texts):
    return [len(text) for text in texts]
"""


def execute(*cells: str, tmp_path: Path) -> list[list[Any]]:
    """Run cells in a new kernel. Return the outputs of each of them."""
    first = FIRST.format(root=str(ROOT))
    sources = [textwrap.dedent(cell).strip() for cell in (first, *cells)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    return [cell.outputs for cell in notebook.cells[1:]]


def text_of(outputs: list[Any]) -> str:
    return "".join([each.get("text", "") for each in outputs])


@pytest.mark.parametrize(
    ("settings", "use"),
    [
        ("", 'embed("x")'),
        ("", 'embed("x"); _ = list(embed.map("abc"))\nembed'),
        ("(prepare=str, max_concurrent_batches=2)", 'embed(["x"] * 100)\nembed'),
        ("", 'embed.submit("x")'),
    ],
    ids=["called", "displayed", "prepared", "future"],
)
def test_a_cell_that_runs_again_ends_the_threads_of_the_function_that_it_replaces(
    settings: str, use: str, tmp_path: Path
) -> None:
    definition = DEFINITION.format(settings=settings)
    outputs = execute(*[definition + use] * 10, definition + "print(workers())", tmp_path=tmp_path)
    assert text_of(outputs[-1]).strip() == "[]"


def test_a_replaced_function_still_works(tmp_path: Path) -> None:
    cell = DEFINITION.format(settings="") + 'embed("x")'
    outputs = execute(
        cell, "old = embed", cell, 'print(old("four"), embed("six"))', tmp_path=tmp_path
    )
    assert text_of(outputs[-1]).strip() == "4 3"
