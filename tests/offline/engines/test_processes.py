"""Batch functions in processes: messages, deaths and leftovers."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import batched
from batched._execution.memory import is_out_of_memory
from batched.errors import RemoteError, TimeLimitExceeded, WorkerDied
from batched.offline.engines import engine_for
from batched.offline.engines.processes import WorkerKilled
from batched.offline.retry import Retry
from offline_steps import (
    SOON,
    Outcome,
    Process,
    ask,
    double,
    fail,
    faulty,
    outcome,
    running,
    spawned_by,
    step_of,
)
from stage import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
    pytest.mark.usefixtures("leftovers"),
]


def in_process(func: Callable[..., Any], rows: list[Any], **settings: Any) -> Outcome:
    return outcome(func, rows, processes=True, **settings)


def test_functions_arguments_values_and_errors_travel() -> None:
    class Local(Exception):
        pass

    factor = 3

    def fn(items: list[Any], plus: int, *, times: int) -> list[Any]:
        for item in items[3:]:
            item += 1  # arrays are those of the function
        return [times * factor * items[0] + plus, items[1], Local(items[2]), *items[3:]]

    arrays = [numpy.zeros(size, numpy.float32) for size in (3, 1_000_000, 50_000)]
    rows = [1, "__main__", 0, *arrays]
    done = in_process(fn, rows, batch_size=6, args=(100,), kwargs={"times": 10})
    number, text, error, *found = done.results
    assert (number, text) == (130, "__main__")
    assert isinstance(error, RemoteError)
    assert str(error) == "Local: 0"
    for array, result in zip(arrays, found, strict=True):
        assert result.dtype == numpy.float32
        assert numpy.array_equal(result, array + 1)
        result += 1  # and results those of the caller


def test_results_that_cannot_be_sent_are_an_error_of_the_batch() -> None:
    done = in_process(lambda items: [(item for item in items)] * len(items), [1])
    assert "cannot pickle 'generator' object" in str(done.results[0])


def test_a_function_that_cannot_be_sent_is_refused_before_anything_runs() -> None:
    lock = threading.Lock()

    def fn(items: list[int]) -> list[int]:
        with lock:
            return items

    with pytest.raises(TypeError) as raised:
        engine_for(step_of(fn, processes=True), print)
    assert str(raised.value).startswith(
        "fn, or what its args= and kwargs= hold, cannot be sent to another process (TypeError: "
    )
    assert "define it in a module that can be imported" in str(raised.value)


@pytest.mark.once
def test_what_its_process_cannot_import_ends_the_workers_or_fails_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden: Any = types.ModuleType("hidden_module")
    exec("def fn(items): return items\nclass Row: pass", vars(hidden))
    monkeypatch.setitem(sys.modules, "hidden_module", hidden)
    done = in_process(hidden.fn, [1])
    assert "fn cannot be found in its process (ModuleNotFoundError" in str(done.fatal)
    good, bad = in_process(double, [1, hidden.Row()]).results
    assert good == 2
    assert type(bad) is ModuleNotFoundError


@pytest.mark.once
def test_a_fault_of_a_service_is_known_across_processes() -> None:
    class Busy(Exception):
        pass

    def busy(items: list[int]) -> list[int]:
        raise Busy("busy")

    done = in_process(busy, [1, 2], retry=Retry(on=(Busy,)))
    first, second = done.results
    assert str(first) == "Busy: busy"
    assert first is second, "which is not narrowed"


@pytest.mark.once
def test_memory_errors_of_a_process_split() -> None:
    class NoMemory(MemoryError):
        pass

    def small(items: list[int]) -> list[int]:
        if len(items) > 2:
            raise NoMemory
        return items

    assert in_process(small, list(range(8))).results == list(range(8))


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("hold the GIL", TimeLimitExceeded, "faulty took longer than timeout_s=0.3, and was ended"),
        ("segfault", WorkerDied, "the process of faulty got SIGSEGV"),
        ("sys.exit", SystemExit, "0"),
        ("be killed", WorkerKilled, "the process of faulty was killed, as systems do when memory"),
        ("raise", ValueError, "bad row"),
    ],
)
@pytest.mark.once
def test_a_fault_costs_its_row_and_the_next_batch_runs(
    fault: str, kind: type[Exception], message: str
) -> None:
    with running(faulty, processes=True, timeout_s=0.3) as (submitter, _outcomes):
        good, bad = ask(submitter, [1, fault])
        assert ask(submitter, [2, 3]) == [2, 3]
    assert good == 1
    assert type(bad) is kind
    assert message in str(bad)
    assert is_out_of_memory(bad) is (fault == "be killed")


@pytest.mark.once
def test_a_process_is_kept_and_a_kill_from_outside_costs_no_row() -> None:
    with running(Process, processes=True) as (submitter, _outcomes):
        (pid,) = set(ask(submitter, *[[1, 2]] * 3))
        assert [pid] == spawned_by(os.getpid())
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        assert pid not in ask(submitter, [1, 2])


@pytest.mark.once
def test_a_class_whose_process_dies_while_it_is_built_ends_the_workers() -> None:
    done = in_process(Process, [1], args=("exit 1",))
    assert str(done.fatal) == "the process of Process exited with 1"


@pytest.mark.once
def test_a_process_whose_pipe_another_one_holds_open_is_found_dead() -> None:
    def forking(items: list[Any]) -> list[Any]:
        if "fork" in items:
            if os.fork() == 0:
                threading.Event().wait(10)
            os._exit(4)
        return items

    good, bad = in_process(forking, [1, "fork"]).results
    assert good == 1
    assert str(bad) == "the process of forking exited with 4"


def test_an_interrupt_of_the_terminal_is_for_the_driver_alone() -> None:
    (session,) = in_process(lambda items: [os.getsid(0)], [1]).results
    assert session != os.getsid(0), "Ctrl-C is for all processes of a session"


@pytest.mark.once
def test_features_run_in_processes_as_they_do_online() -> None:
    @batched.inference.dynamically
    def fn(features: dict[str, Any]) -> dict[str, Any]:
        return {"sum": features["ids"].sum(axis=1), "same": features["ids"]}

    rows = [{"ids": numpy.arange(size)[None]} for size in (2, 4)]
    found = in_process(fn, rows).results
    assert [each["sum"].tolist() for each in found] == [[1], [6]]
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match="device=, which holds for this process alone"):
        in_process(fn.with_options(device="cpu"), rows)


@pytest.mark.once
def test_closing_ends_a_process_that_holds_the_gil(tmp_path: Path, leftovers: Any) -> None:
    begun = tmp_path / "begun"

    def holding(items: list[Any]) -> list[Any]:
        begun.touch()
        fail("hold the GIL")
        return items

    with running(holding, processes=True) as (submitter, outcomes):
        submitter.submit([1, 2])
        wait_until(begun.exists)
    wait_until(lambda: not leftovers())
    assert outcomes.empty()


@pytest.mark.once
def test_closing_ends_a_process_that_is_being_built(leftovers: Any) -> None:
    with running(Process, processes=True, args=("hang",)) as (submitter, outcomes):
        submitter.submit([1])
        wait_until(lambda: bool(spawned_by(os.getpid())))
    wait_until(lambda: not leftovers())
    assert outcomes.empty(), "that it was closed is no error"


IMPORTS = """
import os, threading
import batched
from offline_steps import Process, Submitter, outcome, spawned_by, step_of
from stage import wait_until
"""


def script(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    """Start a script without a main guard."""
    program = tmp_path / "script.py"
    program.write_text(IMPORTS + textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_script_without_a_main_guard_works_and_runs_once(tmp_path: Path) -> None:
    driver = script(
        tmp_path,
        """
        print("the script runs", flush=True)

        class Point:
            def __init__(self, x):
                self.x = x

        @batched.dynamically
        def fn(items):
            return [Point(2 * item) for item in items]

        done = outcome(fn, [1, 2], processes=True)
        print([(type(each) is Point, each.x) for each in done.results])
        """,
    )
    text, _ = driver.communicate(timeout=SOON)
    assert text.splitlines() == ["the script runs", "[(True, 2), (True, 4)]"]


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="no other system ends a process with the GIL")
def test_a_driver_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    driver = script(
        tmp_path,
        """
submitter = Submitter(step_of(Process, processes=True, workers=2, batch_size=1))
submitter.submit([1])
submitter.outcomes.get(timeout=30)
for fault in "hang", "hold the GIL":
    submitter.submit([fault])
wait_until(lambda: len(spawned_by(os.getpid())) == 2)
print(spawned_by(os.getpid()), flush=True)
threading.Event().wait(60)
""",
    )
    assert driver.stdout is not None
    pids = ast.literal_eval(driver.stdout.readline())
    assert len(pids) == 2
    driver.kill()
    driver.wait(SOON)
    driver.stdout.close()
    for pid in pids:
        wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    """Return once the process has ended."""

    def has_ended() -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"  # and not yet waited for

    wait_until(has_ended)
