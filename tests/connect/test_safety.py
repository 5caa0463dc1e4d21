"""What other users, other programs and broken clients cannot do to a model process."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from served import Served, dialed, environment

import batched
from batched._connect import frames
from batched._connect.greeting import greet
from batched._connect.memory import Incoming, new_file
from batched._connect.place import Place
from batched._connect.wire import Wire
from batched.errors import ServerGone
from stage import BOUND, python, wait_until

Connect = Callable[..., Any]

pytestmark = pytest.mark.once


def test_a_server_takes_no_path_of_another_file(short_path: Path) -> None:
    (short_path / "notes.txt").write_text("mine")
    (short_path / "folder").mkdir()
    (short_path / "link").symlink_to("notes.txt")
    for name in ("notes.txt", "folder", "link"):
        with pytest.raises(ServerGone, match=f"{name} exists and is no socket; choose another"):
            Place(short_path / name).listen()
    assert sorted(path.name for path in short_path.iterdir()) == ["folder", "link", "notes.txt"]
    assert (short_path / "notes.txt").read_text() == "mine"


def test_a_server_run_by_hand_leaves_all_files_but_its_socket(short_path: Path) -> None:
    locks = [short_path / name for name in ("uv.lock", "uv.sock.lock")]
    for lock in locks:
        lock.write_text("mine")
    place = Place(short_path / "uv.sock")
    place.listen().close()
    assert stat.S_IMODE(place.path.stat().st_mode) & 0o077 == 0
    place.leave()
    assert sorted(short_path.iterdir()) == sorted(locks)
    assert [lock.read_text() for lock in locks] == ["mine", "mine"]


def test_of_servers_that_start_together_one_listens_and_keeps_its_socket(short_path: Path) -> None:
    path = short_path / "a.socket"
    refused: list[str] = []

    def listen(place: Place) -> socket.socket | None:
        try:
            return place.listen()
        except ServerGone as error:
            refused.append(str(error))
            return None

    places = [Place(path) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        listeners = list(threads.map(listen, places))
    assert refused == [f"another process listens at {path}"] * 7
    for place, bound in zip(places, listeners, strict=True):
        if bound is None:
            place.leave()
    assert path.is_socket()
    [listener] = filter(None, listeners)
    listener.close()


def test_a_lock_of_others_is_refused(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = short_path / "a.socket.lock"
    lock.symlink_to(short_path / "made")
    with pytest.raises(OSError, match=r"a\.socket\.lock"):
        Place(short_path / "a.socket").listen()
    assert not (short_path / "made").exists()
    lock.unlink()
    lock.touch()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"a\.socket\.lock is no lock of this user"):
        Place(short_path / "a.socket").listen()


def test_a_folder_in_which_others_may_replace_files_is_refused(short_path: Path) -> None:
    place = Place(short_path / "a.socket")
    for mode in (0o777, 0o770):
        short_path.chmod(mode)
        with pytest.raises(ServerGone, match=r"other users may write to .* such as /run/name"):
            place.listen()
        assert not place.path.exists()
    short_path.chmod(0o1777)
    place.listen().close()
    assert place.path.exists()


def test_a_folder_of_others_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    refused = "must be a folder of user .* that nobody else can read"
    with pytest.raises(ServerGone, match=refused):
        Place.at("served_model:double")
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(ServerGone, match=refused):
        Place.at("served_model:double")


def test_another_user_is_refused(served: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = served()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(ServerGone, match="only processes of one user may share"):
        connected(1)


def test_silent_and_dripping_connections_block_nobody_and_are_closed(
    served: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batched._connect.server.GREETING_TIME", 0.2)
    connected = served()
    links = [dialed(connected) for _ in range(40)]
    for link in links[::2]:
        link.send(b"{")
    assert connected(1) == 1
    for link in links:
        with link:
            while link.recv(4096):
                pass


def test_a_connection_without_a_greeting_is_closed(served: Connect) -> None:
    connected = served()
    for line in (b"x" * 5000, b"not json\n"):
        with dialed(connected) as link, suppress(ConnectionResetError):
            link.send(line)
            while link.recv(4096):
                pass
        assert connected(1) == 1


def test_a_malformed_frame_closes_its_connection_with_one_line(
    served: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connected = served()
    assert connected(1) == 1
    with dialed(connected) as link:
        greet(link, {}, BOUND)
        link.send(b"\xff" * 2000)
        assert link.recv(1) == b""
    assert caplog.text.count("closed a connection: a frame of") == 1
    assert connected(2) == 2


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory without a name here")
def test_memory_that_could_shrink_is_refused() -> None:
    file = os.memfd_create("batched", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 26)
    with pytest.raises(ValueError, match="not sealed"):
        Incoming(file)
    with new_file() as sealed, pytest.raises(PermissionError):
        sealed.truncate(0)


def test_a_client_that_does_not_read_is_not_read_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("batched._connect.server.PATIENCE", 0.2)
    served = Served(batched.dynamically(lambda items: ["x" * 2**22 for _ in items]))
    connected: Any = batched.connect(served.address)
    connected.served = served
    with dialed(connected) as link:
        wire = Wire(link, greet(link, {}, BOUND)[1])
        for number in range(100):
            wire.send((number, frames.CALL, frames.pickled(((1,), {}, True, None))))
        wait_until(lambda: len(served.server.sessions) == 1)
        [session] = served.server.sessions
        wait_until(lambda: session.wire.is_full)
        assert len(connected(1)) == 2**22
        served.stop()
    assert "ends, although a client does not read its answers" in caplog.text


def test_a_script_with_piped_output_ends_at_once(folder: Path) -> None:
    code = 'import batched; print(batched.connect("served_model:pids", linger_s=600)(0))'
    ended = python(code)  # returns once nobody has its output open any more
    pid = int(ended.stdout)
    assert Path(f"/proc/{pid}").exists()
    log = os.readlink(f"/proc/{pid}/fd/2")
    assert Path(log).parent == folder
    os.kill(pid, 15)
    wait_until(lambda: not list(folder.iterdir()))


def test_the_log_of_a_process_that_died_is_named(modules: Path) -> None:
    (modules / "crashing.py").write_text(
        "import os, sys, batched\n"
        "@batched.dynamically\n"
        "def call(items):\n"
        "    if items == ['die']:\n"
        "        print('the last words', file=sys.stderr, flush=True)\n"
        "        os._exit(1)\n"
        "    return items\n"
    )
    start = 'import batched; batched.connect("crashing:call", linger_s=600)(0)'
    assert python(start).returncode == 0
    call: Any = batched.connect("crashing:call", linger_s=600)
    with pytest.raises(ServerGone, match=r"its process has ended; its log is (.*)\.log") as gone:
        call("die")
    log = str(gone.value).rpartition(" ")[2]
    assert Path(log).read_text() == "the last words\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_mutation_of_frames_or_greetings_ends_or_fills_a_process(short_path: Path) -> None:
    path = short_path / "a.socket"
    command = [sys.executable, "-m", "batched", "serve", "served_model:same", "--socket", str(path)]
    chance, trials = random.Random(0), int(os.environ.get("FUZZ", "240000"))
    greeting = b'{"version": "%s"}\n' % batched.__version__.encode()
    message = frames.pickled(((1,), {}, True, None))
    whole = frames.Channel().write([(1, frames.CALL, message), (2, frames.CANCEL, message)])
    log = short_path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, env=environment()
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()

        def resident() -> int:
            return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])

        for trial in range(trials):
            is_greeting = trial % 8 == 0
            data = bytearray(greeting if is_greeting else whole)
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(len(data))
                data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(path))
                link.sendall(bytes(data) if is_greeting else greeting + bytes(data))
            if trial == trials // 10:
                before = resident()
        call: Any = batched.connect(f"unix:{path}")
        assert call.submit(1).result(BOUND) == 1
        assert resident() < 1.2 * before
        call.shutdown()
        process.terminate()
    assert len(log.read_text().splitlines()) <= 2 * trials
