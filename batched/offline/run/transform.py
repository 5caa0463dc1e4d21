"""The user's code around the function of a step: from rows to requests, from outputs to results.

The methods touch no state of the run, so they may run on any thread. A request has all rows of a
list that may share a batch. Its waker is the list of the rows, in the order of its items.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ..._collate.features.outputs import tree_flatten, tree_unflatten
from ..._core.request import Request
from ..step import Step
from .verdicts import Row

FILTERED: Final[Any] = object()
"""Result of a row for which the step's `where` is false."""

Dead = tuple[Row, str, BaseException | str]
"""A row that has failed for good, the phase in which it did, and its error or the reason."""


class Transform:
    """`preprocess`, `postprocess`, `where` and `route` of one step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._parse = step.parts.requests.parse
        self.takes_features = step.parts.function.options.features is not None
        # the column with the items; None: items are dicts of columns
        (*_, column) = step.inputs
        self._column = None if len(step.inputs) > 1 or self.takes_features else column
        self.prepares = step.preprocess is not None
        self._where: Callable[[Any, Row], bool] | None = None
        if (where := step.where) is not None:
            takes_row = takes_two(where)
            self._where = lambda output, row: (
                where(output, {**row.values}) if takes_row else where(output)
            )
        self.finishes = step.postprocess is not None or step.where is not None
        # errors of the user's code that cost one row, also where they would end a thread
        self._caught = BaseException if self.prepares or self.finishes else Exception

    def prepare(self, rows: Sequence[Row]) -> tuple[list[Request], list[Dead]]:
        """Return requests for `rows`, and the rows that failed."""
        dead: list[Dead] = []
        groups: dict[tuple[Any, ...], tuple[list[Row], list[Any]]] = {}  # by further arguments
        step = self._step
        if step.route is None and step.preprocess is None and self._column is not None:
            groups[()] = [*rows], [row.values[self._column] for row in rows]
        else:
            for row in rows:
                try:
                    args, item = self._item(row)
                    some, items = groups.setdefault(args, ([], []))
                except self._caught as error:
                    dead.append((row, "preprocess", error))
                else:
                    some.append(row)
                    items.append(item)
        requests = [
            request
            for args, (some, items) in groups.items()
            for request in self._requests(args, some, items, dead)
        ]
        return requests, dead

    def _item(self, row: Row) -> tuple[tuple[Any, ...], Any]:
        """Return the further arguments for a row that differ from row to row, and its item."""
        step = self._step
        if self._column is not None:
            item = row.values[self._column]
        else:
            item = {name: row.values[name] for name in step.inputs}
        args = () if step.route is None else (step.route(item),)
        if step.preprocess is not None:
            item = step.preprocess(item)
        elif self.takes_features:
            import numpy

            item = {name: numpy.asarray(each)[None] for name, each in item.items()}
        return args, item

    def _requests(
        self, args: tuple[Any, ...], rows: list[Row], items: list[Any], dead: list[Dead]
    ) -> Iterator[Request]:
        """Yield one request, or a request for each row if they cannot share one."""
        try:
            if self.takes_features:
                (item,) = items
                request = self._parse(item, args, {}, None, rows, True)
                if request.size != 1:
                    raise ValueError(
                        f"the features of a row of the source must have one row, got {request.size}"
                    )
                yield request
                return
            request = self._parse(items, args, {}, None, rows, False)
        except self._caught as error:
            if len(rows) == 1:
                dead.append((rows[0], "preprocess", error))
                return
            for row, item in zip(rows, items, strict=True):
                yield from self._requests(args, [row], [item], dead)
        else:
            if request.order is not None:
                request.waker = [rows[place] for place in request.order]
                request.order = request.places = None  # results stay in the order of the items
            request.separate = True
            yield request

    def finish(self, rows: list[Row]) -> tuple[list[Row], list[Dead]]:
        """Make the outputs of rows their results. Return these rows, and the rows that failed."""
        if not (self.finishes or self.takes_features):
            return rows, []
        good: list[Row] = []
        dead: list[Dead] = []
        for row in rows:
            try:
                row.result = self._finish(row)
                good.append(row)
            except self._caught as error:
                dead.append((row, "postprocess", error))
        return good, dead

    def _finish(self, row: Row) -> Any:
        step, output = self._step, row.result
        if self.takes_features:
            arrays = [array[0] for _, array in tree_flatten(output)]
            output = tree_unflatten(output, iter(arrays))
        if step.postprocess is not None:
            output = step.postprocess(output)
        return output if self._where is None or self._where(output, row) else FILTERED


def takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function has two parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a builtin
        return False
    return len([one for one in parameters if one.default is one.empty]) == 2


def take_row(request: Request, place: int) -> tuple[Row, Request | None]:
    """Return the row of the waiting item at `place`, and a request for all other waiting items."""
    waiting = list(range(request.dispatched, request.size))
    if request.lengths is not None:
        waiting = list(request.remaining)
    row: Row = request.waker[waiting.pop(place)]
    if not waiting:
        return row, None
    rest = Request([request.items[at] for at in waiting], len(waiting), request.group_key)
    rest.waker = [request.waker[at] for at in waiting]
    rest.listed = rest.separate = True
    if request.lengths is not None:
        rest.lengths = [request.lengths[at] for at in waiting]
    return row, rest
