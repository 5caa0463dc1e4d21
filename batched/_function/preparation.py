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
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._collate.arguments import is_method
from .._core.scheduler import Request
from .._runtime.async_backend import current_loop, post
from .._runtime.wakers import async_waker, wake_all
from .requests import MISSING, Args, Keywords, RequestParser


class Preparation:
    """Preparation by a function of one argument, or of an instance and one argument."""

    threads = 0
    """Most threads that prepare; 0: each call is prepared where it is made."""
    takes_settings = False
    """Whether all keyword arguments of a call are settings of its preparation."""

    def __init__(self, prepare: Callable[..., Any], threads: int) -> None:
        self._prepare = prepare
        self._binds = is_method(prepare)
        self.threads = threads

    def is_one(self, _: Any, /) -> bool:
        """Return whether a list that was passed is one item rather than several."""
        return False

    def prepare(self, given: Any, _: Mapping[str, Any], owner: object, /) -> Any:
        """Return the item for `given`. An exception reaches that caller alone."""
        item = self._prepare(owner, given) if self._binds else self._prepare(given)
        if item is None:
            raise TypeError(f"prepare returned None for {given!r:.60}; it must return the item")
        return item


class PreparedParser:
    """Parser of calls with items that are prepared first. `parser` gets the prepared items."""

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
        args: Args,
        kwargs: Keywords,
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
        prepare, settings = self.preparation, {}
        if prepare.takes_settings:
            if item is MISSING or args:
                raise TypeError(
                    f"{self._name} takes one prompt, or one list, by position, and settings by "
                    "keyword"
                )
            settings, kwargs = kwargs, {}
        item, args, one = self.parser.read(item, args, kwargs, single)
        one = one or bool(item and prepare.is_one(item))

        def act(each: Any) -> Any:
            return prepare.prepare(each, settings, owner)

        several = map if self._preparers is None else self._preparers.map
        item = act(item) if one else list(several(act, item))
        return self.parser.parse(item, args, kwargs, owner, waker, one)


@dataclass(eq=False)
class _Job:
    """A call of a task that is being prepared."""

    waker: Any
    act: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None


class Preparers:
    """Threads that prepare the calls of one function, in the contexts of their callers."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._names = f"batched-{name}-prepare"  # what names of threads begin with
        self._turns: dict[object, list[_Job]] = {}  # jobs of the present turn of each loop
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(self._threads, self._names)

    def start(self, act: Callable[..., Any], *args: Any) -> Any:
        """Let a thread call `act`. Return a future of its result."""
        if self._process != os.getpid():  # a forked child has no threads of its parent
            self._open()
        return self._pool.submit(copy_context().run, act, *args)

    def close(self) -> None:
        """End the threads once they have done their work. A later call starts new threads."""
        pool = self._pool
        self._open()
        pool.shutdown(wait=False)

    def map(self, act: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        """Return `act(item)` for each of `items`, from several threads."""
        # the threads must not wait for each other
        if threading.current_thread().name.startswith(self._names):
            return list(map(act, items))
        share = math.ceil(len(items) / self._threads) or 1
        parts = [
            self.start(list, map(act, items[first : first + share]))
            for first in range(0, len(items), share)
        ]
        return [result for part in parts for result in part.result()]

    async def run(self, act: Callable[..., Any], *args: Any) -> Any:
        """Let a thread call `act`, and return its result on this event loop.

        The jobs of one turn of a loop share threads, and wake their tasks together.
        """
        loop = current_loop()
        job = _Job(async_waker(loop), partial(copy_context().run, act, *args))
        if loop not in self._turns:
            self._turns[loop] = []
            post(loop, self._start_turn, loop)
        self._turns[loop].append(job)
        try:
            await job.waker
        except BaseException:
            job.act = bool  # which does nothing
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
            share = jobs[first :: self._threads]
            try:
                self.start(_prepare, share)
            except RuntimeError:  # no more threads
                _prepare(share)


def _prepare(jobs: list[_Job]) -> None:
    for job in jobs:
        try:
            job.result = job.act()
        except BaseException as error:
            job.error = error
    wake_all([job.waker for job in jobs])
