"""Batcher of one episode: a function with planned faults, and settings drawn at random."""

from __future__ import annotations

import functools
import math
import random
import threading
from typing import Any

import anyio
import anyio.lowlevel
import numpy

import batched
from batched.stats import BatchRecord
from soak.books import Books, Call
from soak.faults import (
    BATCH_KINDS,
    BLOCKING,
    HOOK,
    ITSELF,
    LENGTH,
    RAISED,
    RETURNED,
    Faults,
    Injected,
    idle,
)

KINDS = ("threads", "aio-plain", "aio-coroutine")
"""Kinds of callers and of functions; each with items and with
features.
"""


class Subject:
    """Batched function with its plan of faults and its books."""

    def __init__(
        self,
        rng: random.Random,
        name: str,
        *,
        kind: str | None = None,
        features: bool | None = None,
        limited: bool = True,
        **fixed: Any,
    ) -> None:
        self.name = name
        self.kind = kind or rng.choice(KINDS)
        self.features = rng.random() < 0.3 if features is None else features
        self.spread = False  # whether features are passed by keyword, or parts of items apart
        self.coroutine = self.kind == "aio-coroutine"
        self.settings = {**self._drawn(rng, limited), **fixed}
        self.unpack = self.settings.get("unpack", False)
        splits = self.settings.get("on_oom", "split" if self.features else "raise") == "split"
        memory = rng.choice([1, 2, 5]) if rng.random() < 0.05 else 1 << 30
        self.faults = Faults(
            splits=splits, memory=memory, isolates=self.settings.get("isolate_errors", False)
        )
        self.books = Books(self.faults)
        self.books.queue_timeout = self.settings.get("queue_timeout_ms", math.inf) / 1e3
        self.books.refuses = self.settings.get("on_full") == "raise"
        self.books.runs_apart = self.features and self.settings.get("unpad", "auto") == "auto"
        self.delay = rng.choice([0.0, 0.0, 0.0005, 0.003])  # time of some batches (s)
        self.gate = threading.Event()  # a batch with an item of `held` waits for it
        self.held: set[int] = set()
        self.over = False  # whether the batcher stays closed
        if self.settings.pop("length", None):
            self.settings["length"] = self._row_length
            self.kinds = [*BATCH_KINDS, LENGTH]
        else:
            self.kinds = [*BATCH_KINDS]
        if not self.features:
            self.kinds.append(RETURNED)
        if self.kind != "aio-plain":
            self.kinds.append(ITSELF)
        if "on_batch" in self.settings:
            self.settings["on_batch"] = self._hook
            self.books.observed = []
        self.fn: Any = self._decorated()

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.kind}, {'features' if self.features else 'items'}, {self.settings}"
        )

    def argument(self, call: Call) -> Any:
        """Return the argument of a call."""
        if self.features:
            numbers = numpy.arange(call.items.start, call.items.stop)
            return {"number": numbers, "tokens": numbers[:, None] + numpy.arange(call.length)}
        items: list[Any] = [(item, -item) if self.unpack else item for item in call.items]
        return items * self._times(call) if call.listed else items[0]

    def arguments(self, call: Call) -> tuple[Any, ...]:
        """Return the positional arguments of a call, with the parts of one item apart."""
        argument = self.argument(call)
        return argument if type(argument) is tuple else (argument,)

    def _times(self, call: Call) -> int:
        """Return how often each item is in the list of a call; a copied tag would not compare."""
        return 2 if self.settings.get("dedupe") and type(call.tag) is int else 1

    def is_right(self, call: Call, answer: Any) -> bool:
        """Return whether `answer` is the result of `call`."""
        if self.features:
            wanted = self.argument(call)
            tag = call.tag if isinstance(call.tag, int) else -1
            return (
                isinstance(answer, dict)
                and all(
                    numpy.array_equal(answer[name], value * 3 + 1) for name, value in wanted.items()
                )
                and answer["tag"].tolist() == [tag] * call.size
            )
        rows = answer if call.listed else [answer]
        wanted = [*call.items] * (self._times(call) if call.listed else 1)
        return len(rows) == len(wanted) and all(
            type(row) is tuple and row[:2] == (item, item * 3 + 1) and row[2] is call.tag
            for row, item in zip(rows, wanted, strict=True)
        )

    def _decorated(self) -> Any:
        if self.features:
            decorate = (
                batched.inference if self.kind == "threads" else batched.aio.inference
            ).dynamically
        else:
            decorate = (batched if self.kind == "threads" else batched.aio).dynamically
        compute = self._features if self.features else self._items

        def plain(items: Any, tag: Any = 0) -> Any:
            numbers = self._numbers(items)
            self.faults.enter(numbers)
            if self.faults.plan and any(self.faults.plan.get(item) == ITSELF for item in numbers):
                self._expect_refusal(functools.partial(self.fn, self._again(items)))
            if numbers[0] % 7 == 0:
                idle(self.delay)
            if not self.held.isdisjoint(numbers):
                self.gate.wait()
            return compute(items, numbers, tag)

        async def coroutine(items: Any, tag: Any = 0) -> Any:
            numbers = self._numbers(items)
            self.faults.enter(numbers)
            if self.faults.plan and any(self.faults.plan.get(item) == ITSELF for item in numbers):
                try:
                    await self.fn(self._again(items))
                except BaseException as error:
                    self._note_refusal(error)
                else:
                    self._note_refusal(None)
            if numbers[0] % 7 == 0:
                await (anyio.sleep(self.delay) if self.delay else anyio.lowlevel.checkpoint())
            if not self.held.isdisjoint(numbers):
                while not self.gate.is_set():  # noqa: ASYNC110  # set by any thread
                    await anyio.sleep(0.001)
            return compute(items, numbers, tag)

        def spread(number: Any, tokens: Any, tag: Any = 0) -> Any:
            return plain({"number": number, "tokens": tokens}, tag)

        async def spread_coroutine(number: Any, tokens: Any, tag: Any = 0) -> Any:
            return await coroutine({"number": number, "tokens": tokens}, tag)

        def parts(items: list[int], opposite: list[int], tag: Any = 0) -> Any:
            assert opposite == [-item for item in items]
            return plain(items, tag)

        async def parts_coroutine(items: list[int], opposite: list[int], tag: Any = 0) -> Any:
            assert opposite == [-item for item in items]
            return await coroutine(items, tag)

        if self.unpack:
            self.spread = True
            return decorate(name=self.name, **self.settings)(
                parts_coroutine if self.coroutine else parts
            )
        if self.settings.get("spread_kwargs"):
            self.spread = True
            return decorate(name=self.name, **self.settings)(
                spread_coroutine if self.coroutine else spread
            )
        return decorate(name=self.name, **self.settings)(coroutine if self.coroutine else plain)

    def _numbers(self, items: Any) -> list[int]:
        numbers: list[int] = items["number"].tolist() if self.features else items
        return numbers

    def _again(self, items: Any) -> Any:
        return [(item, -item) for item in items] if self.unpack else items

    def _items(self, _: Any, numbers: list[int], tag: Any) -> Any:
        return self.faults.leave(
            numbers, [(item, item * 3 + 1, tag) for item in numbers], _longer_list
        )

    def _features(self, features: Any, numbers: list[int], tag: Any) -> Any:
        output = {name: value * 3 + 1 for name, value in features.items()}
        output["tag"] = numpy.full(len(numbers), tag if isinstance(tag, int) else -1)
        return self.faults.leave(numbers, output, _longer_arrays)

    def _expect_refusal(self, call: Any) -> None:
        try:
            call()
        except BaseException as error:
            self._note_refusal(error)
        else:
            self._note_refusal(None)

    def _note_refusal(self, error: BaseException | None) -> None:
        self.faults.injected.append(ITSELF)
        if not isinstance(error, RuntimeError):
            self.books.blame("wrong", f"a function that called itself got {error!r}")

    def _row_length(self, row: Any) -> int:
        number = row["number"] if self.features else row[0] if self.unpack else row
        return self.faults.length(int(number))

    def _hook(self, record: BatchRecord) -> None:
        assert self.books.observed is not None
        self.books.observed.append(record.size)
        if (
            record.name != self.name
            or not 0 < record.calls <= record.size
            or not 0 <= record.failed <= record.size
        ):
            self.books.blame("wrong", f"{record!r} of {self}")
        if record.size % 7 == 1:
            self.block()
        if record.size % 5 == 0:
            self.faults.injected.append(HOOK)
            raise (RAISED["raised hostile exception"]() if record.size % 2 else Injected(HOOK))

    def block(self, _: object = None) -> None:
        """Call the function and wait. On a worker the call must be refused."""
        fn = self.fn
        if self.kind != "threads" or fn is None:
            return
        call = self.books.begin(length=1)
        thread = threading.current_thread().name
        on_worker = thread.startswith(f"batched-{self.name}-") and not thread.endswith("-callbacks")
        try:
            answer = fn(*self.arguments(call))
        except BaseException as error:
            if on_worker and type(error) is RuntimeError:
                self.faults.injected.append(BLOCKING)
                self.books.end(call, "refused")
            else:
                self.books.failed(call, error)
        else:
            self.books.answered(call, self.is_right(call, answer) and not on_worker, answer)

    def _drawn(self, rng: random.Random, limited: bool) -> dict[str, Any]:
        """Return random settings, most of them the usual ones."""
        drawn: dict[str, Any] = {
            "batch_size": rng.choice([1, 2, 3, 8, 32, 64]),
            "timeout_ms": rng.choice([0.0, 0.5, 2.0]),
            "small_batch_threshold": rng.choice([0, 1, 8, 8, 100]),
            "flush": rng.choice(["auto", "auto", "eager", "window"]),
            "max_concurrent_batches": rng.choice([1, 1, 1, 2, 4]),
            "length": rng.random() < 0.3,
        }
        if rng.random() < 0.3:
            drawn["on_oom"] = rng.choice(["split", "raise"])
        if drawn["length"] and rng.random() < 0.3:
            drawn["max_batch_tokens"] = rng.choice([1, 100, 1000])
        if self.features:
            drawn["pad_to_multiple_of"] = rng.choice([1, 1, 8])
            drawn["padding_side"] = rng.choice(["right", "left"])
            drawn["spread_kwargs"] = rng.random() < 0.3
            drawn["unpad"] = rng.choice(["auto", {"tokens": {1: "tokens"}}])
        else:
            drawn["dedupe"] = rng.random() < 0.2
            drawn["unpack"] = rng.random() < 0.2
        if limited and rng.random() < 0.2:
            drawn["max_queue_size"] = rng.choice([1, 4, 50])
            drawn["on_full"] = rng.choice(["wait", "raise"])
        if limited and rng.random() < 0.2:
            drawn["queue_timeout_ms"] = rng.choice([0.5, 2.0, 1000.0])
        if rng.random() < 0.2:
            drawn["isolate_errors"] = True
        if rng.random() < 0.2:
            drawn["on_batch"] = True
        return drawn


def _longer_list(output: list[Any], change: int) -> list[Any]:
    return output[:-1] if change < 0 else [*output, output[-1]]


def _longer_arrays(output: dict[str, Any], change: int) -> dict[str, Any]:
    return {
        name: value[:-1] if change < 0 else numpy.concatenate([value, value[-1:]])
        for name, value in output.items()
    }
