"""Batcher of one episode: a function with planned faults, and settings drawn at random."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import anyio
import numpy

import batched
from batched.stats import BatchRecord
from soak.books import Books, Call
from soak.faults import BATCH_KINDS, HOOK, LENGTH, RETURNED, Faults, Hostile, Injected

KINDS = ("threads", "aio-plain", "aio-coroutine")
"""Kinds of callers and of functions; each with items and with features."""


class Subject:
    """Batched function with its plan of faults and its books."""

    def __init__(self, rng: random.Random, name: str, kind: str = "", **fixed: Any) -> None:
        self.name = name
        self.kind = kind or rng.choice(KINDS)
        self.features = rng.random() < 0.3
        self.coroutine = self.kind == "aio-coroutine"
        self.settings = {**self._drawn(rng), **fixed}
        self.faults = Faults(
            splits=self.settings.get("on_oom", "split" if self.features else "raise") == "split",
            isolates=self.settings.get("isolate_errors", False),
            memory=rng.choice([1, 2, 5]) if rng.random() < 0.05 else 1 << 30,
        )
        self.books = Books(self.faults)
        self.books.queue_timeout = self.settings.get("queue_timeout_ms", math.inf) / 1e3
        self.books.refuses = self.settings.get("on_full") == "raise"
        self.books.runs_apart = self.features and self.settings["unpad"] == "auto"
        self.delay = rng.choice([0.0, 0.0, 0.0005, 0.003])  # time of some batches (s)
        self.over = False  # whether the batcher stays closed
        self.kinds = [*BATCH_KINDS]
        if not self.features:
            self.kinds.append(RETURNED)
        if "length" in self.settings:
            self.kinds.append(LENGTH)
        if self.settings.get("on_batch"):
            self.books.observed = []
        self.fn: Any = self._decorated()

    def __str__(self) -> str:
        items = "features" if self.features else "items"
        return f"{self.name}: {self.kind}, {items}, {self.settings}"

    def argument(self, call: Call) -> Any:
        """Return the argument of a call."""
        if self.features:
            numbers = numpy.arange(call.items.start, call.items.stop)
            return {"number": numbers, "tokens": numbers[:, None] + numpy.arange(call.length)}
        return [*call.items] * self._times if call.listed else call.items.start

    @property
    def _times(self) -> int:
        """Number of times that each item is in a list."""
        return 2 if self.settings.get("dedupe") else 1

    def is_right(self, call: Call, answer: Any) -> bool:
        """Return whether `answer` is the result of `call`."""
        if self.features:
            wanted = {name: 3 * value + 1 for name, value in self.argument(call).items()}
            wanted["tag"] = numpy.full(call.size, call.tag)
            return isinstance(answer, dict) and all(
                numpy.array_equal(answer[name], value) for name, value in wanted.items()
            )
        rows = answer if call.listed else [answer]
        numbers = [*call.items] * (self._times if call.listed else 1)
        return bool(rows == [(item, 3 * item + 1, call.tag) for item in numbers])

    def _decorated(self) -> Any:
        library: Any = batched if self.kind == "threads" else batched.aio
        decorate = (library.inference if self.features else library).dynamically

        def plain(items: Any, tag: int = 0) -> Any:
            numbers = self._enter(items)
            if numbers[0] % 7 == 0:
                time.sleep(self.delay)
            return self._leave(items, numbers, tag)

        async def coroutine(items: Any, tag: int = 0) -> Any:
            numbers = self._enter(items)
            if numbers[0] % 7 == 0:
                await anyio.sleep(self.delay)
            return self._leave(items, numbers, tag)

        return decorate(name=self.name, **self.settings)(coroutine if self.coroutine else plain)

    def _enter(self, items: Any) -> list[int]:
        numbers: list[int] = items["number"].tolist() if self.features else items
        self.faults.enter(numbers)
        return numbers

    def _leave(self, items: Any, numbers: list[int], tag: int) -> Any:
        output: Any = [(item, 3 * item + 1, tag) for item in numbers]
        if self.features:
            output = {name: 3 * value + 1 for name, value in items.items()}
            output["tag"] = numpy.full(len(numbers), tag)
        return self.faults.leave(numbers, output)

    def _length(self, row: Any) -> int:
        return self.faults.length(int(row["number"] if self.features else row))

    def _observe(self, record: BatchRecord) -> None:
        assert self.books.observed is not None
        self.books.observed.append(record.size)
        if record.name != self.name or not max(record.calls, record.failed) <= record.size:
            self.books.blame("wrong", f"{record!r} of {self}")
        if record.size % 5 == 0:
            self.faults.injected.append(HOOK)
            raise Hostile if record.size % 2 else Injected(HOOK)

    def _drawn(self, rng: random.Random) -> dict[str, Any]:
        """Return random settings, most of them the usual ones."""
        drawn: dict[str, Any] = {
            "batch_size": rng.choice([1, 2, 3, 8, 32, 64]),
            "timeout_ms": rng.choice([0.0, 0.5, 2.0]),
            "small_batch_threshold": rng.choice([0, 1, 8, 8, 100]),
            "flush": rng.choice(["auto", "auto", "eager", "window"]),
            "max_concurrent_batches": rng.choice([1, 1, 1, 2, 4]),
        }
        if rng.random() < 0.3:
            drawn["length"] = self._length
            drawn["max_batch_tokens"] = rng.choice([None, None, 1, 100, 1000])
        if self.features:
            drawn["pad_to_multiple_of"] = rng.choice([1, 1, 8])
            drawn["padding_side"] = rng.choice(["right", "left"])
            drawn["unpad"] = rng.choice(["auto", {"tokens": {1: "tokens"}}])
        else:
            drawn["dedupe"] = rng.random() < 0.2
        for settings in (
            {"on_oom": rng.choice(["split", "raise"])},
            {"max_queue_size": rng.choice([1, 4, 50]), "on_full": rng.choice(["wait", "raise"])},
            {"queue_timeout_ms": rng.choice([1.0, 2.0, 1000.0])},
            {"isolate_errors": True},
            {"on_batch": self._observe},
        ):
            if rng.random() < 0.2:
                drawn |= settings
        return drawn
