"""Batched functions in a notebook: cells that run again, tables, bars and warnings."""

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
import threading, time
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


def execute(*cells: str, tmp_path: Path, warned: bool = False) -> list[list[Any]]:
    """Run cells in a new kernel. Return the outputs of each of them.

    Only if `warned` may warnings be among the outputs.
    """
    first = FIRST.format(root=str(ROOT))
    sources = [textwrap.dedent(cell).strip() for cell in (first, *cells)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [cell.outputs for cell in notebook.cells[1:]]
    names = [each.get("name") for each in itertools.chain.from_iterable(outputs)]
    assert ("stderr" in names) == warned, outputs
    return outputs


def text_of(outputs: list[Any]) -> str:
    return "".join([each.get("text", "") for each in outputs])


@pytest.mark.parametrize(
    ("settings", "use"),
    [
        pytest.param("", 'embed("x")', id="called", marks=pytest.mark.slow),
        pytest.param("", 'embed("x"); _ = list(embed.map("abc"))\nembed', id="displayed"),
        pytest.param(
            "(prepare=str, max_concurrent_batches=2)",
            'embed(["x"] * 100)\nembed',
            id="prepared",
            marks=pytest.mark.slow,
        ),
        pytest.param("", 'embed.submit("x")', id="future", marks=pytest.mark.slow),
    ],
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


def test_functions_and_statistics_are_shown_as_tables(tmp_path: Path) -> None:
    shown = execute(DEFINITION.format(settings=""), "embed", "embed.stats", tmp_path=tmp_path)[1:]
    for (output,), caption in zip(shown, ("embed, batch_size 32", "Stats"), strict=True):
        assert f"<caption>{caption}</caption>" in output["data"]["text/html"]
        assert output["data"]["text/plain"].lower().lstrip("<").startswith(("batched", "stats"))


def test_the_bar_of_a_map_is_a_widget(tmp_path: Path) -> None:
    pytest.importorskip("ipywidgets")
    cell = 'print(list(embed.map(["a", "bc"], progress=True)))'
    outputs = execute(DEFINITION.format(settings=""), cell, tmp_path=tmp_path)[-1]
    assert text_of(outputs).strip() == "[1, 2]"
    (bar,) = [each["data"] for each in outputs if each.output_type == "display_data"]
    assert "application/vnd.jupyter.widget-view+json" in bar
    assert bar["text/plain"].startswith("embed:")


def test_a_series_that_is_mapped_item_by_item_is_warned_of_once(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    use = """
        import math, pandas
        from batched._runtime import recorder
        recorder.SHORT_GAP, recorder.LONG = math.inf, 0.0  # on a machine of any speed
        texts = pandas.Series(["a", "bc"] * 2000)
        assert texts.map(embed).tolist() == embed(list(texts)) == list(embed.map(texts))
        texts.map(embed);
    """
    (output,) = execute(DEFINITION.format(settings=""), use, tmp_path=tmp_path, warned=True)[-1]
    assert output["name"] == "stderr"
    assert output["text"].count("RuntimeWarning: one thread calls embed item by item") == 1
