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
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batched
from batched import offline
from batched.errors import ResultError, RunMismatch, RunStopped, SourceError
from batched.offline.watch.watcher import read_status


class Lengths:
    """A batch function that remembers its batches."""

    def __init__(self, bad: Sequence[Any] = (), error: type[Exception] = ValueError) -> None:
        self.bad, self.error = set(bad), error
        self.batches: list[list[Any]] = []

    def __call__(self, texts: list[Any]) -> list[int]:
        self.batches.append(list(texts))
        if self.bad.intersection(texts):
            raise self.error("bad row")
        return [len(str(text)) for text in texts]

    @property
    def given(self) -> list[Any]:
        return [text for batch in self.batches for text in batch]


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


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


def failed_keys(report: offline.Report) -> list[Any]:
    return [letter["key"] for letter in report.dead_letters()]


def test_the_result_has_every_row_in_the_order_of_the_source_and_none_is_computed_again(
    dest: Path,
) -> None:
    class Model(Lengths):
        def __init__(self) -> None:
            raise AssertionError("nothing is to be computed")

    rows = rows_of(1000)
    report = run(Lengths(), rows, dest, batch_size=16)
    assert read(dest) == expected(rows)
    assert (report.ok, report.failed, report.skipped, report.recomputed) == (1000, 0, 0, 0)
    assert report.output == str(dest)
    before = dest.read_bytes()
    assert run(Model, rows, dest, batch_size=64, workers=4).skipped == 1000
    assert dest.read_bytes() == before


def test_without_a_key_rows_are_known_by_number_and_content_also_from_a_generator(
    dest: Path,
) -> None:
    rows = rows_of(50)
    run(Lengths(), iter(rows), dest, key=None)
    rows[20]["text"] = "edited"
    rows.append({"id": 50, "text": "more"})
    fn = Lengths()
    run(fn, iter(rows), dest, key=None)
    assert sorted(fn.given) == ["edited", "more"]
    assert read(dest) == expected(rows)


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


def test_a_row_alone_is_called_once_where_no_retry_is_wanted(dest: Path) -> None:
    fn = Lengths(["text 3"], ConnectionError)
    report = run(fn, rows_of(5), dest, batch_size=1, retry=offline.Retry(attempts=1))
    assert failed_keys(report) == [3]
    assert fn.given.count("text 3") == 1


def test_too_many_failed_rows_end_the_run_and_its_status_has_the_whole_source(
    tmp_path: Path,
) -> None:
    rows = rows_of(9000)
    bad = [row["text"] for row in rows[:8]]
    for most in (5, 0.0005):
        dest = tmp_path / f"{most}.parquet"
        with pytest.raises(RunStopped, match=f"max_failed is {most}"):
            run(Lengths(bad), rows, dest, max_failed=most)
        assert not dest.exists()
        known = read_status(Path(f"{dest}.progress"))
        assert known is not None
        assert (known["total"], known["total_is_estimate"]) == (9000, False)
        assert known["read"] < 9000
        assert run(Lengths(bad), rows, dest, max_failed=0.001).failed == 8


def chain(
    dest: Path,
    first: Callable[..., Any],
    second: Callable[..., Any],
    versions: tuple[int, int] = (1, 1),
    **settings: Any,
) -> offline.Report:
    one, two = versions
    pipeline = offline.Pipeline(
        offline.Step(first, input="text", output="upper", name="first", version=one),
        offline.Step(
            second, input=["upper", "id"], output=["both", "size"], name="second", version=two
        ),
    )
    return pipeline.run(rows_of(300), dest, **{"key": "id", "watch": False, **settings})


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


def test_a_run_that_begins_anew_goes_on_after_an_interruption(dest: Path) -> None:
    chain(dest, Upper(), Both())
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
        chain(dest, Upper(), Held(), resume_step=1, batch_size=30, watch=interrupted)
    report = chain(dest, Upper(), second := Both(), resume_step=1)
    assert report.skipped > 0
    assert len(second.given) == 300 - report.skipped
    chain(dest, Upper(), second := Both(), resume_step=1)
    assert len(second.given) == 300, "the result was published, so the same call begins anew"


def test_a_run_goes_on_anew_from_a_step_which_may_have_other_code(dest: Path) -> None:
    first, second = Upper(), Both()
    chain(dest, first, second)
    with pytest.raises(RunMismatch, match="step 'first': its version was '1' and is '2'"):
        chain(dest, first, second, (2, 2), resume_step="second")
    chain(dest, first, second, (1, 2), resume_step="second")
    assert (len(first.given), len(second.given)) == (300, 600)
    chain(dest, first, second, (2, 3), resume_from_last=False)
    assert (len(first.given), len(second.given)) == (600, 900)
    with pytest.raises(TypeError, match="give one"):
        chain(dest, first, second, resume_from_last=True, resume_step=1)
    with pytest.raises(ValueError, match="'first', 'second'"):
        chain(dest, first, second, resume_step="third")


def test_a_step_that_changes_its_input_changes_no_result_of_an_earlier_run(dest: Path) -> None:
    def make(texts: list[str]) -> list[Any]:
        return [np.array([3.0, 4.0]) for _ in texts]

    def lengths(vectors: list[Any]) -> list[float]:
        for vector in vectors:
            vector /= np.linalg.norm(vector)
        return [1.0] * len(vectors)

    for version, made in ((1, 10), (2, 0)):
        vectors = offline.Step(make, input="text", output="vector")
        step = offline.Step(lengths, input="vector", output="length", version=version)
        report = offline.Pipeline(vectors, step).run(
            rows_of(10), dest, key="id", watch=False, on_mismatch="recompute"
        )
        assert report.steps[0].ok == made
    assert read(dest)[0]["vector"] == [3.0, 4.0]


def test_results_of_other_code_are_not_mixed(dest: Path) -> None:
    rows, fn = rows_of(100), Lengths()
    run(Lengths(), rows, dest)
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


def test_after_a_function_is_fixed_its_good_results_may_stay(dest: Path) -> None:
    rows, mended = rows_of(100), Lengths()
    run(Lengths(["text 5"]), rows, dest)
    report = run(mended, rows, dest, version=2, on_mismatch="keep")
    assert mended.given == ["text 5"]
    assert (report.ok, report.skipped) == (1, 99)
    assert run(mended, rows, dest, version=2).skipped == 100
    # what was kept is still of the old code, until it is computed again
    assert run(mended, rows, dest, version=2, on_mismatch="recompute").ok == 100
    assert run(mended, rows, dest, version=2, on_mismatch="recompute").skipped == 100
    with pytest.raises(RunMismatch, match="its output was"):
        run(mended, rows, dest, version=2, output="size", on_mismatch="keep")


def test_after_all_rows_have_failed_the_function_may_be_fixed(dest: Path) -> None:
    rows = rows_of(5)
    with pytest.raises(RunStopped, match="none of the 5 rows has a result"):
        run(Lengths([row["text"] for row in rows]), rows, dest)
    report = run(Lengths(), rows, dest, version=2)
    assert (report.ok, failed_keys(report)) == (5, [])


def test_a_wrong_source_or_column_costs_no_result(tmp_path: Path, dest: Path) -> None:
    rows = rows_of(20)
    table = pa.Table.from_pylist(rows)
    with pytest.raises(SourceError, match="did you mean 'text'"):
        run(Lengths(), table, dest, input="texte")
    assert run(Lengths(), rows, dest).ok == 20
    for wrong in ({"source": tmp_path / "none.csv"}, {"source": table, "input": "texte"}):
        for anew in ({"version": 2}, {"resume_from_last": False}):
            settings: dict[str, Any] = {**wrong, **anew}
            with pytest.raises(SourceError):
                run(Lengths(), dest=dest, on_mismatch="recompute", **settings)
    assert run(Lengths(), rows, dest).skipped == 20


def test_items_are_made_and_results_taken_row_by_row_and_an_exit_there_costs_one_row(
    dest: Path,
) -> None:
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


def test_rows_go_to_the_model_of_their_key(dest: Path) -> None:
    built: list[int] = []

    class Models:
        def __init__(self) -> None:
            built.append(1)

        def __call__(self, texts: list[str], key: str) -> list[str]:
            assert {text[-1] for text in texts} == {key}
            return [f"{key}: {text}" for text in texts]

    run(Models, rows_of(100), dest, route=lambda text: text[-1], batch_size=8)
    assert built == [1]
    assert [row["length"] for row in read(dest)] == [f"{n % 10}: text {n}" for n in range(100)]


def test_few_values_in_many_rows_are_computed_once_for_each_batch(dest: Path) -> None:
    fn = Lengths()
    rows = [{"id": n, "text": "x" * (n % 5)} for n in range(5000)]
    run(batched.dynamically(batch_size=32, dedupe=True)(fn.__call__), rows, dest)
    assert read(dest) == expected(rows)
    assert len(fn.given) < 100


def test_equal_rows_do_not_share_what_postprocess_changes(dest: Path) -> None:
    @batched.dynamically(dedupe=True)
    def lengths(texts: list[str]) -> list[dict[str, int]]:
        return [{"length": len(text)} for text in texts]

    rows = [{"id": n, "text": "text"} for n in range(5)]
    run(lengths, rows, dest, postprocess=lambda result: result.pop("length"))
    assert read(dest) == expected(rows)


@batched.inference.dynamically(batch_size=16)
def doubled(features: dict[str, np.ndarray]) -> np.ndarray:
    result: np.ndarray = features["ids"] * 2
    return result


def test_features_are_padded_and_results_cut_as_online(dest: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "ids": list(range(1, 2 + n % 7))} for n in range(100)]
    run(doubled, rows, dest, input="ids", output="twice")
    assert [row["twice"] for row in read(dest)] == [[2 * n for n in r["ids"]] for r in rows]


def test_features_of_several_rows_are_a_dead_letter(dest: Path) -> None:
    def preprocess(number: int) -> dict[str, np.ndarray]:
        return {"ids": np.full((1 + (number == 2), 3), number)}

    report = run(doubled, rows_of(4), dest, input="id", output="twice", preprocess=preprocess)
    (letter,) = report.dead_letters()
    assert (letter["key"], letter["phase"]) == (2, "preprocess")
    assert "the features of a row of the source must have one row, got 2" in letter["error"]
    assert [row["id"] for row in read(dest)] == [0, 1, 3]


def test_like_lengths_run_together(dest: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "text": "x" * (1 + 37 * n % 64)} for n in range(640)]
    fn = Lengths()
    run(fn, rows, dest, length=len, batch_size=64)
    longest = sum(len(batch) * max(map(len, batch)) for batch in fn.batches)
    assert longest < 1.2 * sum(len(row["text"]) for row in rows)


@pytest.mark.parametrize("batch_size", [7, 512])
def test_each_row_gets_its_own_result_also_if_items_are_sorted_by_length(
    batch_size: int, dest: Path
) -> None:
    def first(texts: list[str]) -> list[Any]:
        numbers = [int(text.partition(" ")[0]) for text in texts]
        if 3 in numbers:
            raise ValueError("bad row")
        return [ValueError("no result") if number == 50 else number for number in numbers]

    def length(text: str) -> int:
        return -1 if text.startswith("60 ") else len(text)

    rows = [{"id": n, "text": f"{n} " + "x" * (37 * n % 64)} for n in range(100)]
    report = run(first, rows, dest, length=length, batch_size=batch_size)
    good = [(n, n) for n in range(100) if n not in (3, 50, 60)]
    assert [(row["id"], row["length"]) for row in read(dest)] == good
    assert sorted(failed_keys(report)) == [3, 50, 60]


def test_a_window_of_nothing_but_broken_lines_costs_these_lines(tmp_path: Path) -> None:
    source, dest = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id"\n')
    with pytest.raises(RunStopped, match="none of the 1 rows has a result: 1 x source"):
        run(Lengths(), source, dest)
    source.write_text(write_lines(source, rows_of(2048)).read_text() + "{\n")
    report = run(Lengths(), source, dest)
    assert (report.ok, report.failed) == (2048, 1)


def test_committed_results_leave_memory_while_the_run_goes_on(dest: Path) -> None:
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

    run(copies, rows_of(1024), dest, batch_size=64)
    assert len(made) == 1024


def test_the_library_finds_a_batch_size(dest: Path) -> None:
    rows, fn = rows_of(3000), Lengths()
    run(fn, rows, dest, batch_size=offline.Auto(4, 64))
    sizes = {len(batch) for batch in fn.batches}
    assert 4 in sizes
    assert 4 < max(sizes) <= 64
    assert read(dest) == expected(rows)


def test_an_empty_source_makes_an_empty_result(tmp_path: Path) -> None:
    dest = tmp_path / "out.jsonl"
    assert run(Lengths(), [], dest).ok == 0
    assert dest.read_text() == ""


def test_a_result_that_is_whole_is_not_written_again(tmp_path: Path, dest: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", rows_of(100))
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
    tmp_path: Path, dest: Path
) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,text,name\n0,text 0,größe\n", encoding="cp1252")
    for encoding, name in (("cp437", "gr÷▀e"), ("cp1252", "größe")):
        run(Lengths(), offline.csv(source, encoding=encoding), dest)
        assert read(dest) == [{"id": "0", "text": "text 0", "name": name, "length": 6}]
    run(Lengths(), offline.csv(source, encoding="cp1252"), dest, output={"length": pa.int16()})
    assert pq.read_schema(dest).field("length").type == pa.int16()


def test_a_result_is_written_anew_if_the_run_before_died_with_all_rows_committed(
    tmp_path: Path, dest: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", rows_of(50))

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
    dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
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
    assert ("sync", dest.parent.stat().st_ino) in events[moved:]


def test_a_step_may_be_added_and_is_taken_away_only_on_request(dest: Path) -> None:
    first = offline.Step(Upper(), input="text", output="upper", name="first", version=1)
    second = offline.Step(Upper(), input="upper", output="twice", name="second", version=1)

    def run_of(*steps: offline.Step, **settings: Any) -> offline.Report:
        return offline.Pipeline(*steps).run(rows_of(20), dest, key="id", watch=False, **settings)

    run_of(first)
    report = run_of(first, second)
    assert [step.ok for step in report.steps] == [0, 20]
    with pytest.raises(RunMismatch, match="'second'"):
        run_of(first)
    assert run_of(first, on_mismatch="recompute").skipped == 20
    assert set(read(dest)[0]) == {"id", "text", "upper"}


def test_arguments_in_another_order_or_of_another_form_are_refused(dest: Any) -> None:
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
def test_an_end_of_a_run_has_the_error_of_the_function_or_class_with_its_lines(
    dest: Path, processes: bool
) -> None:
    class Broken:
        def __init__(self) -> None:
            raise queue.Empty("path")  # which the run's own queue raises, too

        def __call__(self, texts: list[str]) -> list[str]:
            return texts

    def broken(texts: list[str]) -> list[str]:
        return [text["x"] for text in texts]  # type: ignore[index]  # which is the bug

    with pytest.raises(queue.Empty) as ended:
        run(Broken, rows_of(5), dest, processes=processes)
    *lines, step = ended.value.__notes__
    assert step == "in step 'lengths'"
    assert ["in __init__" in text for text in lines] == [True] * processes  # a traceback
    known = read_status(Path(f"{dest}.progress"))
    assert known is not None
    assert (known["state"], known["stopped"]) == ("failed", "Empty: path")
    with pytest.raises(RunStopped) as stopped:
        run(broken, rows_of(5), dest, processes=processes)
    cause = stopped.value.__cause__
    assert isinstance(cause, TypeError)
    assert not processes or "in broken" in "".join(cause.__notes__)


def test_an_error_of_the_source_ends_the_run_and_costs_no_result(
    tmp_path: Path, dest: Path
) -> None:
    source = tmp_path / "in.csv"
    lines = ["id,text", *[f"{number},text {number}" for number in range(5000)]]
    source.write_text("\n".join([*lines[:4501], '4500,"text" 4500']))
    with pytest.raises(SourceError, match="line 4502: not CSV"):
        run(Lengths(), source, dest)
    source.write_text("\n".join(lines))
    report = run(Lengths(), source, dest)
    assert report.skipped > 0
    assert report.ok + report.skipped == 5000


def test_code_for_single_rows_that_always_fails_ends_the_run_before_the_source_does(
    dest: Path,
) -> None:
    fn = Lengths()
    with pytest.raises(RunStopped, match=r"any of the last rows.*ZeroDivisionError"):
        run(fn, rows_of(5000), dest, postprocess=lambda size: size / 0)
    assert len(fn.given) < 4000


def test_rows_that_cannot_be_read_or_held_or_are_there_twice_cost_themselves(dest: Path) -> None:
    rows: list[dict[str, Any]] = [{**row, "more": 1} for row in rows_of(20)]
    rows[3]["more"] = object()
    rows[9]["id"] = 8
    del rows[12]["text"]
    report = run(Lengths(), rows, dest)
    assert (report.ok, report.failed, report.unreadable) == (17, 3, 3)
    phases = [(letter["key"], letter["phase"]) for letter in report.dead_letters()]
    assert phases == [(key, "source") for key in (3, 8, 12)]


def test_a_run_without_any_result_is_stopped_and_replaces_none(tmp_path: Path, dest: Path) -> None:
    def large(texts: list[str]) -> list[int]:
        return [2**70 for _ in texts]

    anew = {"version": 2, "on_mismatch": "recompute"}
    run(Lengths(), rows_of(5), dest)
    before = dest.read_bytes()
    for _ in range(2):
        with pytest.raises(RunStopped, match=r"none of the 5 rows has a result: .*column 'length'"):
            run(large, rows_of(5), dest, **anew)
    assert dest.read_bytes() == before
    lines = tmp_path / "out.jsonl"  # where it has a form
    assert run(large, rows_of(5), lines, progress=f"{dest}.progress", **anew).skipped == 5
    assert lines.exists()


def test_rows_that_a_result_cannot_hold_stay_dead_letters_until_it_is_written_again(
    tmp_path: Path, dest: Path
) -> None:
    def odd(texts: list[str]) -> list[Any]:
        return ["odd" if text == "text 3" else len(text) for text in texts]

    report = run(odd, rows_of(9), dest)
    offline.export(dest, tmp_path / "export.jsonl")
    assert failed_keys(report) == [3]
    lines = run(odd, rows_of(9), tmp_path / "out.jsonl", progress=report.progress)
    assert not failed_keys(lines)


def test_one_progress_file_serves_several_destinations_in_turn(tmp_path: Path) -> None:
    def run_to(name: str, count: int) -> None:
        run(Lengths(), rows_of(count), tmp_path / name, progress=tmp_path / "progress")
        assert read(tmp_path / name) == expected(rows_of(count))

    for count, name in ((3, "a.jsonl"), (4, "b.jsonl"), (4, "a.jsonl"), (5, "b.jsonl")):
        run_to(name, count)
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(ResultError, match="left it as it is"):
        run_to("a.jsonl", 4)


def test_a_trial_reads_the_first_rows_and_the_whole_run_computes_only_the_rest(
    tmp_path: Path, dest: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", rows_of(9))
    for limit, outcome in ((4, (4, 0)), (4, (0, 4)), (None, (5, 4))):
        report = run(Lengths(), source, dest, limit=limit)
        assert (report.ok, report.skipped) == outcome
        assert read(dest) == expected(rows_of(9)[:limit])


def test_a_column_of_the_second_row_is_not_replaced_either(dest: Path) -> None:
    rows = [*rows_of(1), {"id": 1, "text": "", "label": "of a person"}]
    with pytest.raises(SourceError, match="has a column 'label' already"):
        run(Lengths(), rows, dest, output="label")


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist])
def test_an_output_replaces_a_column_of_the_source_only_if_told_so(
    form: Callable[[Any], Any], dest: Path
) -> None:
    source = form(rows_of(9))
    with pytest.raises(SourceError, match="has a column 'text' already; .* replace=True"):
        run(Lengths(), source, dest, output="text")
    assert not dest.exists()
    assert run(Lengths(), source, dest, output="text", replace=True).ok == 9
    assert read(dest)[3] == {"id": 3, "text": 6}


def test_a_predicate_of_two_parameters_gets_the_row_too(dest: Path) -> None:
    rows = [{"id": n, "text": "x" * n} for n in range(9)]

    def differs(length: int, row: dict[str, Any]) -> bool:
        return length > 3 and row["text"] != "x" * 5

    report = run(Lengths(), rows, dest, where=lambda length, least=3: length > least)
    assert (report.ok, report.filtered) == (5, 4)
    report = run(Lengths(), rows, dest, where=differs, version=2, on_mismatch="recompute")
    assert (report.ok, report.filtered) == (4, 5)
    assert [row["id"] for row in read(dest)] == [4, 6, 7, 8]


def test_a_predicate_that_returns_an_array_costs_its_rows(dest: Path) -> None:
    rows = [{"id": n, "text": "x" * n} for n in range(9)]

    def odd(length: int) -> Any:
        return np.arange(length) if length == 4 else True

    report = run(Lengths(), rows, dest, where=odd)
    assert (report.ok, report.failed) == (8, 1)
    assert "truth value of an array" in next(iter(report.examples.values()))["error"]


def test_a_function_may_change_its_dicts_though_a_bad_row_is_searched(dest: Path) -> None:
    def shout(rows: list[dict[str, Any]]) -> list[str]:
        for row in rows:
            row["a"] += "!"
        return [row["a"] + row["b"] for row in rows]

    rows = [{"id": n, "a": "a", "b": None if n == 5 else "b"} for n in range(16)]
    report = run(shout, rows, dest, input=["a", "b"], output="text")
    assert (report.ok, report.failed) == (15, 1)
    assert {row["text"] for row in read(dest)} == {"a!b"}


def test_a_setting_of_another_form_is_refused(dest: Path) -> None:
    async def read_later(_: Any) -> bool:
        return True

    settings: dict[str, Any]
    for settings, sentence in (
        ({"worker": 2}, "run has no setting 'worker'; did you mean 'workers'"),
        ({"limit": 0}, "limit must be"),
        ({"processes": 4}, "processes must be True or False"),
        ({"where": read_later}, "where must be a plain function"),
        ({"key": ["id"]}, "key must be the name of one column"),
        ({"progress": True}, "progress must be the path"),
        ({"output": None}, r"output must be a column's name or several, got \(None,\)"),
        ({"version": [1]}, r"step 'lengths': version must be a text or a number, got \[1\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            run(Lengths(), rows_of(5), dest, **settings)
