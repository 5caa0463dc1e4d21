"""Batched functions in a notebook: cells that run again, and tables."""

from __future__ import annotations

import itertools
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
import batched
"""

DEFINITION = """
@batched.dynamically
def embed(texts):
    return [len(text) for text in texts]
"""


def execute(*cells: str, tmp_path: Path) -> list[list[Any]]:
    """Run cells in a new kernel, without warnings. Return the outputs of each of them."""
    first = FIRST.format(root=str(ROOT))
    sources = [textwrap.dedent(cell).strip() for cell in (first, *cells)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [cell.outputs for cell in notebook.cells[1:]]
    names = [each.get("name") for each in itertools.chain.from_iterable(outputs)]
    assert "stderr" not in names, outputs
    return outputs


def test_a_replaced_function_still_works_and_statistics_are_a_table(tmp_path: Path) -> None:
    cell = DEFINITION + 'embed("x")'
    use = 'print(old("four"), embed("six"))'
    *_, printed, (output,) = execute(
        cell, "old = embed", cell, use, "embed.stats", tmp_path=tmp_path
    )
    assert "".join(each.get("text", "") for each in printed).strip() == "4 3"
    assert "<td>total_batches<td>" in output["data"]["text/html"]
    assert output["data"]["text/plain"].startswith("Stats")
