"""Functions of features for tests, and calls that share a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy

import batched
import batched.testing
from stage import BOUND


def unchanged(features: dict[str, Any], **_: Any) -> Any:
    return features


def tokens(*widths: int, first: int = 1) -> dict[str, Any]:
    """Return a call with rows of these lengths. Their ids are the numbers from `first` on."""
    rows = []
    for width in widths:
        rows.append(numpy.arange(first, first + width))
        first += width
    return {"ids": rows}


def hidden(features: dict[str, Any], size: int = 5) -> Any:
    """Return one vector of this size for each token."""
    return features["ids"][:, :, None] * numpy.ones(size, int)


def to_lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in batch.items()}


class Together:
    """A batched function of features, and calls that wait at the same time to share batches."""

    def __init__(self, compute: Callable[..., Any] = unchanged, **settings: Any) -> None:
        self.seen: list[dict[str, Any]] = []  # features of each call of the function

        def function(features: dict[str, Any], **extra: Any) -> Any:
            self.seen.append(features)
            return compute(features, **extra)

        def spread(**features: Any) -> Any:
            return function(features)

        given: Any = spread if settings.get("spread_kwargs") else function
        self.fn: Any = batched.inference.dynamically(**settings)(given)

    def answers(self, *calls: Mapping[str, Any], extra: Sequence[Any] = ()) -> list[Any]:
        waiting: list[Any] = []
        with ThreadPoolExecutor(1) as worker, batched.testing.hold(self.fn) as held:
            for number, call in enumerate(calls):
                try:
                    waiting.append(self.fn.submit(call, **(extra[number] if extra else {})))
                except Exception as error:
                    waiting.append(error)
            worker.submit(held.release).result(BOUND)
        return [
            each if isinstance(each, Exception) else each.exception(BOUND) or each.result(BOUND)
            for each in waiting
        ]

    def results(self, *calls: Mapping[str, Any], extra: Sequence[Any] = ()) -> list[Any]:
        answers = self.answers(*calls, extra=extra)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        self.fn.shutdown()


Make = Callable[..., Together]
"""The fixture `together`."""
