"""Connected functions and their model processes: calls, one process for all, ends of both sides."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Served

import batched
from batched._connect import greeting
from batched._connect.place import History, Place, listen
from batched._core.linger import Eager
from batched.errors import BatcherClosed, QueueFull, ServerGone
from stage import BOUND, Turnstile, python, wait_until

Connect = Callable[..., Any]


def computed(folder: Path) -> list[str]:
    return (folder.parent / "computed.txt").read_text().split()


def test_a_system_without_unix_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "send_fds")
    with pytest.raises(OSError, match=r"^batched\.connect needs Unix sockets"):
        batched.connect("served_model:double")


def test_a_connected_function_is_called_as_the_function_itself(connected: Connect) -> None:
    double = connected()
    assert double(1) == 2
    assert double([1, 2, 3]) == [2, 4, 6]
    assert double([]) == []
    assert double(items="a") == "aa"
    assert double.submit([1]).result(BOUND) == [1, 1]
    assert list(double.map(range(500))) == list(range(0, 1000, 2))
    assert asyncio.run(double.acall(4)) == 8
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        double(1, other=2)


def test_a_connected_function_of_features_pads_in_the_process(connected: Connect) -> None:
    np = pytest.importorskip("numpy")
    shifted = connected("shifted", batched.inference.connect)
    with ThreadPoolExecutor(3) as threads:
        rows = list(threads.map(lambda n: shifted(input_ids=np.arange(n)[None]), (2, 3, 4)))
    assert [row.tolist() for row in rows] == [[[1, 2]], [[1, 2, 3]], [[1, 2, 3, 4]]]


def test_coroutines_await_a_connected_function(connected: Connect) -> None:
    awaited = connected("awaited", batched.aio.connect)

    async def main() -> Any:
        mapped = [result async for result in awaited.map(range(3))]
        return [*await asyncio.gather(*map(awaited, range(3))), *mapped]

    assert asyncio.run(main()) == [0, 1, 2, 0, 1, 2]


def test_clients_that_call_first_at_the_same_moment_share_one_process(
    connected: Connect, folder: Path
) -> None:
    code = """
        import batched, sys
        pid = batched.connect("served_model:pids", linger_s=1)(0)
        print(pid)
        """
    with ThreadPoolExecutor(4) as threads:
        ended = list(threads.map(lambda _: python(code), range(4)))
    assert [each.stderr for each in ended] == [""] * 4
    assert len({each.stdout for each in ended}) == 1
    assert computed(folder) == ["built"]


def test_a_process_ends_with_its_last_client_and_leaves_no_file(
    connected: Connect, folder: Path
) -> None:
    pids = connected("pids", linger_s=0.2)
    pid = pids(0)
    time.sleep(0.5)
    assert pids(0) == pid
    pids.shutdown()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() and not list(folder.iterdir()))


def test_a_function_that_is_dropped_is_no_client_any_more(connected: Connect, folder: Path) -> None:
    pids: Any = batched.connect("served_model:pids", linger_s=0.2)
    pids(0)
    del pids
    wait_until(lambda: not list(folder.iterdir()))


def test_after_the_death_of_the_process_calls_end_and_the_next_call_starts_another(
    connected: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    slowly, pids = connected("slowly"), connected("pids")
    slowly(0)
    future = slowly.submit(60)
    wait_until(lambda: slowly.client_stats.sent == 1)
    pid = slowly._batcher.runtime._connection.peer
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServerGone, match="its process has ended"):
        future.result(BOUND)
    assert (slowly.client_stats.lost, slowly.client_stats.cancelled) == (1, 0)
    assert "served_model:slowly: its process has ended" in caplog.messages
    assert slowly(0) == 0
    assert pids(0) != pid


def test_a_callback_that_waits_for_its_own_thread_is_refused(connected: Connect) -> None:
    double, told = connected(), []

    def call(_: Any) -> None:
        try:
            double(2)
        except RuntimeError as error:
            told.append(str(error))

    double.submit(1).add_done_callback(call)
    wait_until(lambda: bool(told))
    assert "would wait for itself" in told[0]
    assert double(3) == 6


def test_a_process_whose_module_forks_serves_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forking.py").write_text(
        "import os, time, batched\n"
        "if not os.fork():\n"
        "    time.sleep(600)\n"
        "    os._exit(0)\n"
        "@batched.dynamically\n"
        "def call(items): return items\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    call: Any = batched.connect("forking:call", linger_s=0)
    assert call.submit(1).result(BOUND) == 1
    call.shutdown()
    wait_until(lambda: not list(folder.iterdir()))


def test_connections_that_have_ended_leave_no_descriptor(served: Connect) -> None:
    connected = served(batched.dynamically(lambda items: items))
    assert connected(0) == 0
    before = len(os.listdir("/dev/fd"))
    for _ in range(10):
        with connected:
            assert connected(1) == 1
    wait_until(lambda: len(os.listdir("/dev/fd")) <= before)


def test_a_closed_function_refuses_calls_until_it_is_opened_again(connected: Connect) -> None:
    double = connected()
    with double:
        assert double(1) == 2
    with pytest.raises(BatcherClosed, match="was shut down"):
        double(1)
    with double:
        assert double(2) == 4


def test_a_forked_process_has_a_connection_of_its_own(connected: Connect) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    ended = python(
        """
        import batched, os
        double = batched.connect("served_model:double", linger_s=1)
        assert double(1) == 2
        child = os.fork()
        answers = double(range(100)[:] and list(range(100)))
        assert answers == list(range(0, 200, 2)), answers
        if child:
            assert os.waitpid(child, 0)[1] == 0
            assert double(3) == 6
        """,
        "-W",
        "ignore::DeprecationWarning",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_arrays_that_a_forked_process_keeps_are_not_overwritten(connected: Connect) -> None:
    pytest.importorskip("numpy")
    ended = python(
        """
        import os, time
        import numpy as np
        import batched
        first = batched.connect("served_model:arrays", linger_s=1)
        kept = first(np.full(100_000, 1, np.uint8))
        child = os.fork()
        if child == 0:
            time.sleep(0.5)
            os._exit(0 if (kept == 1).all() else 1)
        del kept
        for number in range(2, 8):
            first(np.full(100_000, number, np.uint8))
        assert os.waitpid(child, 0)[1] == 0
        """,
        "-W",
        "ignore::DeprecationWarning",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


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


# --- errors


def test_an_error_arrives_with_its_class_and_the_traceback_of_the_process(served: Connect) -> None:
    @batched.dynamically
    def fail(items: list[int]) -> list[int]:
        raise KeyError("bad") from ValueError("worse")

    connected = served(fail)
    with pytest.raises(KeyError, match="bad") as caught:
        connected(1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("in fail" in note for note in caught.value.__notes__)


def test_an_error_of_an_unknown_class_arrives_as_text(served: Connect) -> None:
    class Local(Exception):
        pass

    @batched.dynamically
    def fail(items: list[int]) -> list[int]:
        raise Local("bad")

    with pytest.raises(batched.errors.RemoteError, match="Local: bad"):
        served(fail)(1)


def test_an_argument_or_result_that_cannot_be_sent_is_an_error_of_its_call(
    served: Connect,
) -> None:
    @batched.dynamically
    def to_lock(items: list[int]) -> list[Any]:
        return [__import__("threading").Lock() if item == 1 else item for item in items]

    connected = served(to_lock)
    with pytest.raises(TypeError, match="cannot be sent to its process"):
        connected(lambda: None)
    with pytest.raises(TypeError, match="returned an object that cannot be sent"):
        connected(1)
    assert connected(2) == 2


# --- queues


def test_calls_beyond_the_credit_wait_in_the_client(served: Connect) -> None:
    turnstile = Turnstile()
    connected = served(batched.dynamically(batch_size=1)(turnstile), max_queue_size=2)
    futures = [connected.submit(number) for number in range(4)]
    wait_until(lambda: connected.client_stats.sent == 4)
    futures += [connected.submit(number) for number in range(4, 6)]
    assert connected.client_stats.waiting == 2
    refusing = connected.with_options(on_full="raise", max_queue_size=1)
    assert refusing.options["on_full"] == "raise"
    assert futures[5].cancel()
    turnstile.let_through(5)
    assert [future.result(BOUND) for future in futures[:5]] == list(range(5))
    assert turnstile.batches == [[number] for number in range(5)]
    assert connected.client_stats.cancelled == 1


def test_a_full_queue_of_the_client_refuses_if_it_is_to(served: Connect) -> None:
    turnstile = Turnstile()
    connected = served(
        batched.dynamically(batch_size=1)(turnstile), credit=1, max_queue_size=1, on_full="raise"
    )
    first = connected.submit(1)
    wait_until(lambda: connected.client_stats.sent == 1)
    second = connected.submit(2)
    with pytest.raises(QueueFull, match="has no room"):
        connected.submit(3)
    time.sleep(0.02)  # the second call waits in this process for at least this time
    turnstile.let_through(2)
    assert (first.result(BOUND), second.result(BOUND)) == (1, 2)
    assert connected.client_stats.queue_wait.p99 > 0.018


def test_an_answered_call_ends_though_the_next_one_cannot_be_sent(
    served: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    turnstile = Turnstile()
    connected = served(batched.dynamically(batch_size=1)(turnstile), credit=1)
    first = connected.submit(1)
    wait_until(lambda: connected.client_stats.sent == 1)
    second = connected.submit(2)

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(connected._batcher.runtime, "_send", fail)
    turnstile.let_through(1)
    assert first.result(BOUND) == 1
    with pytest.raises(ServerGone):
        second.result(BOUND)
    connected.shutdown()


def test_a_refusal_of_a_client_says_when_its_queue_will_have_run(served: Connect) -> None:
    turnstile = Turnstile()
    connected = served(
        batched.dynamically(batch_size=1)(turnstile), credit=1, max_queue_size=1, on_full="raise"
    )
    turnstile.let_through(1)
    connected(0)
    futures = [connected.submit(1)]
    wait_until(lambda: connected.client_stats.sent == 1)
    futures.append(connected.submit(2))
    runtime = connected._batcher.runtime
    runtime._scheduler._rule = Eager()
    runtime._scheduler._rule.finished(1, 2.0, 0, 0)
    with pytest.raises(QueueFull) as refused:
        connected.submit(3)
    assert refused.value.retry_after_s == 4.0
    turnstile.let_through(2)
    assert [future.result(BOUND) for future in futures] == [1, 2]


def test_a_server_without_descriptors_accepts_again_after_a_pause(
    served: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connected = served(batched.dynamically(lambda items: items))
    server = connected.served.server
    listener, tried = server._listener, []

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            tried.append(1)
            if len(tried) == 1:
                raise OSError(errno.EMFILE, "too many open files")
            return listener.accept()

    monkeypatch.setattr("batched._connect.server.ACCEPT_PAUSE", 0.05)
    monkeypatch.setattr(server, "_listener", Full())
    assert connected(1) == 1
    assert caplog.text.count("cannot accept a client: [Errno 24] too many open files") == 1


def test_a_server_ends_though_a_client_does_not_read_its_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(batched.dynamically(lambda items: ["x" * 2**24 for _ in items]))
    connected: Any = batched.connect(served.address)
    assert len(connected(1)) == 2**24
    monkeypatch.setattr("batched._connect.server.PATIENCE", 0.2)
    runtime = connected._batcher.runtime
    reads = threading.Event()
    receive = runtime._connection.receive
    monkeypatch.setattr(
        runtime._connection, "receive", lambda buffer: reads.wait() and receive(buffer)
    )
    future = connected.submit(2)  # its answer fills the socket
    (session,) = served.server.sessions
    wait_until(lambda: session.left > 1)
    served.stop()
    assert "ends, although a client does not read its answers" in caplog.text
    reads.set()
    with pytest.raises(ServerGone):
        future.result(BOUND)


def test_a_cancelled_call_is_not_computed_and_gives_its_credit_back(served: Connect) -> None:
    turnstile = Turnstile()
    connected = served(batched.dynamically(batch_size=1)(turnstile), credit=2)

    async def main() -> None:
        first = asyncio.create_task(connected.acall(1))
        await asyncio.to_thread(wait_until, lambda: turnstile.batches == [[1]])
        second = asyncio.create_task(connected.acall(2))
        await asyncio.to_thread(wait_until, lambda: connected.stats.queue_size == 1)
        second.cancel()
        await asyncio.to_thread(wait_until, lambda: connected.stats.queue_size == 0)
        third = asyncio.create_task(connected.acall(3))
        await asyncio.to_thread(wait_until, lambda: connected.stats.queue_size == 1)
        turnstile.let_through(2)
        assert [await first, await third] == [1, 3]

    asyncio.run(main())
    assert turnstile.batches == [[1], [3]]


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


def test_a_server_that_ends_refuses_new_calls_and_answers_accepted_ones(served: Connect) -> None:
    turnstile = Turnstile()
    connected = served(batched.dynamically(turnstile))
    accepted = connected.submit(1)
    wait_until(lambda: turnstile.batches == [[1]])
    connected.served.stop(wait=False)
    wait_until(lambda: connected.served.server.closing)
    with pytest.raises(BatcherClosed, match="its model process is shutting down"):
        connected(2)
    turnstile.let_through()
    assert accepted.result(BOUND) == 1


def test_statistics_count_the_calls_of_all_clients(served: Connect) -> None:
    connected = served(batched.dynamically(lambda items: items))
    other: Any = batched.connect(connected.served.address)
    assert (connected(1), other(2)) == (1, 2)
    assert (connected.stats.calls, other.stats.calls) == (2, 2)
    assert (connected.client_stats.calls, other.client_stats.calls) == (1, 1)
    other.shutdown()
    assert other.stats.calls == 2
    connected.reset_stats()
    assert connected.stats.calls == connected.client_stats.calls == 0


def test_items_are_prepared_in_the_client(served: Connect) -> None:
    seen: list[Any] = []

    @batched.dynamically
    def collect(items: list[int]) -> list[int]:
        seen.extend(items)
        return items

    def length(text: str) -> int:
        if not text:
            raise ValueError("an empty text")
        return len(text)

    connected = served(collect, prepare=length)
    assert connected("abc") == 3
    assert connected(["a", "ab"]) == [1, 2]
    assert asyncio.run(connected.acall("abcd")) == 4
    assert list(connected.map(["x", "yy"])) == [1, 2]
    with pytest.raises(ValueError, match="an empty text"):
        connected("")
    assert sorted(seen) == [1, 1, 2, 2, 3, 4]
    assert served(collect, prepare="builtins:len")("abc") == 3


# --- shared memory


def test_messages_larger_than_the_buffer_of_the_socket_cross_it(served: Connect) -> None:
    connected = served(batched.dynamically(lambda items: items))
    texts = [bytes([number]) * 5_000_000 for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(connected, texts)) == texts


def test_large_arrays_cross_in_shared_memory_and_may_be_kept(served: Connect) -> None:
    np = pytest.importorskip("numpy")

    @batched.dynamically
    def same(items: list[np.ndarray]) -> list[np.ndarray]:  # type: ignore[name-defined]  # numpy
        return items

    connected = served(same)
    results = []
    for number in range(100):  # twice the memory of the connection
        results.append(connected(np.full(1 << 20, number, np.uint8)))
    for number, result in enumerate(results):
        assert (result == number).all()
        assert result.flags.writeable
        result += 1
    del results, result
    for _ in range(200):
        assert connected(np.ones(100_000, np.float32)).sum() == 100_000


def test_tensors_cross_in_shared_memory(served: Connect) -> None:
    torch = pytest.importorskip("torch")
    connected = served(batched.dynamically(lambda items: items))
    for tensor in (
        torch.arange(100_000, dtype=torch.float32),
        torch.ones(200, 300, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor(5),
        torch.eye(400, dtype=torch.bool).T,
    ):
        assert torch.equal(connected(tensor), tensor)


# --- refusals


def test_a_model_that_cannot_be_built_is_one_sentence_to_every_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(
        "import os, served_model, time\n"
        "served_model.note('tried')\n"
        "time.sleep(0.5)\n"
        "raise OSError('no weights')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(History, "FIRST_AFTER_FAILURE", History.LONGEST)
    clients: list[Any] = [batched.connect("broken:embed") for _ in range(3)]
    futures = [client.submit(0) for client in clients]
    sentence = "broken:embed: cannot start the process of broken:embed: OSError: no weights"
    errors: list[Any] = [future.exception(BOUND) for future in futures]
    assert [str(error) for error in errors] == [sentence] * 3
    with pytest.raises(ServerGone) as caught:
        clients[0](0)
    assert 0 < caught.value.retry_after_s <= 30
    assert computed(folder).count("tried") == 1


def test_a_process_that_dies_while_it_is_built_is_started_three_times(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text(
        "import os, served_model\nserved_model.note('tried')\nos.kill(os.getpid(), 9)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    connected: Any = batched.connect("dying:embed")
    with pytest.raises(ServerGone, match="was killed, .* while it was built, 3 times in a row"):
        connected(0)
    assert computed(folder).count("tried") == 3


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("served_model:undecorated", "is no batched function but function"),
        ("served_model:missing", "has no attribute 'missing'"),
        ("no_such_module:embed", "No module named 'no_such_module'"),
    ],
)
def test_a_function_that_cannot_be_served_is_named(
    folder: Path, address: str, sentence: str
) -> None:
    connected: Any = batched.connect(address)
    with pytest.raises(ServerGone, match=sentence):
        connected(0)


@pytest.mark.parametrize("address", ["embed", "a:b:c", "my model:embed", 3, "a.b"])
def test_a_wrong_address_is_refused_at_once(address: Any) -> None:
    with pytest.raises(ValueError, match="address must be 'module:function' or 'unix:PATH'"):
        batched.connect(address)


@pytest.mark.parametrize("prepare", ["len", "unix:len", "builtins:"])
def test_a_wrong_name_of_a_preparation_is_refused_at_once(prepare: str) -> None:
    with pytest.raises(ValueError, match="prepare must be a function of one item, or 'module:fun"):
        batched.connect("served_model:double", prepare=prepare)


def test_a_function_of_the_main_script_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="put the function into a module, and connect to 'module:"):
        batched.connect("__main__:embed")


def test_settings_of_the_function_are_refused(connected: Connect) -> None:
    with pytest.raises(TypeError, match="'batch_size' is no setting of a client; it belongs to"):
        connected().with_options(batch_size=3)
    with pytest.raises(TypeError, match="'max_queue' is no setting of a client; did you mean"):
        connected().with_options(max_queue=3)


def test_the_wrong_kind_of_connection_is_refused(served: Connect) -> None:
    with pytest.raises(ServerGone, match=r"is a function of items; connect to it by batched\.conn"):
        served(batched.dynamically(lambda items: items), batched.inference.connect)(ids=[1])


def test_another_version_is_refused(served: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = served(batched.dynamically(lambda items: items))
    send = greeting._send

    def send_old(link: Any, message: dict[str, Any]) -> Any:
        old = {"version": "0.0.1"} if "features" in message and "name" not in message else {}
        return send(link, {**message, **old})

    monkeypatch.setattr(greeting, "_send", send_old)
    with pytest.raises(ServerGone, match=r"has batched .*, and this process batched 0\.0\.1"):
        connected(1)


def test_a_process_of_another_user_is_refused(
    served: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = served(batched.dynamically(lambda items: items))
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(ServerGone, match="only processes of one user may share"):
        connected(1)


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    connected: Any = batched.connect("served_model:double")
    with pytest.raises(ServerGone, match="must be a folder of user .* that nobody else can read"):
        connected(1)


@pytest.mark.parametrize("name", ["notes.txt", "folder", "link"])
def test_a_server_takes_no_path_of_another_file(short_path: Path, name: str) -> None:
    (short_path / "notes.txt").write_text("mine")
    (short_path / "folder").mkdir()
    (short_path / "link").symlink_to("notes.txt")
    with pytest.raises(ServerGone, match=f"{name} exists and is no socket; choose another path"):
        listen(short_path / name)
    assert sorted(path.name for path in short_path.iterdir()) == ["folder", "link", "notes.txt"]
    assert (short_path / "notes.txt").read_text() == "mine"


def test_a_server_run_by_hand_leaves_all_files_but_its_socket(short_path: Path) -> None:
    locks = [short_path / name for name in ("uv.lock", "uv.sock.lock")]
    for lock in locks:
        lock.write_text("mine")
    path = short_path / "uv.sock"
    listen(path).close()
    assert path.is_socket()
    Place(path).leave()
    assert sorted(short_path.iterdir()) == sorted(locks)
    assert [lock.read_text() for lock in locks] == ["mine", "mine"]


def test_only_its_user_may_use_the_socket_of_a_server(short_path: Path) -> None:
    before = os.umask(0)
    try:
        listen(short_path / "a.socket").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((short_path / "a.socket").stat().st_mode) & 0o077 == 0


def test_a_stale_socket_is_replaced(connected: Connect, folder: Path) -> None:
    double = connected()
    assert double(1) == 2
    pid = double._batcher.runtime._connection.peer
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    wait_until(lambda: double._batcher.runtime._connection is None)
    listen(Place.at("served_model:double").path).close()
    assert double(2) == 4


def test_a_full_disk_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected: Any = batched.connect("served_model:double")

    def full(path: Any, *_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("batched._connect.place.os.open", full)
    with pytest.raises(ServerGone, match=r"no space is left for .*\.lock"):
        connected(1)


def test_a_path_that_is_too_long_for_a_socket_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    connected: Any = batched.connect("served_model:double")
    with pytest.raises(ServerGone, match="the path of the socket is longer than 103 bytes"):
        connected(1)


def test_an_offline_run_refuses_a_connected_function() -> None:
    offline = pytest.importorskip("batched.offline")
    connected: Any = batched.connect("served_model:double")
    with pytest.raises(TypeError, match="runs in another process, whose code a run cannot compare"):
        offline.Step(connected, input="x", output="y")


def test_a_model_process_refuses_to_connect_to_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "selfish.py").write_text(
        "import batched\n"
        "itself = batched.connect('selfish:call')\n"
        "@batched.dynamically\n"
        "def call(items): return [itself(item) for item in items]\n"
    )
    code = f"""
        import batched, sys
        sys.path.append({str(tmp_path)!r})
        try:
            batched.connect("selfish:call", linger_s=1)(0)
        except batched.errors.ServerGone as error:
            print(error)
        """
    assert "this process serves the function" in python(code).stdout


# --- run by hand


def test_a_process_run_by_hand_answers_accepted_calls_when_it_is_terminated(
    folder: Path, short_path: Path
) -> None:
    path = short_path / "hand.socket"
    support = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "batched", "serve"]
    check = [*command, "--check", "--socket", str(path)]
    assert subprocess.run(check, check=False, capture_output=True).returncode == 1
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(short_path / "notify"))
    notified.settimeout(BOUND)
    process = subprocess.Popen(
        [*command, "served_model:held", "--socket", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": support,
            "NOTIFY_SOCKET": str(short_path / "notify"),
        },
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"held is served on unix:{path}\n"
    assert notified.recv(100) == b"READY=1"
    assert subprocess.run(check, check=False, capture_output=True).returncode == 0
    held: Any = batched.connect(f"unix:{path}")
    gate = short_path / "gate"
    futures = [held.submit(str(gate)) for _ in range(100)]
    wait_until(lambda: held.client_stats.sent == 100)
    assert held.stats.calls == 100
    process.terminate()
    assert notified.recv(100) == b"STOPPING=1"
    gate.touch()
    assert [future.result(BOUND) for future in futures] == [str(gate)] * 100
    assert process.wait(BOUND) == 0
    notified.close()
    wait_until(lambda: held._batcher.runtime._connection is None)
    with pytest.raises(ServerGone, match="no process listens at"):
        held("")
    assert list(short_path.glob("hand.*")) == []
    held.shutdown()
    process.stdout.close()
