"""Connected functions: batched functions that run in a model process of their own.

`batched.connect("my_model:embed")` is called as `my_model.embed` would be, and the module is not
imported here. The four classes differ as the four decorators do.
"""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Never, TypeVar

from .._collate.features.settings import FeatureSettings
from .._collate.items import ItemCollator
from .._core.policy import OnFull
from .._execution.execution import Execution
from .._function.batched import AsyncBatched, Batched, BatchedCallable
from .._function.function import BatchFunction, Parts
from .._function.inference import AsyncBatchedInference, BatchedInference
from .._function.map import Ahead
from .._function.settings import Options
from .._runtime.recorder import Recorder
from ..stats import Stats
from . import UNIX, check_system

if TYPE_CHECKING:
    from typing_extensions import TypeVar as Defaulted

    T = Defaulted("T", default=Any)
    U = Defaulted("U", default=Any)
else:
    T = TypeVar("T")
    U = TypeVar("U")

_ADDRESS: Final = re.compile(r"unix:.+|(?!.*\.py:)[^\W\d][\w.]*:[^\W\d][\w.]*")
SETTINGS: Final = ("max_queue_size", "on_full", "queue_timeout_ms", "prepare", "prepare_threads")
"""Settings of a client, besides its name. Other settings belong to the function."""


@dataclass(frozen=True)
class ClientStats:
    """Snapshot of the calls of one client process."""

    waiting: int
    """Calls that wait for the connection."""
    blocked: int
    """Calls that wait until fewer are unanswered (`max_queue_size`)."""
    sent: int
    """Calls that were sent and have no answer yet."""
    calls: int
    """Accepted calls."""
    cancelled: int
    """Calls that ended unanswered: cancelled by the caller or at shutdown."""
    lost: int
    """Calls that ended with `ServerGone`."""
    timed_out: int
    """Calls that ended with `QueueTimeout`."""
    rejected: int
    """Calls refused because the function was closed, or had too many unanswered calls."""


@dataclass(frozen=True)
class RemoteFunction:
    """The function that a client stands for, as a function of a list."""

    address: str
    linger_s: float
    features: bool

    def dial(self) -> Any:
        """Return a new connection to the model process, which is started if it does not run."""
        from .starting import connect

        return connect(self.address, {"features": self.features}, self.linger_s)

    def find(self, place: Any = None) -> Any:
        """Return a new connection to the process at `place`, or None if it does not run.

        By default the place is that of the address.
        """
        from .starting import find

        return find(self.address, {"features": self.features}, place)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self.address} is in another process; call the connected function")


@dataclass(frozen=True)
class ClientOptions(Options):
    """Settings of a client."""

    def settings(self) -> dict[str, Any]:
        """Return every setting by name."""
        every = super().settings()
        return {name: every[name] for name in (*SETTINGS, "name")}

    def _hint(self, unknown: str, known: Iterable[str]) -> str:
        if unknown in super().settings():
            return " of a client; it belongs to the function"
        return super()._hint(unknown, (*known, "linger_s"))


@dataclass(frozen=True)
class ClientFunction(BatchFunction):
    """A function in another process, and the settings of the client."""

    @property
    def runtime(self) -> Any:
        """Class of its runtimes."""
        from .client import ClientRuntime

        return ClientRuntime

    def parts(self, *, bound: bool) -> Parts:
        """Return the parts of a client."""
        del bound
        from .client import ClientParser

        parser: Any = ClientParser(self.name, self.options.policy.queue_timeout_ms)
        return Parts(self, None, parser, Execution(self.func, ItemCollator(self.name)))


class _Connected(BatchedCallable[T, U, ...]):
    """A connected function, without the calls that differ between threads and coroutines."""

    _features = False

    def __init__(
        self,
        address: str,
        *,
        prepare: Callable[[Any], Any] | str | None = None,
        prepare_threads: int = 8,
        max_queue_size: int | None = None,
        on_full: OnFull = "wait",
        queue_timeout_ms: float | None = None,
        linger_s: float = 60.0,
        name: str | None = None,
        **unknown: Never,
    ) -> None:
        """Connect to a batched function, at the first call.

        The first call of any process of this user starts the model process, in the environment and
        the folder of the caller. The process ends `linger_s` after its last client has gone.

        Args:
            address: `module:function`; or `unix:PATH`, the socket of a process that
                `python -m batched serve` runs.
            prepare: function of one item that runs in this process before the item is sent, or
                `module:function`.
            prepare_threads: most threads that call `prepare`, for calls from event loops, list
                calls and `map`.
            max_queue_size: most calls of this process without an answer; a list call counts once.
                None: no limit.
            on_full: treatment of a further call: "wait" or "raise" (`QueueFull`).
            queue_timeout_ms: longest time that a call waits in the model process until any item of
                it begins to run (ms).
            linger_s: time for which the process waits for clients after the last one (s).
            name: name in messages and of threads; by default the address.

        Raises:
            TypeError, ValueError: an argument cannot work.
            OSError: this system has no Unix sockets.
            ImportError: `prepare` names a module that cannot be imported.
        """
        check_system("batched.connect")
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise ValueError(f"address must be 'module:function' or 'unix:PATH', got {address!r}")
        if address.startswith("__main__:"):
            raise ValueError(
                "the model process cannot import the main script or a notebook: put the function "
                f"into a module, and connect to 'module:{address.removeprefix('__main__:')}'"
            )
        if not isinstance(linger_s, Real) or not linger_s >= 0:
            raise ValueError(f"linger_s must be a number of seconds, at least 0, got {linger_s!r}")
        if isinstance(prepare, str):
            prepare = pkgutil.resolve_name(prepare)
        features = FeatureSettings() if self._features else None
        options = ClientOptions(features=features).updated(
            {
                "prepare": prepare,
                "prepare_threads": prepare_threads,
                "max_queue_size": max_queue_size,
                "on_full": on_full,
                "queue_timeout_ms": queue_timeout_ms,
                "name": name or address,
                **unknown,
            }
        )
        if address.startswith(UNIX):
            path = os.path.expanduser(address.removeprefix(UNIX))
            address = UNIX + os.path.abspath(path)
        remote = RemoteFunction(address, linger_s, self._features)
        super().__init__(ClientFunction(remote, "static", coroutine=False, options=options))

    def _ahead(
        self, buffersize: int | None, timeout: float | None, return_exceptions: bool
    ) -> Ahead[T]:
        if buffersize is None:
            buffersize = self._batcher.runtime.most_ahead
        return super()._ahead(buffersize, timeout, return_exceptions)

    @property
    def stats(self) -> Stats:
        """Counts and times of the function in the model process, over all its clients.

        Raises:
            ServerGone: the process does not answer.
        """
        stats: Stats | None = self._batcher.runtime.ask()
        return stats or Recorder().snapshot(0, 0, 0)

    @property
    def client_stats(self) -> ClientStats:
        """Counts of the calls of this process so far, as a frozen snapshot."""
        own = super().stats
        return ClientStats(
            own.queue_size,
            own.blocked,
            own.in_flight,
            own.calls,
            own.cancelled,
            own.lost,
            own.timed_out,
            own.rejected,
        )

    def reset_stats(self) -> None:
        """Set all statistics to zero, of the model process and of this one."""
        super().reset_stats()
        self._batcher.runtime.ask(reset=True)


class Connected(_Connected[T, U], Batched[T, U, ...]):
    """A function in a model process, which threads call and wait for."""


class AsyncConnected(_Connected[T, U], AsyncBatched[T, U, ...]):
    """A function in a model process, which coroutines await."""


class ConnectedInference(_Connected[Any, U], BatchedInference[U, ...]):
    """A function of features in a model process, which threads call and wait for."""

    _features = True


class AsyncConnectedInference(_Connected[Any, U], AsyncBatchedInference[U, ...]):
    """A function of features in a model process, which coroutines await."""

    _features = True
