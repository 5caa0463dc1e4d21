"""Function of a step: how a worker builds the function, and how it travels to another process."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from ..._collate.lengths import validate_lengths
from ..._core.capacity import Capacity, Room
from ..._core.request import Batch, Request
from ..._execution.attempts import finish_now
from ..._execution.execution import never
from ..._execution.memory import is_out_of_memory
from ..._steps.execution import run_steps
from ..._steps.rows import AnyRow, Row
from ..step import Step, in_steps, unwrap


def build(step: Step) -> Callable[..., Any]:
    """Return the function with its extra arguments, or a new instance of the class."""
    func, args, kwargs = unwrap(step.fn), step.args, step.kwargs
    if inspect.isclass(func):
        built: Any = func(*args, **kwargs)
        return built  # type: ignore[no-any-return]  # `Step` has checked that it is callable
    if in_steps(step.fn):
        return _in_steps(step)
    return lambda *items, **features: func(*items, *args, **features, **kwargs)


def pickle_step(step: Step) -> bytes:
    """Return the step for another process, which builds its function.

    Raises:
        TypeError: the function cannot be sent.
    """
    features = step.function_options.features
    if features is not None and (features.device or features.output_device) is not None:
        raise TypeError(
            f"{step.name} has device=, which holds for this process alone; in other processes let "
            "the function move its features and outputs"
        )
    share: Any = getattr(step.fn, "share", None)
    remote = replace(  # without the functions of single rows, which the driver calls
        step,
        output=step.outputs,
        length=step.length if in_steps(step.fn) else None,
        preprocess=None,
        postprocess=None,
        where=None,
        route=None if step.route is None else str,
        # each worker of a client has its share of the money that is left
        fn=step.fn if share is None else share(step.workers or 1),
    )
    try:
        data: bytes = cloudpickle.dumps(remote)
    except Exception as error:
        raise TypeError(
            f"{step.name}, or what its args= and kwargs= hold, cannot be sent to another "
            f"process ({type(error).__name__}: {error}); define it in a module that can be "
            "imported, and load what it needs in the __init__ of a class"
        ) from error
    return data


class _Rows:
    """Rows of one list of items, without callers. `results` has the outcomes in their order.

    A failed row has its exception there. An error that the function raises is raised.
    """

    def __init__(self, step: Step, items: list[Any], capacity: Capacity) -> None:
        length = step.function_options.item_length
        lengths = None if length is None else validate_lengths(step.name, list(map(length, items)))
        request = Request(items, len(items), None, waker=self, listed=True, lengths=lengths)
        self.capacity = capacity
        self.again: deque[AnyRow] = deque(
            [Row(self, Batch([(request, at, at + 1)], 1, "eager", 0.0)) for at in range(len(items))]
        )
        self.readers: list[Any] = []
        self.results: list[Any] = [None] * len(items)

    def join(self, _: Room) -> list[AnyRow]:
        """Return nothing: all rows are in `again`."""
        return []

    def end(self, row: AnyRow, outcome: Any) -> None:
        """Keep the outcome of a row."""
        self.results[row.batch.slices[0][1]] = outcome

    def fail(self, rows: list[AnyRow], error: BaseException | None) -> None:
        """Raise the error of a call that has left rows without an outcome."""
        try:
            if rows and error is not None:
                raise error
        finally:
            del rows, error  # the traceback holds this frame

    def stepped(self, _: int) -> None:
        """Do nothing: steps are not counted."""

    too_big = stepped  # `capacity` knows


def _in_steps(step: Step) -> Callable[..., Any]:
    """Return a function that takes a list, from one that works in steps."""
    func, policy = unwrap(step.fn), step.function_options.policy
    capacity = Capacity(policy.batch_size, policy.max_batch_tokens)

    async def run(items: list[Any], *args: Any) -> list[Any]:
        rows = _Rows(step, items, capacity)
        ends_task = never if step.is_coroutine else None
        await run_steps(
            lambda live: func(live, *args, *step.args, **step.kwargs),
            rows,
            step.name,
            is_out_of_memory,
            ends_task,
        )
        return rows.results

    return run if step.is_coroutine else lambda *args: finish_now(run(*args))
