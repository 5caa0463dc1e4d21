"""Batched functions in a notebook: cells that run again, and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

import batched

pytestmark = pytest.mark.once

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FIRST = f"""
import sys
sys.path.insert(0, {str(Path(batched.__file__).parent.parent)!r})
import batched
"""
DEFINITION = """
@batched.dynamically
def embed(texts):
    return [len(text) for text in texts]
embed("x")
"""


def test_a_replaced_function_still_works_and_statistics_are_a_table(tmp_path: Path) -> None:
    use = 'print(old("four"), embed("six"))'
    sources = FIRST, DEFINITION, "old = embed", DEFINITION, use, "embed.stats"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _, *others, (output,) = [cell.outputs for cell in notebook.cells]
    assert "stderr" not in [each.get("name") for outputs in others for each in outputs]
    assert "".join(each["text"] for each in others[-1]).strip() == "4 3"
    assert "<td>total_batches<td>" in output["data"]["text/html"]
    assert output["data"]["text/plain"].startswith("Stats")
