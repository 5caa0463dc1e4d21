"""Connected functions and their model processes: calls, one process for all, ends of both sides."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from served import environment, model_processes

import batched
from batched._connect.place import Place
from batched.cli import main
from batched.errors import BatcherClosed, QueueFull, QueueTimeout, RemoteError, ServerGone
from pages import ROOT, blocks
from stage import BOUND, Turnstile, interrupted_once, python, wait_until

Connect = Callable[..., Any]


def computed(folder: Path) -> list[str]:
    return (folder.parent / "computed.txt").read_text().split()


def test_a_system_without_unix_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "send_fds")
    with pytest.raises(OSError, match=r"^batched\.connect needs Unix sockets"):
        batched.connect("served_model:double")


def test_a_client_refuses_the_settings_of_a_function() -> None:
    connect: Any = batched.connect
    refused = {"batch_size": "it belongs to the function", "linger": "did you mean 'linger_s'"}
    for name, message in refused.items():
        with pytest.raises(TypeError, match=f"there is no setting '{name}'.*{message}"):
            connect("served_model:double", **{name: 8})
    with pytest.raises(
        ValueError, match=r"'module:function' or 'unix:PATH', got 'model\.py:double'"
    ):
        connect("model.py:double")


def test_items_may_be_passed_by_name_and_other_arguments_are_refused(connected: Connect) -> None:
    double = connected()
    assert double(items=["a"]) == ["aa"]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        double(1, other=2)
    with pytest.raises(TypeError, match="needs an item"):
        double()


def test_a_coroutine_function_runs_in_a_process(connected: Connect) -> None:
    assert connected("awaited")(["a", "b"]) == ["a", "b"]


@pytest.mark.once
def test_clients_that_call_first_at_the_same_moment_share_one_process(folder: Path) -> None:
    code = """
        import batched
        print(batched.connect("served_model:pids", linger_s=1)(0))
        """
    with ThreadPoolExecutor(3) as threads:
        ended = list(threads.map(lambda _: python(code), range(3)))
    assert [each.stderr for each in ended] == [""] * 3
    assert len({each.stdout for each in ended}) == 1
    assert computed(folder) == ["built"]


@pytest.mark.once
def test_a_process_ends_with_its_last_client_and_leaves_no_file(folder: Path) -> None:
    clients: list[Any] = [batched.connect("served_model:pids", linger_s=0.2) for _ in range(2)]
    [pid] = {client(0) for client in clients}
    clients.pop().shutdown()
    del clients  # the last one is dropped
    wait_until(lambda: not Path(f"/proc/{pid}").exists() and not list(folder.iterdir()))


@pytest.mark.once
def test_a_process_may_wait_for_clients_for_ever(connected: Connect) -> None:
    client = connected("pids", linger_s=math.inf)
    pid = client(0)
    client.shutdown()
    assert connected("pids")(0) == pid


@pytest.mark.once
def test_after_the_death_of_the_process_calls_end_and_the_next_call_starts_another(
    connected: Connect, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slowly, pids = connected("slowly"), connected("pids")
    slowly(0)
    future = slowly.submit(60)
    wait_until(lambda: slowly.client_stats.sent == 1)
    for pid in model_processes(folder):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServerGone, match="its process has ended"):
        future.result(BOUND)
    assert (slowly.client_stats.lost, slowly.client_stats.cancelled) == (1, 0)
    assert "served_model:slowly: a call was lost: its process has ended" in caplog.messages
    assert slowly(0) == 0
    pid = pids(0)
    os.kill(pid, signal.SIGKILL)  # while no call is under way
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert pids(0) != pid


def test_a_callback_that_waits_for_its_own_thread_is_refused(connected: Connect) -> None:
    double, refused = connected(), threading.Event()

    def call(_: Any) -> None:
        with pytest.raises(RuntimeError, match="would wait for itself"):
            double(2)
        refused.set()

    double.submit(1).add_done_callback(call)
    assert refused.wait(BOUND)
    assert double(3) == 6


@pytest.mark.once
def test_a_process_whose_module_forks_serves_at_once(folder: Path, modules: Path) -> None:
    (modules / "forking.py").write_text(
        "import os, time, batched\n"
        "if not os.fork():\n"
        "    time.sleep(600)\n"
        "    os._exit(0)\n"
        "@batched.dynamically\n"
        "def call(items): return items\n"
    )
    call: Any = batched.connect("forking:call", linger_s=0)
    assert call.submit(1).result(BOUND) == 1
    call.shutdown()
    wait_until(lambda: not list(folder.iterdir()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_has_a_connection_of_its_own_and_keeps_its_arrays(connected: Connect) -> None:
    pytest.importorskip("numpy")
    ended = python(
        """
        import os
        import numpy as np
        import batched
        arrays = batched.connect("served_model:arrays", linger_s=1)
        kept = arrays(np.full(100_000, 1, np.uint8))
        reading, writing = os.pipe()
        child = os.fork()
        assert arrays(list(range(100))) == list(range(100))
        if child == 0:
            os.read(reading, 1)
            os._exit(0 if (kept == 1).all() else 1)
        del kept
        for number in range(2, 8):
            arrays(np.full(100_000, number, np.uint8))
        os.write(writing, b".")
        assert os.waitpid(child, 0)[1] == 0
        assert arrays(3) == 3
        """,
        "-W",
        "ignore::DeprecationWarning",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.once
def test_metrics_of_the_process_are_on_the_page_of_a_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    ended = python(
        """
        import time
        import batched
        import batched.metrics
        from prometheus_client import CollectorRegistry, multiprocess

        double = batched.connect("served_model:double", linger_s=1)
        registry = CollectorRegistry()
        batched.metrics.prometheus(registry=registry)
        multiprocess.MultiProcessCollector(registry)
        assert double([1, 2, 3]) == [2, 4, 6]
        while registry.get_sample_value("batched_items_total", {"function": "double"}) != 3:
            time.sleep(0.01)  # the model process writes its counts a moment later
        calls = {"function": "served_model:double"}
        print(registry.get_sample_value("batched_calls_total", calls))
        """
    )
    assert (ended.stdout, ended.stderr) == ("1.0\n", "")


@pytest.mark.once
def test_a_module_of_the_folder_is_found_although_the_path_has_lost_the_folder(
    connected: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_this_folder.py").write_text(
        "import batched, os\npids = batched.dynamically(lambda items: [os.getpid()] * len(items))"
    )
    monkeypatch.chdir(tmp_path)
    ended = python(
        """
        import os, sys
        import batched
        sys.path.append(os.getcwd())
        first = batched.connect("of_this_folder:pids", linger_s=1)
        pid = first(0)
        sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
        assert batched.connect("of_this_folder:pids", linger_s=1)(0) == pid
        first.shutdown()
        os.utime("of_this_folder.py", (1, 1))  # another version
        assert batched.connect("of_this_folder:pids", linger_s=1)(0) != pid
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_accepted_calls_are_answered_before_the_interpreter_exits(connected: Connect) -> None:
    ended = python(
        """
        import atexit
        atexit.register(lambda: print(future.result(0)))  # after all handlers of the library

        import batched
        future = batched.connect("served_model:slowly", linger_s=1).submit(0.2)
        """
    )
    assert (ended.stdout, ended.stderr) == ("0.2\n", "")


def test_a_pickled_function_connects_wherever_it_arrives(connected: Connect) -> None:
    double = connected(max_queue_size=7)
    twin = pickle.loads(pickle.dumps(double))
    assert twin.options["max_queue_size"] == 7
    assert twin(5) == 10
    twin.shutdown()


class Picky(Exception):
    """Error that no pickle of it makes again."""

    def __init__(self, code: int, lock: Any) -> None:
        super().__init__("bad", lock)
        self.code, self.lock = code, lock


def test_an_error_arrives_with_its_class_and_the_traceback_of_the_process(served: Connect) -> None:
    class Local(Exception):
        pass

    @batched.dynamically
    def fail(items: list[str]) -> list[str]:
        if items == ["local"]:
            raise Local("bad")
        if items == ["picky"]:
            raise Picky(7, threading.Lock())
        raise KeyError("bad") from ValueError("worse")

    connected = served(fail)
    with pytest.raises(KeyError, match="bad") as caught:
        connected("")
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("in fail" in note for note in caught.value.__notes__)
    with pytest.raises(Picky, match="'bad', '<unlocked _thread.lock") as picky:
        connected("picky")
    assert (picky.value.code, hasattr(picky.value, "lock")) == (7, False)
    with pytest.raises(RemoteError, match="Local: bad"):
        connected("local")


class Hostile:
    """Item of which no process can make anything."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_what_cannot_be_sent_or_read_is_an_error_of_its_call(served: Connect) -> None:
    @batched.dynamically
    def call(items: list[str]) -> list[Any]:
        if items == ["raise"]:
            raise ValueError(Hostile())
        return [{"lock": threading.Lock(), "hostile": Hostile()}.get(each, each) for each in items]

    connected = served(call)
    with pytest.raises(TypeError, match="cannot be sent to its process"):
        connected(lambda: None)
    with pytest.raises(TypeError, match="returned an object that cannot be sent"):
        connected("lock")
    with pytest.raises(TypeError, match=r"cannot be read in this process \(ValueError"):
        connected("hostile")
    with pytest.raises(RemoteError, match="ValueError"):
        connected("raise")
    assert connected("a") == "a"


def test_a_caller_that_is_interrupted_lets_another_one_read(served: Connect) -> None:
    turnstile = Turnstile()
    call = served(batched.dynamically(batch_size=1)(turnstile))
    later: list[Any] = []

    def another_waits() -> None:
        wait_until(lambda: turnstile.batches == [[1]])
        later.append(threads.submit(call, 2))
        wait_until(lambda: call.client_stats.sent == 2)

    with ThreadPoolExecutor(1) as threads:
        with interrupted_once(another_waits):
            call(1)
        turnstile.let_through(2)
        error = later[0].exception(BOUND)
        # if the handler broke in before the caller waited, the connection has ended
        assert error is None or isinstance(error, ServerGone)


def test_callbacks_of_futures_do_not_run_in_threads_of_callers(served: Connect) -> None:
    turnstile = Turnstile()
    call = served(batched.dynamically(batch_size=1)(turnstile))
    ran: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(call, 1)
        wait_until(lambda: turnstile.batches == [[1]])
        future = call.submit(2)
        future.add_done_callback(lambda _: ran.append(threading.get_ident()))
        turnstile.let_through(2)
        assert (reader.result(BOUND), future.result(BOUND)) == (1, 2)
        wait_until(lambda: bool(ran))
        assert ran != [threads.submit(threading.get_ident).result(BOUND)]


def test_threads_futures_and_tasks_get_their_own_answers_at_once(served: Connect) -> None:
    call = served()

    async def gather(items: list[Any]) -> Any:
        return await asyncio.gather(*map(call.acall, items))

    def ask(name: str) -> None:
        items = [(name, number) for number in range(20)]
        assert [call(item) for item in items] == items
        assert [future.result(BOUND) for future in [*map(call.submit, items)]] == items
        assert asyncio.run(gather(items)) == items

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, "abcdef"))
    assert call.client_stats.calls == 6 * 60


def test_unanswered_calls_beyond_the_limit_of_a_client_wait_or_are_refused(served: Connect) -> None:
    turnstile = Turnstile()
    waiting = served(batched.dynamically(batch_size=1)(turnstile), max_queue_size=2)
    first = [waiting.submit(number) for number in range(2)]
    wait_until(lambda: waiting.client_stats.sent == 2)
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(waiting, 2), threads.submit(waiting.submit, 3)]
        wait_until(lambda: waiting.client_stats.blocked == 2)
        refusing: Any = batched.connect(waiting.served.address, max_queue_size=1, on_full="raise")
        assert refusing.with_options(on_full="wait").options["on_full"] == "wait"
        accepted = refusing.submit(4)
        with pytest.raises(QueueFull, match="1 calls have no answer yet, of at most 1"):
            refusing(5)
        turnstile.let_through(5)
        assert [future.result(BOUND) for future in (*first, others[0])] == [0, 1, 2]
        assert others[1].result(BOUND).result(BOUND) == 3
    assert accepted.result(BOUND) == 4
    assert refusing.client_stats.rejected == 1
    refusing.shutdown()


def test_a_call_that_waits_too_long_ends_unless_it_runs(served: Connect) -> None:
    turnstile = Turnstile()
    call = served(batched.dynamically(batch_size=1)(turnstile), queue_timeout_ms=50)
    running = call.submit(1)
    wait_until(lambda: turnstile.batches == [[1]])
    with pytest.raises(QueueTimeout, match=r"had waited for 50.0 ms \(queue_timeout_ms\)"):
        call(2)
    assert call.client_stats.timed_out == 1
    turnstile.let_through()
    assert running.result(BOUND) == 1
    assert turnstile.batches == [[1]]


def test_a_server_without_descriptors_accepts_once_it_has_some(
    served: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connected = served()
    accept, faults = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")] * 3

    def full(listener: socket.socket) -> Any:
        if faults:
            raise faults.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", full)
    assert connected(1) == 1
    assert caplog.text.count("cannot accept a client: [Errno 24] too many open files") == 1


@pytest.mark.once
def test_waiting_calls_of_a_killed_client_are_not_computed(served: Connect) -> None:
    turnstile = Turnstile()
    connected = served(batched.dynamically(batch_size=1)(turnstile))
    code = f"""
        import batched, threading
        connected = batched.connect({connected.served.address!r})
        futures = [connected.submit(number) for number in (1, 2, 3)]
        threading.Event().wait()
        """
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        wait_until(lambda: connected.stats.queue_size == 2)
    finally:
        client.kill()
        client.wait(BOUND)
    wait_until(lambda: connected.stats.queue_size == 0)
    turnstile.let_through(2)
    assert connected(4) == 4
    assert turnstile.batches == [[1], [4]]


@pytest.mark.once
def test_statistics_count_the_calls_of_all_clients(served: Connect) -> None:
    connected = served()
    other: Any = batched.connect(connected.served.address)
    assert (connected(1), other(2)) == (1, 2)
    assert (connected.stats.calls, other.stats.calls) == (2, 2)
    assert (connected.client_stats.calls, other.client_stats.calls) == (1, 1)
    other.shutdown()
    assert other.stats.calls == 2
    connected.reset_stats()
    assert connected.stats.calls == connected.client_stats.calls == 0


@pytest.mark.once
def test_items_are_prepared_in_the_client(served: Connect) -> None:
    seen: list[Any] = []

    @batched.dynamically
    def collect(items: list[int]) -> list[int]:
        seen.extend(items)
        return items

    connected = served(collect, prepare=ord)
    assert connected(["a", "b"]) == [97, 98]
    assert asyncio.run(connected.acall("c")) == 99
    with pytest.raises(TypeError, match="expected a character"):
        connected("")
    assert seen == [97, 98, 99]
    assert served(collect, prepare="builtins:ord")("a") == 97


@pytest.mark.once
def test_features_cross_by_inference_connect_alone(served: Connect) -> None:
    np = pytest.importorskip("numpy")
    refused = served(batched.inference.dynamically(lambda features: features["x"] * 2))
    with pytest.raises(ServerGone, match=r"needs batched\.inference\.connect"):
        refused({"x": np.ones(1)})
    for kind in (batched.inference.connect, batched.aio.inference.connect):
        with kind(refused.served.address) as connected:
            assert asyncio.run(connected.acall(x=np.ones(2))).tolist() == [2, 2]


@pytest.mark.once
def test_large_values_cross_in_shared_memory_and_arrays_may_be_kept(served: Connect) -> None:
    np = pytest.importorskip("numpy")
    connected = served()
    texts = [bytes([number]) * 20_000_000 for number in range(4)]  # more than the memory has
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(connected, texts)) == texts
    results = [connected(np.full(1 << 20, number, np.uint8)) for number in range(70)]
    for number, result in enumerate(results):
        assert (result == number).all()
        assert result.flags.writeable
        result += 1
    del results, result
    for _ in range(40):
        assert connected(np.ones(100_000, np.float32)).sum() == 100_000


@pytest.mark.once
def test_tensors_cross_in_shared_memory(served: Connect) -> None:
    torch = pytest.importorskip("torch")
    connected = served()
    large, transposed = torch.ones(200, 300, dtype=torch.bfloat16), torch.eye(400).T
    for tensor in (large, transposed, torch.zeros(0, 3), torch.tensor(5)):
        assert torch.equal(connected(tensor), tensor)


def test_the_result_of_an_answered_call_is_not_kept(served: Connect) -> None:
    np = pytest.importorskip("numpy")
    connected = served()
    kept = weakref.ref(connected(np.ones(100_000)))
    gc.collect()
    assert kept() is None


def test_shutdown_on_a_loop_sends_what_its_tasks_have_called(served: Connect) -> None:
    connected = served()

    async def close() -> Any:
        task = asyncio.ensure_future(connected.acall(1))
        await asyncio.sleep(0)
        connected.shutdown()
        return await task

    assert asyncio.run(close()) == 1


@pytest.mark.once
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise OSError('no weights')", "OSError: no weights"),
        ("os.kill(os.getpid(), 9)", "while it was built, it was killed, as systems do when"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_sentence_to_every_client(
    folder: Path, modules: Path, end: str, reason: str
) -> None:
    (modules / "broken.py").write_text(
        f"import os, served_model, time\nserved_model.note('tried')\ntime.sleep(0.5)\n{end}\n"
    )
    clients: list[Any] = [batched.connect("broken:embed") for _ in range(3)]
    futures = [client.submit(0) for client in clients]
    sentence = f"broken:embed: cannot start the process of broken:embed: {reason}"
    assert all(str(future.exception(BOUND)).startswith(sentence) for future in futures)
    assert computed(folder).count("tried") == 1
    with pytest.raises(ServerGone, match=reason):
        clients[0](0)
    assert computed(folder).count("tried") == 2
    wait_until(lambda: not list(folder.iterdir()))


@pytest.mark.once
def test_each_version_of_the_library_has_a_process_of_its_own(
    served: Connect, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = served()
    connected.served.server.greeting["version"] = "0.0.1"
    with pytest.raises(ServerGone, match=r"its model process has batched 0\.0\.1"):
        connected(1)
    before = Place.at("served_model:double").path
    monkeypatch.setattr("batched._connect.place.__version__", "0.0.1")
    assert Place.at("served_model:double").path != before


@pytest.mark.once
def test_an_error_never_imports_the_model(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (modules / "large_model.py").write_text(
        "import batched\n"
        "class BadText(ValueError): ...\n"
        "@batched.dynamically\n"
        "def call(items):\n"
        "    raise BadText('no text')\n"
    )
    with batched.connect("large_model:call", linger_s=0) as call:
        with pytest.raises(RemoteError, match="BadText: no text"):
            call(1)
        assert "large_model" not in sys.modules
        monkeypatch.setitem(sys.modules, "large_model", model := ModuleType("large_model"))
        model.BadText = type("BadText", (ValueError,), {"__module__": "large_model"})  # type: ignore[attr-defined]
        with pytest.raises(model.BadText, match="no text"):
            call(1)


@pytest.mark.once
def test_a_path_that_is_too_long_for_a_socket_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    connected: Any = batched.connect("served_model:double")
    with pytest.raises(ServerGone, match="cannot use the socket .*: AF_UNIX path too long"):
        connected(1)


@pytest.mark.once
def test_an_offline_run_refuses_a_connected_function() -> None:
    offline = pytest.importorskip("batched.offline")
    connected: Any = batched.connect("served_model:double")
    with pytest.raises(TypeError, match="runs in another process, whose code a run cannot compare"):
        offline.Step(connected, input="x", output="y")


@pytest.mark.once
def test_a_model_process_refuses_to_connect_to_itself(folder: Path, modules: Path) -> None:
    (modules / "selfish.py").write_text(
        "import batched\n"
        "itself = batched.connect('selfish:call')\n"
        "@batched.dynamically\n"
        "def call(items): return [itself(item) for item in items]\n"
    )
    code = """
        import batched
        try:
            batched.connect("selfish:call", linger_s=1)(0)
        except batched.errors.ServerGone as error:
            print(error)
        """
    assert "this process serves the function" in python(code).stdout


@pytest.mark.once
def test_a_process_run_by_hand_answers_accepted_calls_when_it_is_terminated(folder: Path) -> None:
    short_path = folder.parent
    path = short_path / "hand.socket"
    check = ["serve", "--check", "--socket", str(path)]
    assert main(check) == 1
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(short_path / "notify"))
    notified.settimeout(BOUND)
    process = subprocess.Popen(
        [sys.executable, "-m", "batched", "serve", "served_model:held", "--socket", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(NOTIFY_SOCKET=str(short_path / "notify")),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"held is served on unix:{path}\n"
    assert notified.recv(100) == b"READY=1"
    assert main(check) == 0
    held: Any = batched.connect(f"unix:{path}")
    gate = short_path / "gate"
    futures = [held.submit(str(gate)) for _ in range(100)]
    wait_until(lambda: held.client_stats.sent == 100)
    wait_until(lambda: held.stats.calls == 100)
    process.terminate()
    assert notified.recv(100) == b"STOPPING=1"
    with pytest.raises(BatcherClosed, match="its model process is shutting down"):
        held("")
    gate.touch()
    assert [future.result(BOUND) for future in futures] == [str(gate)] * 100
    assert process.wait(BOUND) == 0
    notified.close()
    with pytest.raises(ServerGone, match="no process listens at"):
        held("")
    assert list(short_path.glob("hand.*")) == []
    held.shutdown()
    process.stdout.close()


@pytest.mark.once
@pytest.mark.timeout(120)
def test_the_files_of_the_page_share_one_model_among_workers(folder: Path, tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    (_, model), (_, app) = blocks((ROOT / "docs/processes.md").read_text(), "python")
    note = "import os\nopen('built.txt', 'a').write(f'{os.getpid()}\\n')\n"
    (tmp_path / "my_model.py").write_text(note + model)
    (tmp_path / "app.py").write_text(app.replace('on_full="raise"', 'on_full="raise", linger_s=1'))
    log, built = tmp_path / "log.txt", tmp_path / "built.txt"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "app:app", "--workers", "2", "--port", "0"],
            stderr=output,
            cwd=tmp_path,
            env=environment(),
        )
    try:
        wait_until(lambda: log.read_text().count("Application startup complete") == 2)
        port = int(re.findall(r"running on http://127.0.0.1:(\d+)", log.read_text())[0])

        def ask(number: int) -> int:
            """Return the status of an answer, which is right if it is no refusal."""
            with closing(HTTPConnection("127.0.0.1", port, timeout=BOUND)) as link:
                link.request("GET", f"/shout/text{number}")
                answer = link.getresponse()
                assert answer.read() == b'"TEXT%d"' % number or answer.status != 200
                return answer.status

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(ask, range(40))) == {200}
            assert len(built.read_text().split()) == 1
            statuses = threads.map(ask, range(100))
            os.kill(int(built.read_text()), signal.SIGTERM)
            assert set(statuses) <= {200, 503}
            wait_until(lambda: ask(0) == 200)
    finally:
        server.terminate()
        server.wait(BOUND)
    assert len(built.read_text().split()) == 2
    wait_until(lambda: not list(folder.iterdir()))
