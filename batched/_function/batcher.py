"""The batcher of a function: queue, workers and statistics."""

from __future__ import annotations

from .._runtime.event_loop import EventLoopRuntime, EventLoops
from .._runtime.observer import make_observer
from .._runtime.recorder import Recorder
from .._runtime.thread import ThreadRuntime
from .function import Parts
from .preparation import FunctionPreparation, PreparedParser, PreparingRuntime
from .requests import RequestParser


class Batcher:
    """Queue, workers and statistics of one function, or of one method of one instance."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        function, _, requests, execution = parts
        options, name = function.options, function.name
        if options.prepare is not None and not isinstance(requests, PreparedParser):
            preparation = FunctionPreparation(
                options.prepare, options.prepare_threads, of_features=options.features is not None
            )
            requests = PreparedParser(name, requests, preparation)
        policy, recorder = options.policy, Recorder()
        observer = None if options.on_batch is None else make_observer(name, options.on_batch)
        # callers who only submit
        self.may_block = policy.max_queue_size is not None and policy.on_full == "wait"
        self.recorder = recorder
        runtime: ThreadRuntime | EventLoops = (
            EventLoops(lambda: EventLoopRuntime(policy, execution, recorder, observer, name), name)
            if function.coroutine
            else ThreadRuntime(policy, execution, recorder, observer, name)
        )
        self.requests: RequestParser | PreparedParser | PreparingRuntime = requests
        self.runtime: ThreadRuntime | EventLoops | PreparingRuntime = runtime
        if isinstance(requests, PreparedParser) and requests.preparation.threads:
            self.requests = self.runtime = PreparingRuntime(runtime, requests, name)
