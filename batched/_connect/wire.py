"""Socket of one end of a connection: any thread sends, one thread at a time reads.

Messages wait in the outbox. One thread sends all of them in one frame, and no other thread waits
for it. If the socket is full, a thread of its own sends the rest.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from contextlib import suppress
from weakref import finalize

from .._runtime.runtime import CANNOT_START
from .._runtime.timer_thread import daemon_thread
from .frames import CHUNK, Channel, Numbered


class Wire:
    """Socket of one end of a connection, and its channel."""

    def __init__(self, link: socket.socket, channel: Channel) -> None:
        self.outbox: deque[Numbered] = deque()
        self.link = link
        self._channel = channel
        self._sending = threading.Lock()
        self.is_full = False  # whether the socket has no room, so that a thread sends the rest
        self._buffer = memoryview(bytearray(CHUNK))
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        finalize(self, link.close).atexit = False

    def send(self, *messages: Numbered) -> None:
        """Send messages."""
        self.outbox.extend(messages)
        self.flush()

    def flush(self) -> None:
        """Send all that waits, unless another thread is sending."""
        while self.outbox and self._sending.acquire(False):
            data = memoryview(b"")
            try:
                outbox = self.outbox
                data = memoryview(
                    self._channel.write([outbox.popleft() for _ in range(len(outbox))])
                )
                while data:
                    data = data[self.link.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self.is_full = True
                try:
                    daemon_thread("send", self._send_rest, data).start()
                except CANNOT_START:  # as when the interpreter exits
                    self._send_rest(data)
                return
            except OSError:  # the other end has gone, as who reads will see
                pass
            except BaseException:  # of a signal handler: a part was sent, of unknown size
                self.end()
                self._sending.release()
                raise
            self._sending.release()

    def _send_rest(self, data: memoryview) -> None:
        with suppress(OSError):
            self.link.sendall(data)
        self.is_full = False
        self._sending.release()
        self.flush()

    def wait_sent(self, seconds: float = -1) -> bool:
        """Wait until all is sent. Return False if the other end reads nothing for `seconds`."""
        while self.is_full or self.outbox:
            if not self._sending.acquire(timeout=seconds):
                return False
            self._sending.release()
            self.flush()
        return True

    def read(self) -> list[Numbered]:
        """Return messages that have arrived, perhaps none yet. Wait for the other end.

        Raises:
            EOFError: the connection has ended, or the time limit of the socket is over.
            ValueError: the other end does not send frames.
        """
        try:
            size = self.link.recv_into(self._buffer)
        except OSError:
            size = 0
        if not size:
            raise EOFError
        return self._channel.read(self._buffer[:size])

    def wait(self, milliseconds: int | None = None) -> bool:
        """Wait until something, or the end, can be read. Return whether it can."""
        return bool(self._poll.poll(milliseconds))

    def end(self) -> None:
        """End the connection, which wakes who reads at either end."""
        with suppress(OSError):  # it has ended already
            self.link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, in this process alone."""
        self.link.close()
