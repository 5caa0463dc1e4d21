"""Commands run, status and export, with functions of a user."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from batched import cli
from pages import ROOT
from stage import wait_until

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.once

FUNCTIONS = """
import os, signal, sys, time
from pathlib import Path
from batched import offline

def note(texts):
    with open("computed", "a") as computed:
        computed.writelines(f"{text}\\n" for text in texts)

def length(texts):
    note(texts)
    if "bad" in texts:
        raise ValueError("no \\ud800 [b]é{x}")
    return [len(text) for text in texts]

class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, texts):
        return [self.by * len(text) for text in texts]

def both(rows):
    return [{"sum": row["id"] + row["text"], "length": len(row["text"])} for row in rows]

def waiting(texts):
    # at one row, until an interrupted run sets the default handler of Ctrl-C again
    if "bad" in texts:
        raise ValueError("no")
    note(texts)
    if "text 40" in texts:
        Path("reached").touch()
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            time.sleep(0.01)
    return [len(text) for text in texts]

pipeline = offline.Pipeline(
    offline.Step(length, input="text", output="length"),
    offline.Step(lambda lengths: [2 * each for each in lengths], input="length", output="twice",
                 name="double"),
)
"""
LENGTHS = [len(f"text {number}") for number in range(100)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a current folder with a CSV of 100 rows and a module of functions."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    write_rows(tmp_path, [f"text {number}" for number in range(100)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    sys.modules.pop("functions", None)


def write_rows(folder: Path, texts: list[str]) -> None:
    with open(folder / "in.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])


def arguments(target: str = "length", *more: str) -> list[str]:
    given = [f"functions:{target}", "in.csv", "out.parquet", "--key", "id"]
    columns = [] if target == "pipeline" else ["--input", "text", "--output", "length"]
    size = [] if target == "pipeline" else ["--batch-size", "8"]
    return ["run", *given, *columns, *size, *more]


def computed(folder: Path) -> list[str]:
    """Return texts that functions were called with since the last call."""
    path = folder / "computed"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def result(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "out.parquet").to_pylist()
    return rows


def lengths(folder: Path) -> list[int]:
    return [row["length"] for row in result(folder)]


def output(capfd: Capture, *command: str) -> str:
    capfd.readouterr()
    assert cli.main(command) == 0
    return capfd.readouterr().out


def refusal(capfd: Capture, *command: str) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as refused:
        cli.main(command)
    assert refused.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    return err


@contextmanager
def started(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "batched", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_one_command_writes_the_result_and_the_same_command_computes_nothing_again(
    folder: Path, capfd: Capture
) -> None:
    assert cli.main(arguments()) == 0
    assert result(folder) == [
        {"id": str(number), "text": f"text {number}", "length": length}
        for number, length in enumerate(LENGTHS)
    ]
    out, err = capfd.readouterr()
    assert re.match(r"100 ok in [\d.]+ s \([\d,.]+ rows/s\)\n.*out\.parquet\n$", out)
    assert re.fullmatch(r".*out\.parquet done: length 100/.*100 rows.*\n", err)
    assert len(computed(folder)) == 100
    assert cli.main([*arguments(), "--workers", "2"]) == 0
    assert computed(folder) == []
    assert re.match(r"0 ok, 100 done before in [\d.]+ s\n", capfd.readouterr().out)


def test_a_class_gets_its_arguments(folder: Path) -> None:
    assert cli.main(arguments("Scaled", "--args", "[1]", "--batch-size", "auto")) == 0
    assert lengths(folder) == LENGTHS


def test_several_columns_are_read_and_written_and_some_are_kept(folder: Path) -> None:
    options = ["--input", "id,text", "--output", "sum,length", "--keep", "id"]
    assert cli.main(["run", "functions:both", "in.csv", "out.parquet", *options]) == 0
    assert result(folder)[7] == {"id": "7", "sum": "7text 7", "length": 6}


def test_a_pipeline_runs_and_resumes_from_a_step(folder: Path) -> None:
    command = arguments("pipeline")
    assert cli.main(command) == 0
    assert result(folder)[7] == {"id": "7", "text": "text 7", "length": 6, "twice": 12}
    assert len(computed(folder)) == 100
    for step in ("double", "1"):
        assert cli.main([*command, "--resume-step", step]) == 0
        assert computed(folder) == []
    assert cli.main([*command, "--resume-step", "length"]) == 0
    assert len(computed(folder)) == 100


def test_failed_rows_are_kept_in_the_result_and_progress_in_another_folder_if_asked(
    folder: Path, capfd: Capture
) -> None:
    (folder / "elsewhere").mkdir()
    write_rows(folder, ["one", "bad", "three"])
    progress = ["--progress", "elsewhere/run.db"]
    assert cli.main(arguments("length", "--keep-failed", "--quiet", *progress)) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("1 row failed")  # the only output of a quiet run
    assert err.endswith("batched status out.parquet --failed --progress elsewhere/run.db\n")
    assert [(row["length"], row["_error"]) for row in result(folder)] == [
        (3, None),
        (None, "ValueError: no \\ud800 [b]é{x}"),
        (5, None),
    ]
    assert {path.name for path in folder.glob("out*")} == {"out.parquet"}
    assert "1 x ValueError" in output(capfd, "status", "out.parquet", *progress)


def test_committed_rows_are_exported_after_a_run_was_stopped(folder: Path, capfd: Capture) -> None:
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments("length", "--max-failed", "0", "--batch-size", "1")) == 1
    command = ["export", "out.parquet", "some.csv"]
    assert output(capfd, *command) == f"{folder}/some.csv\n"
    assert (folder / "some.csv").read_text().startswith("id,length\n0,3\n")
    assert "some.csv is there already" in refusal(capfd, *command)
    assert cli.main([*command, "--overwrite"]) == 0


@pytest.mark.skipif(os.name == "nt", reason="needs pipes as POSIX has them")
def test_a_status_with_a_closed_output_ends_quietly(folder: Path) -> None:
    write_rows(folder, ["bad", "good"] * 400)
    assert cli.main(arguments("length", "--quiet")) == 0
    with started(folder, "status", "out.parquet", "--failed") as process:
        assert process.stdout
        assert process.stdout.readline().startswith("{")
        process.stdout.close()
        assert process.wait(timeout=40) == 128 + 13
        assert process.stderr
        assert process.stderr.read() == ""


def test_a_bad_row_is_shown_and_once_edited_computed_alone(folder: Path, capfd: Capture) -> None:
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments()) == 0
    out, err = capfd.readouterr()
    assert "2 ok, 1 failed" in out
    assert "1 x ValueError" in out
    assert re.search(
        r"first failure, in inference: Value.*done: length 3/3 rows  1 failed\n", err, re.DOTALL
    )
    assert re.search(r"\n1 row failed .*\n  batched status out\.parquet --failed\n$", err)
    lines = output(capfd, "status", "out.parquet").splitlines()
    assert "/out.parquet: done after 0:00:0" in lines[0]
    assert lines[1] == "3 of 3 rows read, 0 of them done before"
    assert lines[3].split()[:4] == ["step", "ok", "failed", "filtered"]
    assert lines[5].split()[:4] == ["length", "2", "1", "0"]
    error = "ValueError: no \\ud800 [b]é{x}"
    assert lines[7] == f"1 x ValueError, for example row '1' in step length, inference: {error}"
    assert lines[8].endswith("batched status out.parquet --failed")
    (line,) = output(capfd, "status", "out.parquet", "--failed").splitlines()
    letter = json.loads(line)
    assert "in length" in letter.pop("traceback")
    assert letter.pop("attempts") >= 1
    assert letter == {"key": "1", "step": "length", "phase": "inference", "error": error}
    assert [row["text"] for row in result(folder)] == ["one", "three"]
    computed(folder)
    write_rows(folder, ["one", "edited", "three"])
    assert "1 ok, 2 done before, 1 edited since the last run" in output(capfd, *arguments())
    assert computed(folder) == ["edited"]
    assert "done before, 1 edited since the last run" in output(capfd, "status", "out.parquet")
    assert lengths(folder) == [3, 6, 5]
    assert output(capfd, "status", "out.parquet", "--failed") == ""


@pytest.mark.parametrize(
    ("resume", "same"),
    [([], "command"), (["--resume-step=length"], "command, without --resume-step,")],
)
def test_a_run_with_too_many_failed_rows_says_how_to_go_on(
    resume: list[str], same: str, folder: Path, capfd: Capture
) -> None:
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments("length", "--max-failed", "0", *resume)) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "max_failed is 0" in err
    assert err.endswith(f"2 rows committed; the same {same} goes on where it was\n")
    assert "/out.parquet: stopped after" in output(capfd, "status", "out.parquet")
    assert not (folder / "out.parquet").exists()


REFUSED = [
    (["functions:none"], "cannot import functions:none: AttributeError: .* no attribute 'none'"),
    (["functions:pipeline"], "functions:pipeline is a Pipeline, which has its own input, output"),
    (["functions:length", "no-such-file.csv"], ".*no-such-file.csv.*"),
    (["functions:length", "in.csv", "foreign.csv"], ".*foreign.csv.*"),
    (["--key", "none"], ".*'none'.*"),
    (["functions.py"], "name the function as module:function, got 'functions.py'"),
    (["--resume-step", "none"], "ValueError: resume_step must be one of .*, got 'none'"),
    (["--args", "2"], "argument --args: must be a JSON list, got '2'"),
    (["--batch-size", "many"], "TypeError: .*batch_size is a number, .*, got 'many'"),
]


def test_a_command_that_cannot_run_is_refused_in_one_sentence(folder: Path, capfd: Capture) -> None:
    write_rows(folder, ["same", "same"])
    (folder / "foreign.csv").write_text("mine")
    for given, sentence in REFUSED:
        places = ["functions:length", "in.csv", "out.parquet"]
        options = given if given[0].startswith("--") else []
        if not options:
            places[: len(given)] = given
        err = refusal(capfd, "run", *places, "--input", "text", "--output", "length", *options)
        assert re.fullmatch(rf"batched( run)?: {sentence}\n", err)
    assert (folder / "foreign.csv").read_text() == "mine"


def test_another_version_of_a_function_is_refused_or_recomputes(
    folder: Path, capfd: Capture
) -> None:
    assert cli.main(arguments()) == 0
    (folder / "functions.py").write_text(FUNCTIONS.replace("len(text)", "2 * len(text)"))
    sys.modules.pop("functions")
    assert "--on-mismatch recompute" in refusal(capfd, *arguments())
    assert lengths(folder) == LENGTHS
    assert cli.main([*arguments(), "--on-mismatch", "recompute"]) == 0
    assert lengths(folder) == [2 * length for length in LENGTHS]


def test_commands_without_columns_or_without_a_run_are_refused(
    folder: Path, capfd: Capture
) -> None:
    err = refusal(capfd, "run", "functions:length", "in.csv", "out.parquet")
    assert "--input and --output are required" in err
    assert "there is no run of out.parquet" in refusal(capfd, "status", "out.parquet")
    err = refusal(capfd, "export", "out.parquet", "some.csv")
    assert "out.parquet.progress does not exist" in err
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_commits_its_rows_and_says_how_to_go_on(
    number: int, status: int, folder: Path
) -> None:
    with started(folder, *arguments("waiting")) as process:
        wait_until((folder / "reached").exists)
        process.send_signal(number)
        out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (status, "")
    printed = re.search(
        r"^Interrupted; (\d+) rows committed; the same command goes on", err, re.MULTILINE
    )
    assert printed, err
    assert int(printed[1]) == len(computed(folder)) > 40  # all computed rows


def test_the_status_of_a_run_that_goes_on_and_of_one_that_was_killed(
    folder: Path, capfd: Capture
) -> None:
    write_rows(folder, ["bad", *[f"text {number}" for number in range(1, 100)]])

    def known() -> bool:
        path = folder / "out.parquet.status"
        return path.exists() and json.loads(path.read_text())["steps"][0]["ok"] == 39

    with started(folder, *arguments("waiting")) as process:
        wait_until(known)
        lines = output(capfd, "status", "out.parquet").splitlines()
        assert "/out.parquet: running, 0:00:" in lines[0]
        assert f"; process {process.pid} on " in lines[0]
        assert lines[1] == "100 of 100 rows read, 0 of them done before"
        assert lines[5].split()[:5] == ["waiting", "39", "1", "0", "60"]
        assert lines[7].startswith("1 x ValueError, for example row '0' in step waiting, inference")
        # no other command may read or write the progress meanwhile
        assert "another run" in refusal(capfd, "status", "out.parquet", "--failed")
        assert "another run" in refusal(capfd, *arguments("waiting"))
        process.kill()
        process.wait()
    lines = output(capfd, "status", "out.parquet").splitlines()
    assert "/out.parquet: killed after 0:00:" in lines[0]
    assert lines[0].endswith("the same command goes on where it was")
