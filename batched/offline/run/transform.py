"""The user's code around the function of a step: from rows to requests, from outputs to results.

The methods touch no state of the run, so they may run on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..._collate.outputs import tree_flatten, tree_unflatten
from ..._core.request import Request
from ..step import Step
from .verdicts import Row

FILTERED: Final[Any] = object()
"""Result of a row for which the step's `where` is false."""

Result = tuple[Row, Any]
"""A row, and its output or its result; an error in its place."""


Dead = tuple[Row, str, BaseException | str]
"""A row that has failed for good, the phase in which it did, and its error or the reason."""


class Prepared(NamedTuple):
    """Requests for rows, and the rows that failed to become requests, with their errors."""

    requests: list[Request]
    failed: list[tuple[Row, BaseException]]


class Transform:
    """`preprocess`, `postprocess`, `where` and `route` of one step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._parse = step.parts.requests.parse
        self.takes_features = step.parts.function.options.features is not None
        # the one column whose values are the items; None: items are dicts of columns
        self._column = None if len(step.inputs) > 1 or self.takes_features else step.inputs[0]
        self.prepares = step.preprocess is not None
        self.finishes = step.postprocess is not None or step.where is not None

    def prepare(self, rows: Sequence[Row]) -> Prepared:
        """Return requests for `rows`, and the rows that failed."""
        prepared = Prepared([], [])
        caught = BaseException if self.prepares else Exception
        for row in rows:
            try:
                prepared.requests.append(self._request(row))
            except caught as error:
                prepared.failed.append((row, error))
        return prepared

    def _request(self, row: Row) -> Request:
        """Return the request for `row`, whose waker is the row."""
        step = self._step
        if self._column is not None:
            value = row.values[self._column]
        else:
            value = {name: row.values[name] for name in step.inputs}
        # arguments that are the same for all rows are added when the function is called
        args = () if step.route is None else (step.route(value),)
        if step.preprocess is not None:
            value = step.preprocess(value)
        elif self.takes_features:
            import numpy

            value = {name: numpy.asarray(each)[None] for name, each in value.items()}
        return self._parse(value, args, {}, None, row, True)

    def finish(self, outputs: list[Result]) -> list[Result]:
        """Return the results to keep of outputs: values, errors or `FILTERED`."""
        if not (self.finishes or self.takes_features):
            return outputs
        caught = BaseException if self.finishes else Exception
        results: list[Result] = []
        for row, output in outputs:
            try:
                results.append((row, self._finish(output)))
            except caught as error:
                results.append((row, error))
        return results

    def _finish(self, output: Any) -> Any:
        step = self._step
        if self.takes_features:
            arrays = [array[0] for _, array in tree_flatten(output)]
            output = tree_unflatten(output, iter(arrays))
        if step.postprocess is not None:
            output = step.postprocess(output)
        return output if step.where is None or step.where(output) else FILTERED
