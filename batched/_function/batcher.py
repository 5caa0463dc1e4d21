"""The batcher of a function: queue, workers and statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .._runtime.event_loop import EventLoopRuntime, EventLoops
from .._runtime.observer import make_observer
from .._runtime.recorder import Recorder
from .._runtime.thread import ThreadRuntime
from .function import Parts
from .preparation import (
    FunctionPreparation,
    PreparedParser,
    PreparingEventLoopRuntime,
    PreparingThreadRuntime,
)


class Batcher:
    """Queue, workers and statistics of one function, or of one method of one instance."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        function, _, requests, execution = parts
        options, name = function.options, function.name
        policy, recorder = options.policy, Recorder()
        observer = None if options.on_batch is None else make_observer(name, options.on_batch)
        preparation = function.preparation
        if options.prepare is not None and preparation is None:
            preparation = FunctionPreparation(
                options.prepare, options.prepare_threads, of_features=options.features is not None
            )
        make: Callable[..., Any] = EventLoopRuntime if function.coroutine else ThreadRuntime
        self.prepares = preparation is not None and preparation.threads > 0
        """Whether the runtime prepares the calls."""
        if preparation is not None and preparation.threads:
            parser = requests.parser if isinstance(requests, PreparedParser) else requests
            requests = PreparedParser(name, parser, preparation, defers=True)
            kind = PreparingEventLoopRuntime if function.coroutine else PreparingThreadRuntime
            make = partial(kind, preparation)
        make = partial(make, policy, execution, recorder, observer, name)
        # callers who only submit
        self.may_block = policy.max_queue_size is not None and policy.on_full == "wait"
        self.recorder = recorder
        self.requests = requests
        self.runtime: ThreadRuntime | EventLoops = (
            EventLoops(make, name) if function.coroutine else make()
        )
