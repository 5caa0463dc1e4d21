"""Preparation of items: the callers' half of the work, before a call is parsed and queued.

A call from a thread is prepared in that thread. Lists and the calls of event loops and of `map` are
prepared in threads of the function. A call is accepted once it is prepared.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from .._collate.arguments import is_method
from .._core.scheduler import Request
from .._runtime.async_backend import current_loop, post
from .._runtime.wakers import async_waker, wake_all
from .requests import RequestParser


class Preparation:
    """Preparation of the items of one function."""

    threads = 0
    """Most threads that prepare; 0: each call is prepared where it is made."""

    def is_one(self, _: Any, /) -> bool:
        """Return whether a list that was passed is one item rather than several."""
        return False

    def split(
        self, _: str, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[Mapping[str, Any], tuple[Any, ...], dict[str, Any]]:
        """Return the settings of the preparation, and the arguments of the batch function.

        The arguments of this method: the name of the function, the item or `MISSING`, and all other
        arguments of the call.
        """
        return {}, args, kwargs

    def prepare(self, given: Any, settings: Mapping[str, Any], owner: object, /) -> Any:
        """Return the item for `given`. An exception reaches that caller alone."""
        raise NotImplementedError


class FunctionPreparation(Preparation):
    """Preparation by a function of one argument, or of an instance and one argument."""

    def __init__(self, prepare: Callable[..., Any], threads: int) -> None:
        self._prepare = prepare
        self._binds = is_method(prepare)
        self.threads = threads

    def prepare(self, given: Any, _: Mapping[str, Any], owner: object, /) -> Any:
        return self._prepare(owner, given) if self._binds else self._prepare(given)


class PreparedParser:
    """Parser of calls whose items are prepared first. `parser` gets the prepared items."""

    def __init__(
        self,
        name: str,
        parser: RequestParser,
        preparation: Preparation,
        preparers: Preparers | None = None,
    ) -> None:
        self.parser = parser
        self.preparation = preparation
        self._preparers = preparers
        self._name = name  # of the batch function, for error messages

    def parse(
        self,
        item: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: object,
        waker: Any,
        single: bool,
        /,
    ) -> Request:
        """Return a call, prepared in this thread, or a list in several threads.

        Raises:
            TypeError: there is no item, or the preparation does not take the arguments.
            Exception: an exception of the preparation, or of the parser.
        """
        prepare = self.preparation
        settings, args, kwargs = prepare.split(self._name, item, args, kwargs)
        item, args, one = self.parser.read(item, args, kwargs, single)
        one = one or bool(item and prepare.is_one(item))

        def act(each: Any) -> Any:
            return prepare.prepare(each, settings, owner)

        if one:
            item = act(item)
        else:
            item = list(
                map(act, item) if self._preparers is None else self._preparers.map(act, item)
            )
        return self.parser.parse(item, args, kwargs, owner, waker, one)


class _Job:
    """A call of a task that is being prepared."""

    def __init__(self, waker: Any, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.waker = waker
        self.context = copy_context()
        self.act: Callable[[], Any] | None = partial(act, *args)  # None: the task has given up
        self.result: Any = None
        self.error: BaseException | None = None


class Preparers:
    """Threads that prepare the calls of one function, in the contexts of their callers."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()  # 0 once the threads are to end
        here = self._here = threading.local()  # has `prepares` in the threads of the pool
        self._pool = ThreadPoolExecutor(
            self._threads, f"batched-{self._name}-prepare", lambda: setattr(here, "prepares", True)
        )
        self._turns: dict[object, list[_Job]] = {}  # jobs of the present turn of each loop

    def start(self, act: Callable[..., Any], *args: Any) -> Any:
        """Let a thread call `act`. Return a future of its result."""
        if self._process != os.getpid():  # a forked child has no threads of its parent
            self._open()
        return self._pool.submit(copy_context().run, act, *args)

    def close(self) -> None:
        """End the threads once they have done their work. A later call starts new ones."""
        self._process = 0
        self._pool.shutdown(wait=False)

    def map(self, act: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        """Return `act(item)` for each of `items`, from several threads."""
        if hasattr(self._here, "prepares"):  # the threads must not wait for each other
            return list(map(act, items))
        share = max(1, math.ceil(len(items) / self._threads))
        parts = [
            self.start(lambda part: list(map(act, part)), items[first : first + share])
            for first in range(0, len(items), share)
        ]
        return [result for part in parts for result in part.result()]

    async def run(self, act: Callable[..., Any], *args: Any) -> Any:
        """Let a thread call `act`, and return its result on this event loop.

        The jobs of one turn of a loop share threads, and wake their tasks together.
        """
        loop = current_loop()
        job = _Job(async_waker(loop), act, args)
        jobs = self._turns.get(loop)
        if jobs is None:
            jobs = self._turns[loop] = []
            post(loop, self._start_turn, loop)
        jobs.append(job)
        try:
            await job.waker
        except BaseException:
            job.act = None
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # the traceback holds this frame
        return job.result

    def _start_turn(self, loop: object) -> None:
        jobs = self._turns.pop(loop)
        for first in range(min(len(jobs), self._threads)):
            self.start(_prepare, jobs[first :: self._threads])


def _prepare(jobs: list[_Job]) -> None:
    for job in jobs:
        act = job.act
        try:
            job.result = None if act is None else job.context.run(act)
        except BaseException as error:
            job.error = error
    wake_all([job.waker for job in jobs])
