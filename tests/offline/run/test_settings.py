"""Settings of runs: trials, rows for `where`, outputs that would replace a column of the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched import offline
from batched.errors import SourceError

ROWS = [{"id": number, "text": "x" * number} for number in range(9)]


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def run(source: Any, dest: Path, **settings: Any) -> offline.Report:
    plain = {"input": "text", "output": "length", "key": "id", "watch": False}
    return offline.run(lengths, source, dest, **{**plain, **settings})


def read(dest: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in dest.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["list", "iterator", "file"])
def test_a_trial_reads_the_first_rows_and_the_whole_run_computes_only_the_rest(
    kind: str, tmp_path: Path
) -> None:
    file, dest = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def source() -> Any:
        return {"list": ROWS, "iterator": iter(ROWS), "file": file}[kind]

    assert run(source(), dest, limit=4).ok == 4
    assert [row["id"] for row in read(dest)] == [0, 1, 2, 3]
    assert run(source(), dest, limit=4).skipped == 4
    report = run(source(), dest)
    assert (report.ok, report.skipped) == (5, 4)
    assert [row["id"] for row in read(dest)] == [*range(9)]


def test_a_limit_is_a_positive_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit must be"):
        run(ROWS, tmp_path / "out.jsonl", limit=0)


def test_a_column_of_the_second_row_is_not_replaced_either(tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "label": "of a person"}]
    with pytest.raises(SourceError, match="has a column 'label' already"):
        run(rows, tmp_path / "out.jsonl", output="label")


@pytest.mark.parametrize("kind", ["list", "file", "table"])
def test_an_output_replaces_a_column_of_the_source_only_if_told_so(
    kind: str, tmp_path: Path
) -> None:
    import pyarrow as pa

    file, dest = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = {"list": ROWS, "file": file, "table": pa.Table.from_pylist(ROWS)}[kind]
    with pytest.raises(SourceError, match="has a column 'text' already; .* replace=True"):
        run(source, dest, output="text")
    assert not dest.exists()
    assert run(source, dest, output="text", replace=True).ok == 9
    assert read(dest)[3] == {"id": 3, "text": 3}


def test_a_predicate_of_two_parameters_gets_the_row_too(tmp_path: Path) -> None:
    dest = tmp_path / "out.jsonl"

    def differs(length: int, row: dict[str, Any]) -> bool:
        return length > 3 and row["text"] != "x" * 5

    assert run(ROWS, dest, where=lambda length, least=3: length > least).filtered == 4
    assert run(ROWS, dest, where=differs, on_mismatch="recompute").filtered == 5
    assert [row["id"] for row in read(dest)] == [4, 6, 7, 8]


def test_a_document_becomes_its_chunks_in_two_runs(tmp_path: Path) -> None:
    chunks, dest = tmp_path / "chunks.parquet", tmp_path / "out.jsonl"
    offline.run(
        lambda texts: [[text[at : at + 3] for at in range(0, len(text), 3)] for text in texts],
        ROWS,
        chunks,
        input="text",
        output="chunks",
        key="id",
        watch=False,
    )
    source = offline.explode(chunks, "chunks", key="id")
    assert run(source, dest, input="chunks", key="key", keep=["id", "key"]).ok == 15
    assert read(dest)[3:5] == [
        {"id": 4, "key": "[4, 0]", "length": 3},
        {"id": 4, "key": "[4, 1]", "length": 1},
    ]
