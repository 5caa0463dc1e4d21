"""Results of runs of one function or of several."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batched

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

from batched import offline
from batched.errors import ResultError, RunMismatch, RunStopped, SourceError
from batched.offline.watch.watcher import read_status


class Lengths:
    """A batch function that remembers its batches."""

    def __init__(self, bad: Sequence[Any] = ()) -> None:
        self.bad = set(bad)
        self.batches: list[list[Any]] = []

    def __call__(self, texts: list[Any]) -> list[int]:
        self.batches.append(list(texts))
        for text in texts:
            if text in self.bad:
                raise ValueError(f"bad row {text}")
        return [len(str(text)) for text in texts]

    @property
    def given(self) -> list[Any]:
        return [text for batch in self.batches for text in batch]


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": f"text {number}"} for number in range(count)]


def run(fn: Callable[..., Any], source: Any, dest: Path, **settings: Any) -> offline.Report:
    known: dict[str, Any] = {"input": "text", "output": "length", "key": "id", "version": 1}
    return offline.run(fn, source, dest, **{**known, "name": "lengths", "watch": False, **settings})


def read(dest: Path) -> list[dict[str, Any]]:
    if dest.suffix == ".jsonl":
        return [json.loads(line) for line in dest.read_text().splitlines()]
    rows: list[dict[str, Any]] = pq.read_table(dest).to_pylist()
    return rows


def expected(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "length": len(row["text"])} for row in rows]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_the_result_has_every_row_in_the_order_of_the_source_and_none_is_computed_again(
    tmp_path: Path, form: Callable[[list[dict[str, Any]]], Any]
) -> None:
    class Model(Lengths):
        def __init__(self) -> None:
            raise AssertionError("nothing is to be computed")

    rows, dest = rows_of(1000), tmp_path / "out.parquet"
    report = run(Lengths(), form(rows), dest, batch_size=16)
    assert read(dest) == expected(rows)
    assert (report.ok, report.failed, report.skipped, report.recomputed) == (1000, 0, 0, 0)
    assert report.output == str(dest)
    before = dest.read_bytes()
    assert run(Model, form(rows), dest, batch_size=64, workers=4).skipped == 1000
    assert dest.read_bytes() == before


def test_rows_that_were_edited_removed_inserted_or_moved_cost_only_themselves(
    tmp_path: Path,
) -> None:
    rows, dest = rows_of(200), tmp_path / "out.parquet"
    run(Lengths(), rows, dest)
    rows[7] = {"id": 7, "text": "edited"}
    del rows[100]
    rows.insert(50, {"id": 1000, "text": "inserted"})
    rows.reverse()
    fn = Lengths()
    report = run(fn, rows, dest)
    assert sorted(fn.given) == ["edited", "inserted"]
    assert read(dest) == expected(rows)
    assert (report.ok, report.skipped, report.recomputed) == (2, 198, 1)


def test_without_a_key_rows_are_known_by_number_and_content_also_from_a_generator(
    tmp_path: Path,
) -> None:
    rows, dest = rows_of(50), tmp_path / "out.parquet"
    run(Lengths(), iter(rows), dest, key=None)
    rows[20]["text"] = "edited"
    rows.append({"id": 50, "text": "more"})
    fn = Lengths()
    run(fn, iter(rows), dest, key=None)
    assert sorted(fn.given) == ["edited", "more"]
    assert read(dest) == expected(rows)


def test_a_bad_row_costs_one_row_and_few_calls(tmp_path: Path) -> None:
    rows, fn = rows_of(64), Lengths(bad=["text 41"])
    report = run(fn, rows, tmp_path / "out.parquet", batch_size=64)
    assert len(fn.batches) <= 13
    assert read(tmp_path / "out.parquet") == expected(rows[:41] + rows[42:])
    assert (report.ok, report.failed, dict(report.errors)) == (63, 1, {"ValueError": 1})
    (letter,) = report.dead_letters()
    assert (letter["key"], letter["step"], letter["phase"]) == (41, "lengths", "inference")
    assert letter["error"] == "ValueError: bad row text 41"
    assert "in __call__" in letter["traceback"]


def test_a_decorated_function_keeps_its_settings_and_its_observer(tmp_path: Path) -> None:
    seen: list[batched.stats.BatchRecord] = []
    together = threading.Barrier(3)

    @batched.dynamically(batch_size=10, max_concurrent_batches=3, on_batch=seen.append)
    def lengths(texts: list[str]) -> list[int]:
        together.wait(10)
        return [len(text) for text in texts]

    assert run(lengths, rows_of(60), tmp_path / "own.parquet").ok == 60
    together = threading.Barrier(2)
    assert run(lengths, rows_of(60), tmp_path / "two.parquet", workers=2).ok == 60
    assert {record.size for record in seen} == {10}


def test_a_row_alone_is_called_once_where_no_retry_is_wanted(tmp_path: Path) -> None:
    calls: list[str] = []

    def ask(texts: list[str]) -> list[int]:
        calls.extend(texts)
        if texts == ["text 3"]:
            raise ConnectionError("down")
        return [len(text) for text in texts]

    once = offline.Retry(attempts=1)
    report = run(ask, rows_of(5), tmp_path / "out.parquet", batch_size=1, retry=once)
    assert [letter["key"] for letter in report.dead_letters()] == [3]
    assert calls.count("text 3") == 1


@pytest.mark.parametrize("form", [list, iter])
def test_too_many_failed_rows_end_the_run(tmp_path: Path, form: Callable[[Any], Any]) -> None:
    rows, dest = rows_of(300), tmp_path / "out.parquet"
    bad = [row["text"] for row in rows[:8]]
    for most in (5, 0.01):
        with pytest.raises(RunStopped, match=f"max_failed is {most}"):
            run(Lengths(bad), form(rows), dest, max_failed=most)
    assert not dest.exists()
    assert run(Lengths(bad), form(rows), dest, max_failed=0.1).failed == 8


def chain(
    tmp_path: Path,
    first: Callable[..., Any],
    second: Callable[..., Any],
    versions: tuple[int, int] = (1, 1),
    **settings: Any,
) -> offline.Report:
    pipeline = offline.Pipeline(
        offline.Step(first, input="text", output="upper", name="first", version=versions[0]),
        offline.Step(
            second,
            input=["upper", "id"],
            output=["both", "size"],
            name="second",
            version=versions[1],
        ),
    )
    known: dict[str, Any] = {"key": "id", "watch": False, **settings}
    return pipeline.run(rows_of(300), tmp_path / "out.parquet", **known)


class Upper(Lengths):
    def __call__(self, texts: list[Any]) -> list[Any]:
        super().__call__(texts)
        return [text.upper() for text in texts]


class Both(Lengths):
    def __call__(self, items: list[Any]) -> list[Any]:
        super().__call__([item["id"] for item in items])
        return [
            {"both": f"{item['upper']} {item['id']}", "size": len(item["upper"])} for item in items
        ]


def test_a_run_that_begins_anew_goes_on_after_an_interruption(tmp_path: Path) -> None:
    chain(tmp_path, Upper(), Both())

    seen = threading.Event()

    def interrupted(snapshot: offline.Snapshot) -> None:
        if snapshot.steps[1].ok:
            seen.set()
            raise KeyboardInterrupt

    class Held(Both):
        def __call__(self, items: list[Any]) -> list[Any]:
            assert not self.batches or seen.wait(30)
            return super().__call__(items)

    with pytest.raises(KeyboardInterrupt):
        settings: dict[str, Any] = {"resume_step": 1, "batch_size": 30, "watch": interrupted}
        chain(tmp_path, Upper(), Held(), **settings)
    report = chain(tmp_path, Upper(), second := Both(), resume_step=1)
    assert report.skipped > 0
    assert len(second.given) == 300 - report.skipped
    chain(tmp_path, Upper(), second := Both(), resume_step=1)
    assert len(second.given) == 300, "the result was published, so the same call begins anew"


def test_a_run_goes_on_anew_from_a_step_which_may_have_other_code(tmp_path: Path) -> None:
    first, second = Upper(), Both()
    chain(tmp_path, first, second)
    with pytest.raises(RunMismatch, match="step 'first': its version was '1' and is '2'"):
        chain(tmp_path, first, second, (2, 2), resume_step="second")
    chain(tmp_path, first, second, (1, 2), resume_step="second")
    assert (len(first.given), len(second.given)) == (300, 600)
    chain(tmp_path, first, second, (2, 3), resume_from_last=False)
    assert (len(first.given), len(second.given)) == (600, 900)
    with pytest.raises(TypeError, match="give one"):
        chain(tmp_path, first, second, resume_from_last=True, resume_step=1)
    with pytest.raises(ValueError, match="'first', 'second'"):
        chain(tmp_path, first, second, resume_step="third")


def test_a_step_that_changes_its_input_changes_no_result_of_an_earlier_run(tmp_path: Path) -> None:
    def make(texts: list[str]) -> list[Any]:
        return [np.array([3.0, 4.0]) for _ in texts]

    def lengths(vectors: list[Any]) -> list[float]:
        for vector in vectors:
            vector /= np.linalg.norm(vector)
        return [1.0] * len(vectors)

    def run_all(version: int) -> offline.Report:
        vectors = offline.Step(make, input="text", output="vector")
        step = offline.Step(lengths, input="vector", output="length", version=version)
        return offline.Pipeline(vectors, step).run(
            rows_of(10), dest, key="id", watch=False, on_mismatch="recompute"
        )

    dest = tmp_path / "out.parquet"
    run_all(1)
    assert run_all(2).steps[0].ok == 0
    assert read(dest)[0]["vector"] == [3.0, 4.0]


def test_results_of_other_code_are_not_mixed(tmp_path: Path) -> None:
    rows, dest = rows_of(100), tmp_path / "out.parquet"
    run(Lengths(), rows, dest)
    fn = Lengths()
    with pytest.raises(RunMismatch, match="version"):
        run(fn, rows, dest, version=2)
    with pytest.raises(RunMismatch, match="'keep' keeps them where only the code"):
        run(fn, rows, dest, version=2, name="other")
    for on_mismatch in ("refuse", "keep"):
        with pytest.raises(RunMismatch, match=r"'id', not by None; [^;]*\Z") as refused:
            run(fn, rows, dest, key=None, on_mismatch=on_mismatch)
        assert "'keep'" not in str(refused.value), "no way that is refused too is offered"
    assert fn.batches == []
    run(fn, rows, dest, version=2, on_mismatch="recompute")
    assert len(fn.given) == 100


def test_after_a_function_is_fixed_its_good_results_may_stay(tmp_path: Path) -> None:
    rows, dest = rows_of(100), tmp_path / "out.parquet"
    run(Lengths(bad=["text 5"]), rows, dest)
    mended = Lengths()
    report = run(mended, rows, dest, version=2, on_mismatch="keep")
    assert mended.given == ["text 5"]
    assert (report.ok, report.skipped) == (1, 99)
    assert run(mended, rows, dest, version=2).skipped == 100
    # what was kept is still of the old code, until it is computed again
    assert run(mended, rows, dest, version=2, on_mismatch="recompute").ok == 100
    assert run(mended, rows, dest, version=2, on_mismatch="recompute").skipped == 100
    with pytest.raises(RunMismatch, match="its output was"):
        run(mended, rows, dest, version=2, output="size", on_mismatch="keep")


def test_after_all_rows_have_failed_the_function_may_be_fixed(tmp_path: Path) -> None:
    rows, dest = rows_of(5), tmp_path / "out.parquet"
    with pytest.raises(RunStopped, match="none of the 5 rows has a result"):
        run(Lengths(bad=[row["text"] for row in rows]), rows, dest)
    report = run(Lengths(), rows, dest, version=2)
    assert (report.ok, [*report.dead_letters()]) == (5, [])


def test_a_wrong_source_or_column_costs_no_result(tmp_path: Path) -> None:
    rows, dest = rows_of(20), tmp_path / "out.parquet"
    with pytest.raises(SourceError, match="did you mean 'text'"):
        run(Lengths(), pa.Table.from_pylist(rows), dest, input="texte")
    assert run(Lengths(), rows, dest).ok == 20
    for wrong in ({"source": tmp_path / "none.csv"}, {"input": "texte"}):
        for anew in ({"version": 2}, {"resume_from_last": False}):
            given: dict[str, Any] = {"source": pa.Table.from_pylist(rows), **wrong, **anew}
            with pytest.raises(SourceError):
                run(Lengths(), dest=dest, on_mismatch="recompute", **given)
    assert run(Lengths(), rows, dest).skipped == 20


def test_items_are_made_and_results_taken_row_by_row_and_an_exit_there_costs_one_row(
    tmp_path: Path,
) -> None:
    dest = tmp_path / "out.parquet"

    def prepare(text: str) -> int:
        if text == "text 7":
            raise SystemExit(3)
        return len(text)

    def finish(result: int) -> str:
        if result == 12:
            raise SystemExit(3)
        return f"{result} letters"

    def double(lengths: list[int]) -> list[int]:
        return [2 * length for length in lengths]

    report = run(double, rows_of(20), dest, preprocess=prepare, postprocess=finish)
    letters = {(letter["phase"], letter["error"]) for letter in report.dead_letters()}
    assert letters == {("preprocess", "SystemExit: 3"), ("postprocess", "SystemExit: 3")}
    assert [row["length"] for row in read(dest)] == ["14 letters"] * 10
    assert report.failed == 10


def test_rows_go_to_the_model_of_their_key(tmp_path: Path) -> None:
    built: list[int] = []

    class Models:
        def __init__(self) -> None:
            built.append(1)

        def __call__(self, texts: list[str], key: str) -> list[str]:
            assert {text[-1] for text in texts} == {key}
            return [f"{key}: {text}" for text in texts]

    rows, dest = rows_of(100), tmp_path / "out.parquet"
    run(Models, rows, dest, route=lambda text: text[-1], batch_size=8)
    assert built == [1]
    assert [row["length"] for row in read(dest)] == [f"{n % 10}: text {n}" for n in range(100)]


def test_few_values_in_many_rows_are_computed_once_for_each_batch(tmp_path: Path) -> None:
    fn = Lengths()
    rows, dest = [{"id": n, "text": "x" * (n % 5)} for n in range(5000)], tmp_path / "out.parquet"
    run(batched.dynamically(batch_size=32, dedupe=True)(fn.__call__), rows, dest)
    assert read(dest) == expected(rows)
    assert len(fn.given) < 100


def test_equal_rows_do_not_share_what_postprocess_changes(tmp_path: Path) -> None:
    @batched.dynamically(dedupe=True)
    def lengths(texts: list[str]) -> list[dict[str, int]]:
        return [{"length": len(text)} for text in texts]

    rows = [{"id": n, "text": "text"} for n in range(5)]
    run(lengths, rows, tmp_path / "out.parquet", postprocess=lambda result: result.pop("length"))
    assert read(tmp_path / "out.parquet") == expected(rows)


@batched.inference.dynamically(batch_size=16)
def doubled(features: dict[str, np.ndarray]) -> np.ndarray:
    result: np.ndarray = features["ids"] * 2
    return result


def test_features_are_padded_and_results_cut_as_online(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "ids": list(range(1, 2 + n % 7))} for n in range(100)]
    dest = tmp_path / "out.parquet"
    run(doubled, rows, dest, input="ids", output="twice")
    assert [row["twice"] for row in read(dest)] == [[2 * n for n in r["ids"]] for r in rows]


def test_features_are_prepared_as_online(tmp_path: Path) -> None:
    @batched.inference.dynamically(prepare=lambda text: {"ids": np.array([[len(text), 7]])})
    def total(features: dict[str, np.ndarray]) -> np.ndarray:
        sums: np.ndarray = features["ids"].sum(axis=1) - 7
        return sums

    rows, dest = [{"id": n, "text": "x" * (n % 5)} for n in range(20)], tmp_path / "out.parquet"
    run(total, rows, dest)
    assert read(dest) == expected(rows)


def test_features_of_several_rows_are_a_dead_letter(tmp_path: Path) -> None:
    def preprocess(number: int) -> dict[str, np.ndarray]:
        return {"ids": np.full((1 + (number == 2), 3), number)}

    rows, dest = [{"id": number} for number in range(4)], tmp_path / "out.jsonl"
    report = run(doubled, rows, dest, input="id", output="twice", preprocess=preprocess)
    (letter,) = report.dead_letters()
    assert (letter["key"], letter["phase"]) == (2, "preprocess")
    assert "the features of a row of the source must have one row, got 2" in letter["error"]
    assert [row["id"] for row in read(dest)] == [0, 1, 3]


def test_like_lengths_run_together(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "text": "x" * (1 + 37 * n % 64)} for n in range(640)]
    fn = Lengths()
    run(fn, rows, tmp_path / "out.parquet", length=len, batch_size=64)
    longest = sum(len(batch) * max(map(len, batch)) for batch in fn.batches)
    assert longest < 1.2 * sum(len(row["text"]) for row in rows)


@pytest.mark.parametrize("batch_size", [7, 512])
@pytest.mark.parametrize("bad", [(3,), (0, 1, 2, 3, 4)], ids=str)
def test_each_row_gets_its_own_result_also_if_items_are_sorted_by_length(
    batch_size: int, bad: tuple[int, ...], tmp_path: Path
) -> None:
    rows = [{"id": n, "text": f"{n} " + "x" * (37 * n % 64)} for n in range(100)]

    def first(texts: list[str]) -> list[Any]:
        numbers = [int(text.partition(" ")[0]) for text in texts]
        if set(numbers) & set(bad):
            raise ValueError("bad row")
        return [ValueError("no result") if number == 50 else number for number in numbers]

    def length(text: str) -> int:
        return -1 if bad == (3,) and text.startswith("60 ") else len(text)

    dest = tmp_path / "out.parquet"
    report = run(first, rows, dest, length=length, batch_size=batch_size)
    found = read(dest)
    assert [row["length"] for row in found] == [row["id"] for row in found]
    failed = {*bad, 50, 60} if bad == (3,) else {*bad, 50}
    assert {letter["key"] for letter in report.dead_letters()} == failed
    assert len(found) == len(rows) - report.failed


def test_a_window_of_nothing_but_broken_lines_costs_these_lines(tmp_path: Path) -> None:
    source, dest = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id"\n')
    with pytest.raises(RunStopped, match="none of the 1 rows has a result: 1 x source"):
        run(Lengths(), source, dest)
    source.write_text(write_lines(source, rows_of(2048)).read_text() + "{\n")
    report = run(Lengths(), source, dest)
    assert (report.ok, report.failed) == (2048, 1)


def test_committed_results_leave_memory_while_the_run_goes_on(tmp_path: Path) -> None:
    class Text(str):
        """A text that weak references can watch."""

        __slots__ = ("__weakref__",)

    made: list[weakref.ref[Text]] = []

    def copies(texts: list[str]) -> list[Text]:
        deadline = time.monotonic() + 30
        while sum(each() is not None for each in made) > 256:
            assert time.monotonic() < deadline, "more results in memory than are under way"
            time.sleep(0.01)
        results = list(map(Text, texts))
        made.extend(map(weakref.ref, results))
        return results

    run(copies, rows_of(1024), tmp_path / "out.parquet", batch_size=64)
    assert len(made) == 1024


def test_the_library_finds_a_batch_size(tmp_path: Path) -> None:
    fn = Lengths()
    rows, dest = rows_of(3000), tmp_path / "out.parquet"
    run(fn, rows, dest, batch_size=offline.Auto(4, 64))
    sizes = {len(batch) for batch in fn.batches}
    assert 4 in sizes
    assert 4 < max(sizes) <= 64
    assert read(dest) == expected(rows)


def test_an_empty_source_makes_an_empty_result(tmp_path: Path) -> None:
    dest = tmp_path / "out.jsonl"
    assert run(Lengths(), [], dest).ok == 0
    assert dest.read_text() == ""


def test_a_result_that_is_whole_is_not_written_again(tmp_path: Path) -> None:
    source, dest = write_lines(tmp_path / "in.jsonl", rows_of(100)), tmp_path / "out.parquet"
    run(Lengths(), source, dest)
    before = dest.stat().st_ino
    run(Lengths(), source, dest)
    assert dest.stat().st_ino == before
    for _ in range(2):
        run(Lengths(), source, dest, keep="id")
        assert read(dest)[3] == {"id": 3, "length": 6}
        dest.unlink()
    source.write_text(source.read_text().replace('"id": 4', '"title": "t", "id": 4'))
    run(Lengths(), source, dest)
    assert read(dest)[4] == {"id": 4, "text": "text 4", "title": "t", "length": 6}


def test_a_result_is_written_again_with_other_types_or_another_reading_of_the_source(
    tmp_path: Path,
) -> None:
    source, dest = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text("id,text,name\n0,text 0,größe\n", encoding="cp1252")
    for encoding, name in (("cp437", "gr÷▀e"), ("cp1252", "größe")):
        run(Lengths(), offline.csv(source, encoding=encoding), dest)
        assert read(dest) == [{"id": "0", "text": "text 0", "name": name, "length": 6}]
    run(Lengths(), offline.csv(source, encoding="cp1252"), dest, output={"length": pa.int16()})
    assert pq.read_schema(dest).field("length").type == pa.int16()


def test_a_result_is_written_anew_if_the_run_before_died_with_all_rows_committed(
    tmp_path: Path,
) -> None:
    source, dest = write_lines(tmp_path / "in.jsonl", rows_of(50)), tmp_path / "out.parquet"

    def die_before_the_result(snapshot: offline.Snapshot) -> None:
        if snapshot.steps[0].ok == 50:
            raise KeyboardInterrupt

    def half(texts: list[str]) -> list[int]:
        return [len(text) // 2 for text in texts]

    run(Lengths(), source, dest)
    anew: dict[str, Any] = {"version": 2, "on_mismatch": "recompute"}
    with pytest.raises(KeyboardInterrupt):
        run(half, source, dest, watch=die_before_the_result, **anew)
    assert read(dest) == expected(rows_of(50))
    assert run(half, source, dest, version=2).skipped == 50
    assert read(dest) == [{**row, "length": len(row["text"]) // 2} for row in rows_of(50)]


def test_a_result_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, events = tmp_path / "out.parquet", []
    sync, move = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        events.append(("sync", os.fstat(descriptor).st_ino))

    def note_move(source: Any, target: Any, **options: Any) -> None:
        number = os.stat(source).st_ino
        move(source, target, **options)
        if Path(target) == dest:
            events.append(("move", number))

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_move)
    run(Lengths(), rows_of(5), dest)
    moved = events.index(("move", dest.stat().st_ino))
    assert ("sync", dest.stat().st_ino) in events[:moved]
    assert ("sync", tmp_path.stat().st_ino) in events[moved:]


def test_a_step_may_be_added_and_is_taken_away_only_on_request(tmp_path: Path) -> None:
    rows, dest = rows_of(20), tmp_path / "out.parquet"
    first = offline.Step(Upper(), input="text", output="upper", name="first", version=1)
    second = offline.Step(Upper(), input="upper", output="twice", name="second", version=1)

    def run_of(*steps: offline.Step, **settings: Any) -> offline.Report:
        return offline.Pipeline(*steps).run(rows, dest, key="id", watch=False, **settings)

    run_of(first)
    report = run_of(first, second)
    assert [step.ok for step in report.steps] == [0, 20]
    with pytest.raises(RunMismatch, match="'second'"):
        run_of(first)
    assert run_of(first, on_mismatch="recompute").skipped == 20
    assert set(read(dest)[0]) == {"id", "text", "upper"}


def test_arguments_in_another_order_or_of_another_form_are_refused(tmp_path: Path) -> None:
    dest: Any = tmp_path / "out.parquet"
    of_step: dict[str, Any] = {"input": "id", "output": "n"}
    orders: list[Any] = [("in.csv", Lengths(), dest), (rows_of(5), dest, Lengths())]
    for given in orders:
        with pytest.raises(TypeError, match=r"run\(function, source, result, \.\.\.\) begins with"):
            offline.run(*given, **of_step)
    wrongs: list[Any] = [Lengths(), None, 3]
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"run\(source, result, \.\.\.\): the result is a path"):
            offline.run(Lengths(), rows_of(5), wrong, **of_step)
    steps: Any = [Lengths(), batched.dynamically(lambda items: items)]
    for given in ([steps], steps, []):
        with pytest.raises(TypeError, match="a pipeline is made of steps, one after another: "):
            offline.Pipeline(*given)


def test_wrong_arguments_of_a_function_or_class_are_refused_where_the_step_is_written() -> None:
    def plain(texts: list[str], mark: str) -> list[str]:
        return [f"{text}{mark}" for text in texts]

    class Uncalled:
        pass

    for given, sentence in (
        ({"fn": plain}, "missing a required argument: 'mark'; .* after the list"),
        ({"fn": plain, "args": (1, 2)}, "too many positional"),
        ({"fn": Lengths, "kwargs": {"size": 3}}, "'size'; .* given to the constructor"),
        ({"fn": Uncalled}, "no __call__"),
    ):
        settings: dict[str, Any] = {"input": "a", "output": "b", **given}
        with pytest.raises(TypeError, match=sentence):
            offline.Step(**settings)


@pytest.mark.parametrize("processes", [False, True])
def test_a_class_that_cannot_be_built_ends_the_run_with_its_error(
    tmp_path: Path, processes: bool
) -> None:
    class Broken:
        def __init__(self) -> None:
            raise queue.Empty("path")  # which the run's own queue raises, too

        def __call__(self, texts: list[str]) -> list[str]:
            return texts

    with pytest.raises(queue.Empty) as stopped:
        run(Broken, rows_of(5), tmp_path / "out.parquet", processes=processes)
    *lines, step = stopped.value.__notes__
    assert step == "in step 'lengths'"
    assert ["in __init__" in text for text in lines] == [True] * processes  # a traceback
    known = read_status(tmp_path / "out.parquet.progress")
    assert known is not None
    assert (known["state"], known["stopped"]) == ("failed", "Empty: path")


def test_a_stop_tells_the_error_with_its_lines(tmp_path: Path) -> None:
    def broken(texts: list[str]) -> list[str]:
        return [text["x"] for text in texts]  # type: ignore[index]  # which is the bug

    for processes in (False, True):
        with pytest.raises(RunStopped) as stopped:
            run(broken, rows_of(5), tmp_path / "out.parquet", processes=processes)
        cause = stopped.value.__cause__
        assert isinstance(cause, TypeError)
        assert not processes or "in broken" in "".join(cause.__notes__)


def test_an_error_of_the_source_ends_the_run_and_costs_no_result(tmp_path: Path) -> None:
    source, dest = tmp_path / "in.csv", tmp_path / "out.parquet"
    lines = ["id,text", *[f"{number},text {number}" for number in range(5000)]]
    source.write_text("\n".join([*lines[:4501], '4500,"text" 4500']))
    with pytest.raises(SourceError, match="line 4502: not CSV"):
        run(Lengths(), source, dest)
    source.write_text("\n".join(lines))
    report = run(Lengths(), source, dest)
    assert report.skipped > 0
    assert report.ok + report.skipped == 5000


def test_code_for_single_rows_that_always_fails_ends_the_run_before_the_source_does(
    tmp_path: Path,
) -> None:
    fn = Lengths()
    with pytest.raises(RunStopped, match=r"any of the last rows.*ZeroDivisionError"):
        run(fn, rows_of(5000), tmp_path / "out.parquet", postprocess=lambda size: size / 0)
    assert len(fn.given) < 4000


def test_rows_that_the_source_gives_twice_or_that_no_result_can_hold_cost_themselves(
    tmp_path: Path,
) -> None:
    rows: list[dict[str, Any]] = [{**row, "more": 1} for row in rows_of(20)]
    rows[3]["more"] = object()
    rows[9]["id"] = 8
    report = run(Lengths(), rows, tmp_path / "out.parquet")
    assert (report.ok, report.failed, report.unreadable) == (18, 2, 2)
    phases = [(letter["key"], letter["phase"]) for letter in report.dead_letters()]
    assert phases == [(3, "source"), (8, "source")]


def test_a_run_without_any_result_is_stopped_and_replaces_none(tmp_path: Path) -> None:
    def large(texts: list[str]) -> list[int]:
        return [2**70 for _ in texts]

    dest, anew = tmp_path / "out.parquet", {"version": 2, "on_mismatch": "recompute"}
    run(Lengths(), rows_of(5), dest)
    before = dest.read_bytes()
    for _ in range(2):
        with pytest.raises(RunStopped, match=r"none of the 5 rows has a result: .*column 'length'"):
            run(large, rows_of(5), dest, **anew)
    assert dest.read_bytes() == before
    lines = tmp_path / "out.jsonl"  # where it has a form
    progress = tmp_path / "out.parquet.progress"
    assert run(large, rows_of(5), lines, progress=progress, **anew).skipped == 5
    assert lines.exists()


def test_rows_that_a_result_cannot_hold_stay_dead_letters_until_it_is_written_again(
    tmp_path: Path,
) -> None:
    def odd(texts: list[str]) -> list[Any]:
        return ["odd" if text == "text 3" else len(text) for text in texts]

    dest = tmp_path / "out.parquet"
    report = run(odd, rows_of(9), dest)
    offline.export(dest, tmp_path / "export.jsonl")
    assert [letter["key"] for letter in report.dead_letters()] == [3]
    lines = run(odd, rows_of(9), tmp_path / "out.jsonl", progress=report.progress)
    assert not [*lines.dead_letters()]


def test_the_status_of_a_stopped_run_has_the_whole_source(tmp_path: Path) -> None:
    with pytest.raises(RunStopped):
        run(Lengths(["text 3"]), rows_of(9000), tmp_path / "out.jsonl", max_failed=0)
    known = read_status(tmp_path / "out.jsonl.progress")
    assert known is not None
    assert (known["total"], known["total_is_estimate"]) == (9000, False)
    assert known["read"] < 9000


def test_a_row_without_an_input_column_is_known_by_its_key(tmp_path: Path) -> None:
    rows = [{"id": 7, "text": "a"}, {"id": 8}, {"id": 9, "text": "c"}]
    report = run(Lengths(), rows, tmp_path / "out.jsonl")
    (letter,) = report.dead_letters()
    assert (letter["key"], letter["phase"]) == (8, "source")


def test_one_progress_file_serves_several_destinations_in_turn(tmp_path: Path) -> None:
    def run_to(name: str, count: int) -> None:
        dest = tmp_path / name
        run(Lengths(), rows_of(count), dest, progress=tmp_path / "progress")
        assert read(dest) == expected(rows_of(count))

    for count, name in ((3, "a.jsonl"), (4, "b.jsonl"), (4, "a.jsonl"), (5, "b.jsonl")):
        run_to(name, count)
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(ResultError, match="left it as it is"):
        run_to("a.jsonl", 4)


@pytest.mark.parametrize("kind", ["list", "iterator", "file"])
def test_a_trial_reads_the_first_rows_and_the_whole_run_computes_only_the_rest(
    kind: str, tmp_path: Path
) -> None:
    rows, dest = rows_of(9), tmp_path / "out.jsonl"
    file = write_lines(tmp_path / "in.jsonl", rows)

    def run_some(**settings: Any) -> tuple[int, int]:
        source: Any = {"list": rows, "iterator": iter(rows), "file": file}[kind]
        report = run(Lengths(), source, dest, **settings)
        return report.ok, report.skipped

    assert run_some(limit=4) == (4, 0)
    assert read(dest) == expected(rows[:4])
    assert run_some(limit=4) == (0, 4)
    assert run_some() == (5, 4)
    assert read(dest) == expected(rows)


def test_a_column_of_the_second_row_is_not_replaced_either(tmp_path: Path) -> None:
    rows = [*rows_of(1), {"id": 1, "text": "", "label": "of a person"}]
    with pytest.raises(SourceError, match="has a column 'label' already"):
        run(Lengths(), rows, tmp_path / "out.jsonl", output="label")


@pytest.mark.parametrize("kind", ["list", "file", "table"])
def test_an_output_replaces_a_column_of_the_source_only_if_told_so(
    kind: str, tmp_path: Path
) -> None:
    rows, dest = rows_of(9), tmp_path / "out.jsonl"
    file = write_lines(tmp_path / "in.jsonl", rows)
    source: Any = {"list": rows, "file": file, "table": pa.Table.from_pylist(rows)}[kind]
    with pytest.raises(SourceError, match="has a column 'text' already; .* replace=True"):
        run(Lengths(), source, dest, output="text")
    assert not dest.exists()
    assert run(Lengths(), source, dest, output="text", replace=True).ok == 9
    assert read(dest)[3] == {"id": 3, "text": 6}


def test_a_predicate_of_two_parameters_gets_the_row_too(tmp_path: Path) -> None:
    rows, dest = [{"id": n, "text": "x" * n} for n in range(9)], tmp_path / "out.jsonl"

    def differs(length: int, row: dict[str, Any]) -> bool:
        return length > 3 and row["text"] != "x" * 5

    report = run(Lengths(), rows, dest, where=lambda length, least=3: length > least)
    assert (report.ok, report.filtered) == (5, 4)
    report = run(Lengths(), rows, dest, where=differs, version=2, on_mismatch="recompute")
    assert (report.ok, report.filtered) == (4, 5)
    assert [row["id"] for row in read(dest)] == [4, 6, 7, 8]


def test_a_document_becomes_its_chunks_in_two_runs(tmp_path: Path) -> None:
    def split(texts: list[str]) -> list[list[str]]:
        return [[text[at : at + 4] for at in range(0, len(text), 4)] for text in texts]

    chunks, dest = tmp_path / "chunks.parquet", tmp_path / "out.jsonl"
    run(split, rows_of(2), chunks, output="chunks")
    source = offline.explode(chunks, "chunks", key="id")
    assert run(Lengths(), source, dest, input="chunks", key="key", keep=["id", "key"]).ok == 4
    assert read(dest)[2:] == [
        {"id": 1, "key": "[1, 0]", "length": 4},
        {"id": 1, "key": "[1, 1]", "length": 2},
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"worker": 2}, "run has no setting 'worker'; did you mean 'workers'"),
        ({"limit": 0}, "limit must be"),
        ({"max_failed": -1}, "max_failed, .* must be a number of at least 0, got -1"),
        ({"batch_size": "auto"}, r"batch_size is a number, or offline.Auto\(\) .* got 'auto'"),
        ({"version": [1]}, r"step 'lengths': version must be a text or a number, got \[1\]"),
    ],
)
def test_a_setting_of_another_form_is_refused(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        run(Lengths(), rows_of(5), tmp_path / "out.jsonl", **settings)
