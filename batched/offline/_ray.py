"""Ray: an engine of which each worker is an actor of a cluster.

The driver forms batches, finds bad rows, learns what fits in memory, and commits, as with any other
engine; only the function computes elsewhere. So a run goes on where one with another engine ended.
Rules of the actors of a step:

1. Each builds the function once; of a class, one instance. They work as they come: those that are
   there do not wait for others.
2. `max_in_flight` batches are on their way to each, so that it never waits for the driver. It runs
   one after another, in the order in which they were sent.
3. One that is lost, with its process or its node, is replaced. The calls that were on their way to
   it are made again, each with no other beside it, on one that has just answered. What loses an
   actor then is at fault itself: so a row that kills its process costs no other row, and neither
   does a node that goes. If Ray ended it as memory ran out, that is a memory error.
4. Once a step begins, each other one reserves room by a first actor; until all have theirs, none
   has a second one. Steps that held all CPUs would starve the others.
5. It is an error if a step has none for `startup_timeout_s`.
6. They end with the run, and with the driver.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
import socket
import sys
import textwrap
import threading
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Final

from ..errors import RemoteError, TimeLimitExceeded, WorkerDied
from ._places import BUILDS, BuildError, PlaceClosed, WorkerKilled
from ._serving import Server, pickled
from ._step import check_amount, check_whole

_logger = logging.getLogger("batched")

_POLL: Final = 0.5
"""Longest time between two looks at whether a wait is to end (s)."""

_INLINE: Final = 100_000
"""Bytes of the largest message that Ray sends with its call; others it stores first."""

_LATEST: Final = 60.0
"""Time for which the actors of a run that has ended are still waited for (s)."""

_ENDING: Final = 10.0
"""Longest time for all actors to be ended (s)."""

_PATIENCE: Final = 10.0
"""Time without an actor after which that is logged (s)."""


@dataclass(frozen=True)
class Ray:
    """An engine for `run`: functions compute in actors of a Ray cluster, `workers` of them for each
    step. Coroutine functions stay with the driver, on its loop.

    Needs the extra `ray`, and the same versions of Python, Ray and this library on all nodes. The
    driver is part of the cluster at `address`, or of the one that it runs in; without either it
    starts one on this machine.

    Raises:
        TypeError, ValueError: a setting is of the wrong type or out of its range.
    """

    address: str | None = None
    """Address of the cluster, as `ray.init` takes it."""
    num_cpus: float = 1
    """CPUs of each actor; a part of one is possible. Of steps that do not say."""
    num_gpus: float = 0
    """GPUs of each actor, likewise."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources of each actor, by name."""
    runtime_env: Mapping[str, Any] | None = None
    """What actors need on their nodes, as Ray takes it: packages, files, variables."""
    startup_timeout_s: float = 300
    """Longest time in which a step has no actor (s): for nodes, and what they need, to come."""
    max_in_flight: int = 2
    """Batches sent to an actor and not yet answered; at least 1."""

    _env_of_jobs: ClassVar[dict[str, Mapping[str, Any] | None]] = {}
    """What `join` gave to all that each of Ray's jobs starts."""

    def __post_init__(self) -> None:
        for name, value in (
            ("num_cpus", self.num_cpus),
            ("num_gpus", self.num_gpus),
            *self.resources.items(),
        ):
            check_amount(f"Ray: {name}", value)
        check_amount("Ray: startup_timeout_s", self.startup_timeout_s)
        check_whole("Ray: max_in_flight", self.max_in_flight)

    def check(self) -> None:
        """Raises an ImportError if the extra is missing."""
        _import_ray()

    def join(self) -> None:
        """Makes this process part of the cluster, unless it is part of one already.

        Raises:
            ConnectionError: there is no cluster at the address.
        """
        ray = _import_ray()
        if ray.is_initialized():
            return
        # Ray itself would wait for many minutes, without a look at Ctrl-C
        host, mark, port = (self.address or "").removeprefix("ray://").rpartition(":")
        if mark and port.isdecimal():
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
            except OSError as error:
                raise ConnectionError(f"no Ray answers at {self.address} ({error})") from error
        env = deepcopy(self.runtime_env)  # which Ray changes
        ray.init(address=self.address, runtime_env=env, logging_level=logging.WARNING)
        self._env_of_jobs[ray.get_runtime_context().get_job_id()] = self.runtime_env

    def actor_env(self) -> Mapping[str, Any] | None:
        """What an actor needs beyond what all that this program starts have."""
        job = _import_ray().get_runtime_context().get_job_id()
        given = self._env_of_jobs.get(job)
        return None if self.runtime_env == given else deepcopy(self.runtime_env)

    def text(self) -> str:
        """What each actor asks for, for people."""
        needs = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}
        return ", ".join(f"{name}={value:g}" for name, value in needs.items() if value) or "nothing"


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "engine=offline.Ray(...) needs Ray: pip install 'batched-dynamically[ray]'"
        ) from error
    return ray


class RemoteServer:
    """The function of a step in an actor. Messages are pickled here and by the driver, not by Ray,
    so that what cannot be pickled, or read, is an answer like any other. Modules are looked for
    where the driver looks, too.
    """

    def __init__(self, name: str, payload: bytes, path: list[str]) -> None:
        sys.path += [each for each in path if each not in sys.path]
        self._name = name
        self._server = Server(name, payload)

    def __repr__(self) -> str:
        return self._name  # in Ray's logs

    def join(self) -> None:
        """Nothing; that it is answered tells that the actor is there."""

    def build(self) -> RemoteError | None:
        return self._server.build()

    def answer(self, message: bytes) -> bytes:
        server = self._server
        try:
            args, kwargs = pickle.loads(message)
        except Exception as error:
            return pickled(server.unreadable(error))
        try:
            return pickled(server.answer(args, kwargs))
        except Exception as error:
            return pickled(server.unsendable(error))


class _Actor:
    """An actor, as the driver knows it."""

    def __init__(self, handle: Any, deaths: int) -> None:
        self.handle = handle
        self.deaths = deaths  # of those before it, in a row, that were never ready
        self.joined = False  # it has its resources, and builds the function
        self.ready = False
        self.calls: list[object] = []  # on their way, in their order
        self.reserved = False  # for one call, beside which there is no other
        self.freed = 0.0  # moment of its last answer (s)


class _LostError(Exception):
    """The actor of a call is gone, or its answer; says why."""

    def __init__(self, error: Exception) -> None:
        from ray.exceptions import OutOfMemoryError

        super().__init__(_reason(error))
        self.kind = WorkerKilled if isinstance(error, OutOfMemoryError) else WorkerDied


class Actors:
    """The actors of one step: a place that several threads share."""

    _all: ClassVar[set[Actors]] = set()
    """Those of all steps that began or are to, of which each has one before any has more."""

    def __init__(
        self, engine: Ray, name: str, payload: bytes, count: int, timeout_s: float | None
    ) -> None:
        self._engine = engine
        self._name = name
        self._payload: Any = payload
        self._count = count
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards what follows
        self._actors: list[_Actor] = []
        # those that come, by what they will answer, which is that they are there, or built
        self._comings: dict[Any, tuple[_Actor, bool]] = {}
        self._users = 0
        self._retired = False  # no further call begins
        self._ended: BaseException | None = None  # why no call is taken
        self._watcher = threading.Thread(target=self._watch, name="batched-ray", daemon=True)

    def reserve(self) -> None:
        """Has the first one come."""
        with self._changed:
            if not self._actors and self._ended is None:
                self._payload = _import_ray().put(self._payload)
                self._create(deaths=0)
                self._all.add(self)
                self._watcher.start()

    def start(self) -> None:
        """Has all of them come; returns once one is ready.

        Raises:
            BuildError: the function cannot be built, or the cluster has no room.
        """
        with self._changed:
            self._users += 1
            self._check()
            self.reserve()
            self._create_rest()
            while not any(actor.ready for actor in self._actors):
                self._wait()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the function.

        Raises:
            RemoteError: what it raised.
            TimeLimitExceeded: it took too long, and its actor was ended.
            WorkerDied: it lost two actors, the second one with nothing beside it.
            BuildError: it had to be built again, and could not; or the cluster has no room now.
            PlaceClosed: `kill` was called.
        """
        message: Any = pickled((args, kwargs))
        if len(message) > _INLINE:
            message = _import_ray().put(message)
        try:
            answer = self._ask(message, alone=False)
        except _LostError:
            try:
                answer = self._ask(message, alone=True)
            except _LostError as lost:
                raise lost.kind(f"the actor of {self._name} was lost: {lost}") from None
        if isinstance(answer, RemoteError):
            raise answer
        return answer[0]

    def retire(self) -> None:
        with self._changed:
            self._retired = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._users -= 1
            if not self._users:
                self._end(PlaceClosed())

    def kill(self) -> None:
        with self._changed:
            self._end(PlaceClosed())
        # no thread of ours may be within Ray when it is shut down
        if self._watcher.ident is not None:
            self._watcher.join(_ENDING)

    # a call

    def _ask(self, message: Any, *, alone: bool) -> Any:
        call = object()
        while True:
            actor, reference = self._take(call, message, alone)
            try:
                if alone:
                    try:
                        self._await(actor, call, actor.handle.join.remote(), None)
                    except _LostError:  # it went while it had nothing to do
                        continue
                    reference = actor.handle.answer.remote(message)
                return pickle.loads(self._await(actor, call, reference, self._timeout_s))
            finally:
                with self._changed:
                    actor.calls.remove(call)
                    actor.freed = perf_counter()
                    if alone:
                        actor.reserved = False
                    self._changed.notify_all()

    def _take(self, call: object, message: Any, alone: bool) -> tuple[_Actor, Any]:
        """The actor that has least to do, as soon as a call may be sent; sends it, unless it is to
        be `alone`.
        """
        with self._changed:
            while True:
                self._check()
                free = [actor for actor in self._actors if actor.ready and not actor.reserved]
                actor = min(free, key=lambda each: len(each.calls), default=None)
                if actor is None:
                    self._wait()
                elif alone:
                    actor.reserved = True  # or others would come between for ever
                    while actor.calls and actor.ready:
                        self._wait()
                    if actor.ready:
                        break
                elif len(actor.calls) < self._engine.max_in_flight:
                    break
                else:
                    self._wait()
            # in the order of `calls`, which no other may join if this is alone
            reference = None if alone else actor.handle.answer.remote(message)
            actor.calls.append(call)
            return actor, reference

    def _await(self, actor: _Actor, call: object, reference: Any, limit: float | None) -> Any:
        """What an actor answers; `limit` is for the call, not for what goes over the network."""
        import ray
        from ray.exceptions import (
            GetTimeoutError,
            ObjectLostError,
            OutOfMemoryError,
            RayActorError,
        )

        sent = perf_counter()
        while limit is not None:
            left = math.inf
            if actor.calls[0] is call:  # it runs
                left = max(sent, actor.freed) + limit - perf_counter()
            if ray.wait([reference], timeout=max(0.0, min(left, _POLL)), fetch_local=False)[0]:
                break
            self._check_end()
            if left <= 0:
                self._replace(actor)
                raise TimeLimitExceeded(
                    f"{self._name} took longer than timeout_s={limit:g}, and was ended"
                )
        while True:
            try:
                return ray.get(reference, timeout=_POLL)
            except GetTimeoutError:
                self._check_end()
            except (RayActorError, OutOfMemoryError) as error:
                self._replace(actor)
                raise _LostError(error) from None
            except ObjectLostError as error:  # with the node that had the answer
                raise _LostError(error) from None

    def _wait(self) -> None:
        """Waits, with the lock, for any change."""
        self._changed.wait(_POLL)
        self._check()

    def _check(self) -> None:
        """Raises why no call may begin any more."""
        self._check_end()
        if self._retired:
            raise PlaceClosed

    def _check_end(self) -> None:
        """Raises why no call is answered any more."""
        if self._ended is not None:
            raise self._ended

    # actors

    def _create(self, deaths: int) -> None:
        engine = self._engine
        remote: Any = _import_ray().remote(RemoteServer)
        handle = remote.options(
            num_cpus=engine.num_cpus,
            num_gpus=engine.num_gpus,
            resources=dict(engine.resources),
            runtime_env=engine.actor_env(),
            max_restarts=0,  # it is replaced here
        ).remote(self._name, self._payload, sys.path)
        actor = _Actor(handle, deaths)
        self._actors.append(actor)
        self._comings[handle.join.remote()] = actor, False
        self._comings[handle.build.remote()] = actor, True

    def _replace(self, actor: _Actor) -> None:
        """Has another one come for `actor`, which is gone, or is to go."""
        with self._changed:
            self._check_end()
            if actor not in self._actors:
                return
            self._actors.remove(actor)
            deaths = 0 if actor.ready else actor.deaths + 1
            actor.ready = False
            self._comings = {
                answer: coming for answer, coming in self._comings.items() if coming[0] is not actor
            }
            _kill(actor.handle)
            self._create(deaths)
            self._changed.notify_all()

    def _end(self, why: BaseException) -> None:
        """Takes no more calls, with the lock."""
        self._all.discard(self)
        if self._ended is None:
            self._ended = why
            self._changed.notify_all()

    def _watch(self) -> None:
        """Notes which actors come, and ends all of them in the end; in a thread of its own."""
        try:
            since, told = perf_counter(), False  # time without one that is there
            while self._ended is None:
                self._note_comings()
                self._create_rest()
                now = perf_counter()
                if self._is_there:
                    since, told = now, False
                elif now - since > self._engine.startup_timeout_s:
                    raise TimeoutError(self._no_room(now - since))
                elif now - since > _PATIENCE and not told:
                    told = True
                    _logger.warning("%s; waiting for room", self._no_room(now - since))
        except BaseException as error:
            with self._changed:
                self._end(BuildError(error))
        self._end_actors()

    def _end_actors(self) -> None:
        """Ends all actors; those that are still to come as soon as they are there."""
        late = [actor.handle for actor in self._actors if not actor.joined]
        if late:
            with suppress(Exception):  # of a cluster that is gone
                _import_ray().remote(_end_late).options(num_cpus=0).remote(late)
        for actor in self._actors:
            if actor.joined:
                _kill(actor.handle)

    @property
    def _is_there(self) -> bool:
        """Whether an actor has its resources."""
        return any(actor.joined for actor in self._actors)

    def _create_rest(self) -> None:
        """Has all actors come, if there is work for them, and each other step has its first one."""
        if self._users and all(each is self or each._is_there for each in [*self._all]):
            with self._changed:
                while len(self._actors) < self._count and self._ended is None:
                    self._create(deaths=0)

    def _note_comings(self) -> None:
        """Waits for answers of actors that come, for a moment.

        Raises:
            RemoteError: one cannot build the function.
            WorkerDied: one after the other dies before it has.
        """
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError

        with self._changed:
            comings = [*self._comings]
            if not comings:
                self._changed.wait(_POLL)
                return
        for answer in ray.wait(comings, timeout=_POLL)[0]:
            with self._changed:
                actor, is_built = self._comings.pop(answer, (None, False))
                if actor is None:  # it was replaced
                    continue
                try:
                    failed = ray.get(answer)
                except (RayActorError, OutOfMemoryError) as error:
                    if actor.deaths + 1 == BUILDS or getattr(error, "actor_init_failed", False):
                        raise WorkerDied(
                            f"actors of {self._name} are lost while they are built; the last one: "
                            f"{_reason(error)}"
                        ) from None
                    self._replace(actor)
                    continue
                if failed is not None:
                    raise failed
                actor.joined = True
                actor.ready = actor.ready or is_built
                self._changed.notify_all()

    def _no_room(self, seconds: float) -> str:
        import ray

        def text(resources: Mapping[str, float]) -> str:
            return ", ".join(
                f"{name}={value:g}"
                for name, value in sorted(resources.items())
                if name in ("CPU", "GPU") or name in self._engine.resources
            )

        others = sum(
            actor.joined for each in [*self._all] if each is not self for actor in each._actors
        )
        return (
            f"step {self._name!r} has no actor after {seconds:.0f} s: each asks for "
            f"{self._engine.text()}; the cluster has {text(ray.cluster_resources())}, of which "
            f"{text(ray.available_resources()) or 'nothing'} is free"
            + (f"; actors of other steps: {others}" if others else "")
        )


def _end_late(handles: list[Any]) -> None:
    """Ends actors that are still to come, each once it is there, in a task of Ray. Of one that is
    ended just as it comes, Ray would keep the room for as long as the driver lives. The driver does
    not wait for them: it may leave Ray meanwhile.
    """
    import ray

    comings = {handle.join.remote(): handle for handle in handles}
    until = perf_counter() + _LATEST
    while comings and perf_counter() < until:
        for answer in ray.wait([*comings], timeout=_POLL)[0]:
            _kill(comings.pop(answer))
    for handle in comings.values():
        _kill(handle)


def _kill(handle: Any) -> None:
    import ray

    if ray.is_initialized():  # else this program ends, and the actors have ended before it
        with suppress(Exception):  # of a cluster that is gone: the others are to be ended, too
            ray.kill(handle)


def _reason(error: Exception) -> str:
    """What Ray says in short, without the numbers of the actor, and colours."""
    lines = re.sub(r"\x1b\[\d+m", "", str(error)).splitlines()
    if getattr(error, "actor_init_failed", False):
        return lines[-1]  # what was raised there, below its traceback
    text = " ".join(line for line in lines if not line.startswith("\t"))
    return textwrap.shorten(text.partition(" Some common causes")[0], 300)
