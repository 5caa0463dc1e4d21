"""Functions of features for tests, and calls that share a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

import batched
from stage import BOUND, Stage

DECOY = "decoy"
"""Feature of a call that keeps the worker busy until the test lets it through, in its own batch."""


def decoy() -> dict[str, Any]:
    return {DECOY: numpy.zeros(1)}


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


class FeatureStage(Stage):
    """A batch function of features on any runtime.

    It records its features. It waits for each batch if `gated`, otherwise for decoys only.
    """

    package = batched.inference
    aio_package = batched.aio.inference

    def decorate(
        self, compute: Callable[..., Any] = unchanged, *, gated: bool = False, **settings: Any
    ) -> Any:
        # features of each call of the function but the decoys
        self.seen: list[dict[str, Any]] = []

        def answer(features: dict[str, Any], **extra: Any) -> Any:
            return features if DECOY in features else compute(features, **extra)

        function = self.function(answer, gated)

        def spread(**features: Any) -> Any:
            return function(features)

        async def spread_coroutine(**features: Any) -> Any:
            return await function(features)

        if settings.get("spread_kwargs"):
            self.fn = self.decorator(**settings)(
                spread_coroutine if self.kind == "aio-coroutine" else spread
            )
        else:
            self.fn = self.decorator(**settings)(function)
        return self.fn

    def note(self, batch: dict[str, Any]) -> bool:
        self.batches.append(list(batch))
        if DECOY not in batch:
            self.seen.append(batch)
        return DECOY in batch


class Together:
    """A batched function of features, and calls that wait at the same time to share batches."""

    def __init__(self, compute: Callable[..., Any] = unchanged, **settings: Any) -> None:
        # features of each call of the function but the decoys
        self.seen: list[dict[str, Any]] = []
        self._running = threading.Event()
        self._go = threading.Event()

        def function(features: dict[str, Any], **extra: Any) -> Any:
            if DECOY in features:
                self._running.set()
                assert self._go.wait(BOUND), "nobody let the decoy through"
                if isinstance(settings.get("unpad"), dict):  # no declaration of decoys
                    raise RuntimeError("a decoy")
                return features
            self.seen.append(features)
            return compute(features, **extra)

        self.fn: Any = batched.inference.dynamically(**settings)(function)

    def answers(self, *calls: Mapping[str, Any], extra: Sequence[Any] = ()) -> list[Any]:
        """Return the result or exception of each call, all of which wait at the same time."""
        self._running.clear()
        self._go.clear()
        first = self.fn.submit(decoy())
        assert self._running.wait(BOUND), "the decoy did not run"
        waiting: list[Any] = []
        for number, call in enumerate(calls):
            try:
                waiting.append(self.fn.submit(call, **(extra[number] if extra else {})))
            except Exception as error:
                waiting.append(error)
        self._go.set()
        first.exception(BOUND)
        return [
            each if isinstance(each, Exception) else each.exception(BOUND) or each.result(BOUND)
            for each in waiting
        ]

    def results(self, *calls: Mapping[str, Any], extra: Sequence[Any] = ()) -> list[Any]:
        """Return the results of the calls. Raise the first exception among them."""
        answers = self.answers(*calls, extra=extra)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        self._go.set()
        self.fn.shutdown()


Make = Callable[..., Together]
"""The fixture `together`."""
