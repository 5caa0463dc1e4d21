"""Workers that are actors of a Ray cluster.

The driver forms batches, finds bad rows and commits, as with any other engine. Only the function
computes elsewhere. So a run can go on where a run with another engine ended.

1. Each worker adds one actor, and calls any actor of the step that is free. So a run begins with
   the first actor, and uses each further one as soon as the cluster has room.
2. A lost actor, with its process or its node, costs one call, and is replaced. An actor that Ray
   ended for its memory is a memory error.
3. The actors end with the run, and with the driver.
"""

from __future__ import annotations

import logging
import socket
import sys
from contextlib import suppress
from copy import deepcopy
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from ..._connect.frames import Message
from ..._connect.pipe import Answer, value_of
from ..._runtime.timer_thread import daemon_thread
from ...errors import WorkerDied
from ..step import Step
from .cluster import Ray, import_ray
from .engine import Worker, WorkerClosed, time_limit_exceeded
from .function import pickle_step
from .processes import WorkerKilled
from .serving import Server, pickled

_joined: list[Any] = []
"""Runtime environment of the job that `join` has started."""


def join(settings: Ray) -> None:
    """Connect this process to the cluster, unless it is connected.

    Ray ends a cluster with the thread that has started it, so this is for the thread of a run.
    """
    ray = import_ray()
    if not ray.is_initialized():
        host, _, port = (settings.address or "").removeprefix("ray://").rpartition(":")
        if port.isdecimal() and "://" not in host:  # Ray would try for minutes
            try:
                socket.create_connection((host.strip("[]"), int(port)), 10).close()
            except OSError as error:
                raise ConnectionError(f"no Ray answers at {settings.address}: {error}") from None
        env = deepcopy(settings.runtime_env)  # which Ray changes
        ray.init(address=settings.address, runtime_env=env, logging_level=logging.WARNING)
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
        self.all: list[Any] = []
        # without a call; or an error in the place of one that cannot be built
        self.free = SimpleQueue[Any]()


class ActorWorker(Worker):
    """A worker that adds one actor, and calls one that is free."""

    def __init__(self, step: Step, settings: Ray, actors: Actors) -> None:
        super().__init__(step)
        self._settings = settings
        self._actors = actors
        self._adds = False  # whether its actor is there, or will be
        self._actor: Any = None  # actor for the next call

    def start(self) -> None:
        """Take an actor that is free, as soon as there is one."""
        if not self._adds:
            daemon_thread(f"{self.step.name}-actor", self._build, self._new_actor()).start()
            self._adds = True
        actor = None
        while actor is None:
            if self.closing.is_set():
                self.close()  # perhaps the actor was added too late for another thread
                raise WorkerClosed
            with suppress(Empty):
                actor = self._actors.free.get(timeout=0.5)  # s, to see `closing`
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
        except BaseException:
            self._adds = False
            self._end(self._actor)
            raise
        self._actors.free.put(self._actor)
        return value_of(*answer)

    def _new_actor(self) -> Any:
        """Return a new actor, which begins once the cluster has room for it."""
        step, settings = self.step, self._settings
        # the job may have a folder in its environment, and an actor may not
        env = None if [settings.runtime_env] == _joined else deepcopy(settings.runtime_env)
        actor = (
            import_ray()
            .remote(_Served)
            .options(
                num_cpus=settings.num_cpus if step.num_cpus is None else step.num_cpus,
                num_gpus=settings.num_gpus if step.num_gpus is None else step.num_gpus,
                resources=dict(settings.resources),
                runtime_env=env,
                max_restarts=0,
            )
            .remote(step.name, sys.path)  # where the driver finds modules
        )
        self._actors.all.append(actor)
        return actor

    def _build(self, actor: Any) -> None:
        """Have an actor build the function, once it has room."""
        try:
            value_of(*self._ask(actor, self._actors.payload))
        except BaseException as error:
            if isinstance(error, WorkerDied) and "its node has died" in str(error):
                self._end(actor)  # Ray had not noticed that this node was lost
                self._build(self._new_actor())
            else:
                self._actors.free.put(error)
        else:
            self._actors.free.put(actor)

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
        except ray.exceptions.RayError as loss:
            kind = WorkerKilled if isinstance(loss, ray.exceptions.OutOfMemoryError) else WorkerDied
            raise kind(f"the actor of {self.step.name} was lost: {loss}") from None
        return answer

    def _end(self, actor: Any) -> None:
        with suppress(Exception):  # another thread was faster, or the cluster is gone
            self._actors.all.remove(actor)
            import_ray().kill(actor)

    def close(self) -> None:
        """End all actors of the step, with the calls that run."""
        for actor in [*self._actors.all]:
            self._end(actor)
