"""`python -m batched run` and `python -m batched status`, on functions of a user."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from batched import cli
from batched._commands import parser

FUNCTIONS = """
import os, signal, sys, time
from pathlib import Path
from batched import dynamically, offline

def note(texts):
    with open("computed", "a") as computed:
        computed.writelines(f"{text}\\n" for text in texts)

def length(texts):
    note(texts)
    if "bad" in texts:
        raise ValueError("no length")
    return [len(text) for text in texts]

@dynamically(batch_size=3)
def decorated(texts):
    assert len(texts) <= 3
    return [len(text) for text in texts]

async def coroutine(texts):
    return [len(text) for text in texts]

class Built:
    def __call__(self, texts):
        return [len(text) for text in texts]

class Scaled:
    def __init__(self, by, plus=0):
        self.by, self.plus = by, plus

    def __call__(self, texts):
        return [self.by * len(text) + self.plus for text in texts]

def odd(texts):
    return ["odd" if text == "text 7" else len(text) for text in texts]

class Needy:
    def __init__(self):
        import no_such_package

    def __call__(self, texts):
        return texts

def both(rows):
    return [{"sum": row["id"] + row["text"], "length": len(row["text"])} for row in rows]

def waiting(texts):
    # at one row, until a file is there
    if "bad" in texts:
        raise ValueError("no")
    note(texts)
    if "text 40" in texts:
        Path("reached").touch()
        end = time.perf_counter() + 50
        while not told() and time.perf_counter() < end:
            time.sleep(0.01)
    return [len(text) for text in texts]

def told():
    # a run that has been told to end has Ctrl-C raise again
    if "interruptible" in os.environ:
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return Path("go").exists()

pipeline = offline.Pipeline(
    offline.Step(length, input="text", output="length"),
    offline.Step(lambda lengths: [2 * each for each in lengths], input="length", output="twice",
                 name="double"),
)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a CSV of 100 rows and a module of functions."""
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
    size = [] if target in ("pipeline", "decorated") else ["--batch-size", "8"]
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


def environment(**more: str) -> dict[str, str]:
    # the folder is another one
    return {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent), **more}


@contextmanager
def started(folder: Path, *command: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process of its own, and kill it in the end."""
    variables = more.pop("env", {})
    with subprocess.Popen(
        [sys.executable, "-m", "batched", *command],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more},
        cwd=folder,
        env=environment(**variables),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.perf_counter() + 40
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.01)


def test_a_csv_and_a_function_make_a_result_in_one_command(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments()) == 0
    assert result(folder) == [
        {"id": str(number), "text": f"text {number}", "length": len(f"text {number}")}
        for number in range(100)
    ]
    out, err = capfd.readouterr()
    assert re.match(r"100 ok in [\d.]+ s \([\d,.]+ rows/s\)\n.*out\.parquet\n$", out)
    assert err == ""


def test_the_same_command_computes_nothing_again(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments()) == 0
    assert len(computed(folder)) == 100
    capfd.readouterr()
    assert cli.main([*arguments(), "--workers", "2"]) == 0
    assert computed(folder) == []
    assert re.match(r"0 ok, 100 done before in [\d.]+ s\n", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("decorated", ()),
        ("coroutine", ("--timeout", "30")),
        ("Built", ("--workers", "2")),
        pytest.param("Built", ("--processes", "--timeout", "30"), marks=pytest.mark.once),
        ("length", ("--batch-size", "auto")),
        ("length", ("--length", "len")),
    ],
)
def test_every_kind_of_function_runs(target: str, options: tuple[str, ...], folder: Path) -> None:
    assert cli.main(arguments(target, *options)) == 0
    assert [row["length"] for row in result(folder)] == [
        len(f"text {number}") for number in range(100)
    ]


def test_arguments_of_a_class_are_json(folder: Path) -> None:
    given = ["--args", "[2]", "--kwargs", '{"plus": 100}']
    assert cli.main(arguments("Scaled", *given)) == 0
    assert result(folder)[7]["length"] == 112


def test_failed_rows_are_kept_in_the_result_if_asked(folder: Path) -> None:
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments("length", "--keep-failed")) == 0
    assert [(row["length"], row["_error"]) for row in result(folder)] == [
        (3, None),
        (None, "ValueError: no length"),
        (5, None),
    ]


def test_a_row_of_another_type_is_left_out_and_told_with_the_types(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments("odd")) == 0
    assert "100 ok, 1 failed" in capfd.readouterr().out
    assert len(result(folder)) == 99
    assert cli.main(["status", "out.parquet"]) == 0
    out = capfd.readouterr().out
    assert "types of 'length' in step odd: 99 int, 1 string" in out
    assert "such as row '7', output: column 'length': " in out


def test_rows_that_are_committed_are_exported_once_no_run_is_at_work(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments("length", "--max-failed", "0", "--batch-size", "1")) == 1
    capfd.readouterr()
    for _ in range(2):  # its own file is replaced
        assert cli.main(["export", "out.parquet"]) == 0
        out = capfd.readouterr().out
        assert out == f"{folder}/out.partial.parquet\n"
        rows = pq.read_table(folder / "out.partial.parquet").to_pylist()
        assert {"id": "0", "length": 3} in rows
        assert {row["id"] for row in rows} <= {"0", "2"}
    assert cli.main(["export", "out.parquet", "some.csv"]) == 0
    assert (folder / "some.csv").read_text().startswith("id,length\n0,3\n")
    (folder / "some.csv").write_text("mine")
    with pytest.raises(SystemExit):
        cli.main(["export", "out.parquet", "some.csv"])
    assert "some.csv is there already" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["export", "none.parquet"])
    assert "none.parquet.progress does not exist" in capfd.readouterr().err


@pytest.mark.once
@pytest.mark.skipif(os.name == "nt", reason="needs pipes as POSIX has them")
def test_a_status_that_nobody_reads_to_its_end_ends_quietly(folder: Path) -> None:
    write_rows(folder, [f"{'x' * 200} {number}" for number in range(2000)])
    (folder / "functions.py").write_text(
        "def length(texts):\n"
        "    if len(texts) == 1 and not texts[0].endswith('0'):\n"
        "        raise ValueError(texts[0])\n"
        "    return [1 / 0 for _ in texts] if len(texts) > 1 else [1]\n"
    )
    assert cli.main(arguments("length", "--quiet")) == 0
    with started(folder, "status", "out.parquet", "--failed") as process:
        assert process.stdout
        assert process.stdout.readline().startswith("{")
        process.stdout.close()
        assert process.wait(timeout=40) == 128 + 13
        assert process.stderr
        assert process.stderr.read() == ""


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


def test_a_bad_row_is_found_and_once_mended_computed_alone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments()) == 0
    out, err = capfd.readouterr()
    assert "2 ok, 1 failed" in out
    assert "1 x ValueError" in out
    assert re.fullmatch(r"1 row failed .*\n  batched status out\.parquet --failed\n", err)
    assert cli.main(["status", "out.parquet"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "/out.parquet: done after 0:00:0" in lines[0]
    assert lines[1] == "3 of 3 rows read, 0 of them done before"
    assert lines[2].split()[:4] == ["step", "ok", "failed", "filtered"]
    assert lines[3].split()[:4] == ["length", "2", "1", "0"]
    assert lines[4] == (
        "1 x ValueError, such as row '1' in step length, inference: ValueError: no length"
    )
    assert lines[5].endswith("batched status out.parquet --failed")
    assert cli.main(["status", "out.parquet", "--failed"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    letter = json.loads(line)
    assert "in length" in letter.pop("traceback")
    assert letter.pop("attempts") >= 1
    assert letter == {
        "key": "1",
        "step": "length",
        "phase": "inference",
        "error": "ValueError: no length",
    }
    assert [row["text"] for row in result(folder)] == ["one", "three"]
    computed(folder)
    write_rows(folder, ["one", "mended", "three"])
    assert cli.main(arguments()) == 0
    assert computed(folder) == ["mended"]
    assert "1 ok, 2 done before, 1 edited since the last run" in capfd.readouterr().out
    assert cli.main(["status", "out.parquet"]) == 0
    assert "2 of them done before, 1 edited since the last run" in capfd.readouterr().out
    assert [row["length"] for row in result(folder)] == [3, 6, 5]
    capfd.readouterr()
    assert cli.main(["status", "out.parquet", "--failed"]) == 0
    assert capfd.readouterr().out == ""


@pytest.mark.once
def test_an_error_of_a_process_has_its_own_name(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments("length", "--processes")) == 0
    assert "1 x ValueError" in capfd.readouterr().out
    assert cli.main(["status", "out.parquet", "--failed"]) == 0
    assert json.loads(capfd.readouterr().out)["error"] == "ValueError: no length"


def test_an_error_of_any_text_is_a_dead_letter(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "functions.py").write_text(FUNCTIONS.replace("no length", "no \\ud800 [b]é{x}"))
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main(arguments()) == 0
    capfd.readouterr()
    assert cli.main(["status", "out.parquet"]) == 0
    assert "ValueError: no \\ud800 [b]é{x}" in capfd.readouterr().out
    assert cli.main(["status", "out.parquet", "--failed"]) == 0
    assert json.loads(capfd.readouterr().out)["error"] == "ValueError: no \\ud800 [b]é{x}"


def test_too_many_failed_rows_end_with_status_1_and_the_way_on(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder, ["one", "bad", "three"])
    command = arguments("length", "--max-failed", "0")
    assert cli.main(command) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "max_failed is 0" in err
    assert f"batched {shlex.join(command)}" in err.splitlines()[-1]
    assert cli.main(["status", "out.parquet"]) == 0
    assert "/out.parquet: stopped after" in capfd.readouterr().out
    assert not (folder / "out.parquet").exists()


def test_a_quiet_run_says_only_what_is_wrong(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments(), "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    write_rows(folder, ["one", "bad", "three"])
    assert cli.main([*arguments(), "--quiet"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("1 row failed")


REFUSED = [
    (["functions:none"], "functions has no attribute 'none'"),
    (["no_such_module:embed"], "cannot import no_such_module: .*"),
    (["functions.py"], "name the function as module:function, got 'functions.py'"),
    (["functions:Needy"], "ModuleNotFoundError: .*no_such_package.*"),
    (["functions:pipeline"], "functions:pipeline is a Pipeline, which has its own input, output"),
    (["functions:length", "no-such-file.csv"], ".*no-such-file.csv.*"),
    (["functions:length", "in.csv", "out.xls"], ".*out.xls.*must end in.*"),
    (["functions:length", "in.csv", "missing/out.csv"], ".*missing.*"),
    (["functions:length", "in.csv", "foreign.csv"], ".*foreign.csv.*"),
    (["--input", "none"], ".*'none'.*"),
    (["--key", "none"], ".*'none'.*"),
    (["--timeout", "3"], "(ValueError: )?step 'length': timeout_s needs .*"),
    (["--resume-step", "none"], "ValueError: resume_step must be one of .*, got 'none'"),
    (["--args", "2"], "argument --args: invalid JSON list value: '2'"),
    (["--kwargs", "{"], "argument --kwargs: invalid JSON object value: '{'"),
    (["--length", "no_such_function"], "name the function as module:function, got .*"),
    (["--batch-size", "many"], "argument --batch-size: invalid integer value: 'many'"),
    (["--max-failed", "-1"], "argument --max-failed: must be at least 0, got -1.0"),
    (["--proc"], "unrecognized arguments: --proc"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=lambda each: " ".join(each)[:40])
def test_a_command_that_cannot_run_is_refused_in_one_sentence(
    given: list[str], sentence: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder, ["same", "same"])
    (folder / "foreign.csv").write_text("mine")
    places = ["functions:length", "in.csv", "out.parquet"]
    if not given[0].startswith("--"):
        places[: len(given)] = given
        given = []
    with pytest.raises(SystemExit) as refused:
        cli.main(["run", *places, "--input", "text", "--output", "length", *given])
    assert refused.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(rf"batched( run)?: {sentence}\n", err)
    assert (folder / "foreign.csv").read_text() == "mine"


def test_columns_are_asked_for(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "functions:length", "in.csv", "out.parquet"])
    assert "--input and --output are required" in capfd.readouterr().err


def test_another_version_of_a_function_is_refused_or_recomputes(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments()) == 0
    (folder / "functions.py").write_text(FUNCTIONS.replace("len(text)", "2 * len(text)"))
    sys.modules.pop("functions")
    with pytest.raises(SystemExit) as refused:
        cli.main(arguments())
    assert refused.value.code == 2
    assert result(folder)[7]["length"] == 6
    assert cli.main([*arguments(), "--on-mismatch", "recompute"]) == 0
    assert result(folder)[7]["length"] == 12


def test_a_missing_package_is_named_with_its_extra(folder: Path) -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None; from batched.cli import main; "
        f"main({arguments()!r})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=50,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        'batched run: pyarrow is not installed; run `pip install "batched-dynamically[offline]"`\n'
    )


def test_the_status_of_no_run_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["status", "out.parquet"])
    assert refused.value.code == 2
    assert "there is no run of out.parquet" in capfd.readouterr().err
    assert not list(folder.glob("out*"))


def test_progress_may_lie_elsewhere(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "elsewhere").mkdir()
    write_rows(folder, ["one", "bad"])
    assert cli.main(arguments("length", "--progress", "elsewhere/run.db")) == 0
    err = capfd.readouterr().err
    assert err.endswith("batched status out.parquet --failed --progress elsewhere/run.db\n")
    assert {path.name for path in folder.glob("out*")} == {"out.parquet"}
    assert cli.main(["status", "out.parquet", "--progress", "elsewhere/run.db"]) == 0
    assert "1 x ValueError" in capfd.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_commits_its_rows_and_prints_the_command_that_goes_on(
    number: int, status: int, folder: Path
) -> None:
    with started(folder, *arguments("waiting"), env={"interruptible": "1"}) as process:
        wait_for((folder / "reached").exists)
        process.send_signal(number)
        out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (status, "")
    said = re.search(r"\nInterrupted; ([\d,]+) rows committed\. To go on:\n  (.*)\n$", err)
    assert said, err
    committed = int(said[1])
    first = computed(folder)
    assert committed == len(first)  # all that was computed, "text 40" among them
    assert 40 < committed < 100
    command = shlex.split(said[2])
    assert command[1:] == ["-m", "batched", *arguments("waiting")]
    ended = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    second = computed(folder)
    assert sorted([*first, *second]) == sorted(f"text {number}" for number in range(100))
    assert f"{committed:,} done before" in ended.stdout
    assert [row["length"] for row in result(folder)] == [
        len(f"text {number}") for number in range(100)
    ]


@pytest.mark.once
def test_the_status_tells_of_a_run_that_goes_on_and_of_one_that_was_killed(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder, ["bad", *[f"text {number}" for number in range(1, 100)]])

    def status() -> str:
        assert cli.main(["status", "out.parquet"]) == 0
        return capfd.readouterr().out

    def known() -> bool:
        path = folder / "out.parquet.status.json"
        return path.exists() and json.loads(path.read_text())["steps"][0]["ok"] == 39

    with started(folder, *arguments("waiting")) as process:
        wait_for(known)
        lines = status().splitlines()
        assert "/out.parquet: running, 0:00:" in lines[0]
        assert f"; process {process.pid} on " in lines[0]
        assert lines[1] == "100 of 100 rows read, 0 of them done before"
        assert lines[3].split()[:5] == ["waiting", "39", "1", "0", "60"]
        assert (
            lines[4] == "1 x ValueError, such as row '0' in step waiting, inference: ValueError: no"
        )
        with pytest.raises(SystemExit) as refused:
            cli.main(["status", "out.parquet", "--failed"])
        assert refused.value.code == 2
        assert str(process.pid) in capfd.readouterr().err
        process.kill()
        process.wait()
    lines = status().splitlines()
    assert "/out.parquet: killed after 0:00:" in lines[0]
    assert lines[0].endswith("the same command goes on where it was")
    (folder / "go").touch()
    with started(folder, *arguments("waiting")) as process:
        assert process.wait(timeout=40) == 0
    assert "/out.parquet: done after" in status()


@pytest.mark.once
def test_a_second_run_is_refused_in_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with started(folder, *arguments("waiting")) as process:
        wait_for((folder / "reached").exists)
        with pytest.raises(SystemExit) as refused:
            cli.main(arguments("waiting"))
        assert refused.value.code == 2
        assert str(process.pid) in capfd.readouterr().err


@pytest.mark.once
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs terminals as POSIX has them")
def test_a_terminal_shows_a_bar_while_a_run_goes_on(folder: Path) -> None:
    ours, theirs = os.openpty()
    with started(folder, *arguments("waiting"), stderr=theirs, env={"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        while "40/100 rows" not in shown.decode(errors="ignore"):
            shown += os.read(ours, 4096)
        (folder / "go").touch()
        while True:
            try:
                more = os.read(ours, 4096)
            except OSError:  # the end, on Linux
                break
            if not more:
                break
            shown += more
        assert process.wait(timeout=40) == 0
        assert process.stdout
        assert "100 ok" in process.stdout.read()
    os.close(ours)
    text = shown.decode()
    assert "waiting" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize("given", [["--resume-step", "double"], ["--resume-step=double"]])
def test_the_command_that_goes_on_computes_nothing_anew_once_more(given: list[str]) -> None:
    command = ["run", "m:f", "in.csv", "out.csv", *given, "--on-mismatch", "recompute"]
    assert parser._without_resume_step(command) == [
        "run",
        "m:f",
        "in.csv",
        "out.csv",
        "--on-mismatch",
        "recompute",
    ]
