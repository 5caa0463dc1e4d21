"""Engine whose workers are actors of a Ray cluster.

The driver forms batches, finds bad rows and commits, as with any other engine. Only the function
computes elsewhere. So a run can go on where a run with another engine ended.

1. An actor builds the function once. Each actor begins as soon as it has room.
2. `max_in_flight` batches are sent to each actor ahead, so that an actor never waits for the
   driver. An actor runs one batch after another, in the order in which they were sent.
3. A lost actor, with its process or its node, is replaced. Its unanswered calls are made again,
   each after a probe, and no call is sent behind it before it is answered. A call is at fault if
   its actor answers the probe and is lost before the answer of the call. So neither a row that
   kills its process nor a node that goes costs another row. An actor that Ray ended for its memory
   is a memory error.
4. Once a step begins, every step reserves room by its first actor. No step gets a second actor
   before all steps have their first one, since a step with all CPUs would starve another step.
5. A step without an actor for `startup_timeout_s` is an error.
6. The actors end with the run, and with the driver.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any, ClassVar, Final

from ..._connect.frames import Message
from ..._connect.pipe import Answer, value_of
from ..._services.failures import error_text
from ...errors import TimeLimitExceeded, WorkerDied
from ..step import Step
from .cluster import Ray, import_ray
from .engine import Worker, WorkerClosed, time_limit_exceeded
from .function import pickle_step
from .processes import WorkerKilled
from .serving import Server, pickled

_logger = logging.getLogger("batched")

_BUILDS: Final = 3
"""Actors lost in a row during the build, after which the build has failed."""

_POLL: Final = 0.5
"""Longest time between two looks whether a wait is to end (s)."""

_PATIENCE: Final = 10.0
"""Time without an actor after which the wait is logged (s)."""


_env_of_jobs: Final[dict[str, Mapping[str, Any] | None]] = {}
"""Runtime environments of the jobs that `join` has started."""


def join(settings: Ray) -> None:
    """Connect this process to the cluster, unless it is connected.

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
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        except OSError as error:
            raise ConnectionError(f"no Ray answers at {address} ({error})") from error
    env = deepcopy(settings.runtime_env)  # which Ray changes
    ray.init(address=address, runtime_env=env, logging_level=logging.WARNING)
    _env_of_jobs[ray.get_runtime_context().get_job_id()] = settings.runtime_env


class NoRoomError(TimeoutError):
    """The cluster has no room for an actor of the step."""

    is_service = False
    """Whether `Retry` is to build the worker again."""


class _Served(Server):
    """An actor, in its own process."""

    def __init__(self, name: str, path: Sequence[str]) -> None:
        sys.path += [each for each in path if each not in sys.path]
        super().__init__(name)

    def __repr__(self) -> str:
        return self._name  # in the logs of Ray

    def answer(self, message: Message, least: float = inf) -> Answer:
        """Return the answer to a call, with all buffers in its pickle."""
        return super().answer(message, least)


class _Actor:
    """An actor, as the driver knows it."""

    def __init__(self, handle: Any, payload: Any) -> None:
        self.handle = handle
        self.present = handle.__ray_ready__.remote()  # answered once the actor has its resources
        self.built = handle.answer.remote(payload)  # answered once the function is built
        self.ready = False  # `built` is answered
        self.calls: list[Any] = []  # calls that the actor has not answered, in their order
        self.repeated: Any = None  # its last call, if that is made again
        self.freed = 0.0  # moment of the last answer (s)


class ActorPool(Worker):
    """All actors of a step; all threads of the engine share them."""

    _steps: ClassVar[set[ActorPool]] = set()
    """Steps that have asked for room."""

    def __init__(self, step: Step, settings: Ray) -> None:
        super().__init__(step)
        workers = step.workers or 1
        self._settings = replace(
            settings,
            num_cpus=settings.num_cpus if step.num_cpus is None else step.num_cpus,
            num_gpus=settings.num_gpus if step.num_gpus is None else step.num_gpus,
        )
        self._payload: Any = pickled(((pickle_step(step),), {}), inf)
        self._warned = False  # the wait for room has been logged
        self._changed = threading.Condition(self.building)  # guards the attributes below
        self._actors: list[_Actor] = []
        self._count = workers  # actors, once there is room
        self._deaths = 0  # actors in a row that were lost before they were built
        self._since = inf  # moment from which no actor has been present (s)

    def reserve(self) -> None:
        """Ask for the first actor."""
        with self._changed:
            if not self._actors:
                join(self._settings)
                if self not in self._steps:
                    self._steps.add(self)
                    self._payload = import_ray().put(self._payload)
                self._add()

    def start(self) -> bool:
        """Wait for the first actor that has built the function."""
        self.reserve()
        while not any(actor.ready for actor in self._actors):
            if self.closing.is_set():
                raise WorkerClosed
            self._advance(_POLL)
            self._check_room()
        self._since = inf
        return True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function in an actor."""
        data = pickled((args, kwargs), inf)
        reply = self._ask(data)
        while reply is None:
            reply = self._ask(data, again=True)
        return value_of(*reply)

    def kill(self) -> bool:
        """End all actors, with the calls that run."""
        self.close()
        return True

    def close(self) -> None:
        """End all actors."""
        with self._changed:
            self._steps.discard(self)
            for actor in [*self._actors]:
                self._drop(actor)

    def _ask(self, data: Message, *, again: bool = False) -> Any:
        """Return the reply of an actor; None if the actor is lost, and by another fault perhaps.

        Raises:
            TimeLimitExceeded: the call took longer than the time limit.
            WorkerDied: the call was made again, and its actor was lost during the call.
        """
        with self._changed:
            actor = self._claim()
            probe = actor.handle.__ray_ready__.remote() if again else None
            reference = actor.handle.answer.remote(data)
            actor.calls.append(reference)
            if again:
                actor.repeated = reference
        limit, sent, wait = self.step.timeout_s or inf, perf_counter(), _POLL
        at_fault = False
        try:
            if probe is not None:
                self._get(probe)
                at_fault = True
            while not _is_answered(reference, wait):
                if actor.calls[0] is reference:  # the call runs
                    wait = min(_POLL, max(sent, actor.freed) + limit - perf_counter())
                if wait <= 0:
                    at_fault = True
                    raise time_limit_exceeded(self.step)
            return self._get(reference)
        except (WorkerDied, TimeLimitExceeded):
            self._drop(actor)
            if at_fault:
                raise
            return None
        finally:
            with self._changed:
                actor.calls.remove(reference)
                if actor.repeated is reference:
                    actor.repeated = None
                actor.freed = perf_counter()
                self._changed.notify_all()

    def _claim(self) -> _Actor:
        """Return the actor for a call, as soon as there is one; `_changed` is held."""
        while True:
            self.make_ready()
            self._advance(0)
            most = self._settings.max_in_flight
            free = [
                each
                for each in self._actors
                if each.ready and each.repeated is None and len(each.calls) < most
            ]
            if free:
                break
            self._changed.wait(_POLL)
        return min(free, key=lambda each: len(each.calls))

    def _add(self) -> None:
        ray, settings = import_ray(), self._settings
        known = _env_of_jobs.get(ray.get_runtime_context().get_job_id())
        kind: Any = ray.remote(_Served)
        handle = kind.options(
            num_cpus=settings.num_cpus,
            num_gpus=settings.num_gpus,
            resources=dict(settings.resources),
            runtime_env=None if settings.runtime_env == known else deepcopy(settings.runtime_env),
            max_restarts=0,  # the driver replaces actors
        ).remote(self.step.name, sys.path)  # where the driver finds modules
        self._actors.append(_Actor(handle, self._payload))

    def _drop(self, actor: _Actor) -> None:
        """End `actor`. Ray ends an actor that waits for room once no reference to it is left."""
        with self._changed:
            if actor in self._actors:
                self._actors.remove(actor)
                self.ready = any(each.ready for each in self._actors)
                actor.ready = False
                # without Ray, the program ends, and has no actors
                if import_ray().is_initialized() and _is_answered(actor.present, 0):
                    with suppress(Exception):  # of a cluster that is gone
                        import_ray().kill(actor.handle)
                self._changed.notify_all()

    def _is_settled(self) -> bool:
        """Return whether the step has its first actor, or will never have one."""
        return self.failed is not None or any(
            _is_answered(actor.present, 0) for actor in [*self._actors]
        )

    def _advance(self, seconds: float) -> None:
        """Wait for a change of the actors for so long. Replace lost actors, and add missing ones.

        Raises:
            BaseException: no actor can build the function.
            WorkerDied: one actor after another was lost before it was built.
        """
        coming = [each for each in self._actors if not each.ready]
        if coming:
            references = [each.built for each in coming]
            import_ray().wait(references, timeout=seconds, fetch_local=False)
        for actor in coming:
            if _is_answered(actor.built, 0):
                self._note_built(actor)
        while len(self._actors) < self._count:
            if self._actors and not all(step._is_settled() for step in [*self._steps]):
                return
            self._add()

    def _note_built(self, actor: _Actor) -> None:
        try:
            value_of(*self._get(actor.built))
            self._deaths, actor.ready = 0, True
            return
        except BaseException as error:
            failed = error
            self._deaths = self._deaths + 1 if isinstance(error, WorkerDied) else 0
        self._drop(actor)
        if 0 < self._deaths < _BUILDS:  # another actor takes its place
            return
        if not self._actors:
            raise failed
        self._count -= 1
        _logger.warning(
            "step %r goes on with a worker less, which could not be built: %s",
            self.step.name,
            error_text(failed).error,
        )

    def _get(self, reference: Any) -> Any:
        """Return an answer that is there.

        Raises:
            WorkerDied: the actor is lost, or the node that had the answer.
        """
        from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError

        try:
            return import_ray().get(reference)
        except (RayActorError, OutOfMemoryError, ObjectLostError) as error:
            kind = WorkerKilled if isinstance(error, OutOfMemoryError) else WorkerDied
            # an error of the actor's constructor stands below its traceback
            line = str(error).splitlines()[-1 if getattr(error, "actor_init_failed", False) else 0]
            raise kind(f"the actor of {self.step.name} was lost: {line}") from None

    def _check_room(self) -> None:
        """Raise a NoRoomError if the step has waited too long for an actor."""
        now = perf_counter()
        self._since = inf if self._is_settled() else min(self._since, now)
        waited = now - self._since
        if waited > self._settings.startup_timeout_s:
            raise NoRoomError(self._no_room(waited))
        if waited > _PATIENCE and not self._warned:
            self._warned = True
            _logger.warning("%s; waiting for room", self._no_room(waited))

    def _no_room(self, seconds: float) -> str:
        ray, settings = import_ray(), self._settings
        needs = {"CPU": settings.num_cpus, "GPU": settings.num_gpus, **settings.resources}
        names = [name for name, amount in needs.items() if amount]

        def text(resources: Mapping[str, float]) -> str:
            return ", ".join(f"{name}={resources.get(name, 0):g}" for name in names) or "nothing"

        return (
            f"step {self.step.name!r} has no actor after {seconds:.0f} s: each needs {text(needs)}"
            f"; the cluster has {text(ray.cluster_resources())}, of which "
            f"{text(ray.available_resources())} is free"
        )


def _is_answered(reference: Any, seconds: float) -> bool:
    """Wait for an answer, or an error in its place, for so long. The answer stays on its node."""
    return bool(import_ray().wait([reference], timeout=seconds, fetch_local=False)[0])
