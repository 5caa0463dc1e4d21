"""Workers that are actors of a Ray cluster.

The driver forms batches, finds bad rows and commits, as with any other engine. Only the function
computes elsewhere. So a run can go on where a run with another engine ended.

1. Each worker adds one actor, in a thread of its own, and calls any actor of the step that is free.
   So a run begins with the first actor, and uses each further one as soon as the cluster has room.
2. A lost actor, with its process or its node, costs one call, and is replaced. An actor that Ray
   ended for its memory is a memory error.
3. A step without an actor for `startup_timeout_s` is an error.
4. The actors end with the run, and with the driver.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Final

from ..._connect.frames import Message
from ..._connect.pipe import Answer, value_of
from ..._runtime.timer_thread import daemon_thread
from ...errors import TimeLimitExceeded, WorkerDied
from ..step import Step
from .cluster import Ray, import_ray
from .engine import Worker, WorkerClosed, time_limit_exceeded
from .function import pickle_step
from .processes import WorkerKilled
from .serving import Server, pickled

_logger = logging.getLogger("batched")

_POLL_S: Final = 0.5
"""Longest time between two looks whether a wait is to end (s)."""
_PATIENCE_S: Final = 10.0
"""Time without an actor after which the wait is logged (s)."""

_joined: list[Any] = []
"""Runtime environment of the job that `join` has started."""


def join(settings: Ray) -> None:
    """Connect this process to the cluster, unless it is connected.

    Ray ends a cluster with the thread that has started it, so this is for the thread of a run.

    Raises:
        ConnectionError: there is no cluster at the address.
    """
    ray, address = import_ray(), settings.address
    if ray.is_initialized():
        return
    # Ray itself would wait for many minutes, and not notice Ctrl-C
    host, mark, port = (address or "").removeprefix("ray://").rpartition(":")
    if mark and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()
        except OSError as error:
            raise ConnectionError(f"no Ray answers at {address} ({error})") from error
    env = deepcopy(settings.runtime_env)  # which Ray changes
    ray.init(address=address, runtime_env=env, logging_level=logging.WARNING)
    _joined[:] = [settings.runtime_env]


class _Served(Server):
    """An actor, in its own process."""

    def __init__(self, name: str, path: list[str]) -> None:
        sys.path += [each for each in path if each not in sys.path]
        super().__init__(name, inf)

    def __repr__(self) -> str:
        return self._name  # in the logs of Ray


class Actors:
    """Actors of one step."""

    def __init__(self, step: Step) -> None:
        self.payload = pickled(((pickle_step(step),), {}), inf)
        self.all: list[Any] = []  # that have their resources
        # without a call; or an error in the place of one that cannot be built
        self.free = SimpleQueue[Any]()
        self.warned = False  # whether the wait for room was logged


class ActorWorker(Worker):
    """A worker that has one actor added, and calls one that is free."""

    def __init__(self, step: Step, settings: Ray, actors: Actors) -> None:
        super().__init__(step)
        self._settings = settings
        self._actors = actors
        self._adds = False  # whether its actor is there, or will be
        self._actor: Any = None  # actor for the next call
        own = step.num_cpus, step.num_gpus
        general = settings.num_cpus, settings.num_gpus
        self._cpus, self._gpus = [b if a is None else a for a, b in zip(own, general, strict=True)]

    def start(self) -> None:
        """Take an actor that is free, as soon as there is one."""
        if not self._adds:
            self._adds = True
            daemon_thread(f"{self.step.name}-actor", self._add).start()
        actor = None
        while actor is None:
            if self.closing.is_set():
                raise WorkerClosed
            with suppress(Empty):
                actor = self._actors.free.get(timeout=_POLL_S)
        if isinstance(actor, BaseException):
            self._adds = False
            raise actor
        self._actor = actor

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function in an actor."""
        message = pickled((args, kwargs), inf)
        self.ready = False  # an actor is taken for each call
        try:
            answer = self._ask(self._actor, message, self.step.timeout_s)
        except (WorkerDied, TimeLimitExceeded):
            self._adds = False
            self._end(self._actor)
            raise
        self._actors.free.put(self._actor)
        return value_of(*answer)

    def _add(self) -> None:
        """Add an actor, once the cluster has room for it and it has built the function."""
        try:
            actor = self._new_actor()
            value_of(*self._ask(actor, self._actors.payload))
        except BaseException as error:
            self._actors.free.put(error)
        else:
            self._actors.free.put(actor)

    def _new_actor(self) -> Any:
        """Return a new actor, once it has its resources."""
        ray, settings, actors = import_ray(), self._settings, self._actors
        # the job may have a folder in its environment, and an actor may not
        env = None if [settings.runtime_env] == _joined else deepcopy(settings.runtime_env)
        actor = (
            ray.remote(_Served)
            .options(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                resources=dict(settings.resources),
                runtime_env=env,
                max_restarts=0,
            )
            .remote(self.step.name, sys.path)  # where the driver finds modules
        )
        present, began = actor.__ray_ready__.remote(), perf_counter()
        while not ray.wait([present], timeout=_POLL_S, fetch_local=False)[0]:
            waited = perf_counter() - began
            if self.closing.is_set():
                raise WorkerClosed  # Ray drops an actor that waits, with the last reference to it
            if waited > settings.startup_timeout_s and not actors.all:
                raise RuntimeError(self._no_room(waited))
            if waited > _PATIENCE_S and not (actors.all or actors.warned):
                actors.warned = True
                _logger.warning("%s; waiting for room", self._no_room(waited))
        actors.all.append(actor)
        return actor

    def _ask(self, actor: Any, message: Message, limit: float | None = None) -> Answer:
        """Return the answer of an actor.

        Raises:
            TimeLimitExceeded: there was none within `limit` (s).
            WorkerDied: the actor is lost, or the node that had the answer.
        """
        ray, reference = import_ray(), actor.answer.remote(message)
        if not ray.wait([reference], timeout=limit or None, fetch_local=False)[0]:
            raise time_limit_exceeded(self.step)
        try:
            answer: Answer = ray.get(reference)
        except ray.exceptions.RayError as error:
            is_memory = isinstance(error, ray.exceptions.OutOfMemoryError)
            kind = WorkerKilled if is_memory else WorkerDied
            raise kind(f"the actor of {self.step.name} was lost: {error}") from None
        return answer

    def _end(self, actor: Any) -> None:
        with suppress(Exception):  # another thread was faster, or the cluster is gone
            self._actors.all.remove(actor)
            import_ray().kill(actor)

    def close(self) -> None:
        """End all actors of the step, with the calls that run."""
        for actor in [*self._actors.all]:
            self._end(actor)

    kill = close

    def _no_room(self, seconds: float) -> str:
        ray = import_ray()
        needs = {"CPU": self._cpus, "GPU": self._gpus, **self._settings.resources}

        def text(resources: Mapping[str, float]) -> str:
            return ", ".join(f"{name}={resources.get(name, 0):g}" for name in needs if needs[name])

        return (
            f"step {self.step.name!r} has no actor after {seconds:.0f} s: each needs {text(needs)}"
            f"; the cluster has {text(ray.cluster_resources())}, of which "
            f"{text(ray.available_resources())} is free"
        )
