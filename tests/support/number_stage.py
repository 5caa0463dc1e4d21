"""A batch function of numbers, which are plain items or rows of features: what is promised of both
is tested once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from feature_stage import FeatureStage
from stage import Stage

BUSY = -1
"""The number of a call that keeps the worker of a gated function busy."""


def same(numbers: list[int]) -> list[int]:
    return numbers


class NumberStage(Stage):
    """Numbers as plain items."""

    def decorate(
        self,
        compute: Callable[[list[int]], Sequence[int]] = same,
        *,
        gated: bool = False,
        **settings: Any,
    ) -> Any:
        """Return the batched function, which applies `compute` to the numbers of each batch."""
        return super().decorate(
            lambda batch: self.output(compute(self.numbers(batch))), gated=gated, **settings
        )

    @property
    def given(self) -> list[list[int]]:
        """The numbers of each batch, as the function got them."""
        return [self.numbers(batch) for batch in self.batches]

    def one(self, number: int) -> Any:
        """Return the item of a call with one number."""
        return number

    def many(self, numbers: Sequence[int]) -> Any:
        """Return the items of a call with several numbers."""
        return list(numbers)

    def number(self, item: Any) -> int:
        """Of an item, as `length` gets it."""
        return int(item)

    def numbers(self, batch: Any) -> list[int]:
        """Of a batch, as the function gets it."""
        return list(batch)

    def output(self, numbers: Sequence[int]) -> Any:
        """Return the output of the batch function."""
        return list(numbers)

    def values(self, answer: Any) -> list[int]:
        """Return the numbers that a call returned, or raise the error that it raised."""
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, numpy.ndarray):
            answer = answer.tolist()
        return answer if isinstance(answer, list) else [answer]

    @property
    def busy_item(self) -> Any:
        return self.one(BUSY)


class FeatureNumberStage(NumberStage, FeatureStage):
    """Numbers as rows of features, all of one length."""

    @property
    def given(self) -> list[list[int]]:
        return [self.numbers(features) for features in self.seen]

    def one(self, number: int) -> Any:
        return self.many([number])

    def many(self, numbers: Sequence[int]) -> Any:
        return {"ids": numpy.array(numbers)[:, None]}

    def number(self, item: Any) -> int:
        return int(item["ids"][0])

    def numbers(self, batch: Any) -> list[int]:
        numbers: list[int] = batch["ids"][:, 0].tolist()
        return numbers

    def output(self, numbers: Sequence[int]) -> Any:
        return numpy.array(numbers)
