"""An error reaches the callers of the items that failed, and no other caller.

Tests of `isolate_errors` are in `test_isolation.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import anyio
import pytest

import batched
from batched._execution.exceptions import copy_exception
from stage import BOUND, Gate, Stage

pytestmark = pytest.mark.anyio

Make = Callable[[], Any]
"""Function that returns an error, or raises it."""


class Refused(Exception):
    """An error of the user's own."""


def failing(make: Make) -> Callable[[list[Any]], list[Any]]:
    def compute(items: list[Any]) -> list[Any]:
        if "bad" in items:
            raise make()
        return items

    return compute


async def test_an_exception_in_an_items_place_fails_that_item_alone(stage: Stage) -> None:
    stage.decorate(lambda items: [KeyError() if i == "bad" else i for i in items], gated=True)
    async with stage.busy() as callers:
        for item in ("good", "bad", ["also", "good"], ["one", "bad", "among"]):
            await callers.call(item)
        stage.let_through(2)
    assert len(stage.batches) == 2
    assert callers.answers[1] == "good"
    assert isinstance(callers.answers[2], KeyError)
    assert callers.answers[3] == ["also", "good"]
    assert isinstance(callers.answers[4], KeyError)


async def test_a_list_of_which_several_parts_fail_is_one_failed_call(stage: Stage) -> None:
    settings = {"batch_size": 2, "isolate_errors": True, "max_concurrent_batches": 2}
    stage.decorate(failing(Refused), gated=True, **settings)
    async with stage.callers() as callers:
        await callers.call(["good", "bad", "good", "bad"])
        await stage.running(2)
        stage.let_through(10)
    assert isinstance(callers.answers[0], Refused)
    await stage.until(lambda: stage.fn.stats.in_flight == 0)
    assert stage.fn.stats.errors == 1


async def test_a_call_whose_first_part_failed_is_not_computed_further(stage: Stage) -> None:
    stage.decorate(failing(Refused), batch_size=2)
    with pytest.raises(Refused):
        await stage.call(["bad", 1, 2, 3, 4, 5])
    assert stage.batches == [["bad", 1]]
    assert stage.fn.stats.queue_size == 0


async def test_items_without_memory_for_all_run_in_parts_and_fail_alone(stage: Stage) -> None:
    def compute(items: list[Any]) -> list[Any]:
        if len(items) > 2 or "bad" in items:
            raise MemoryError
        return items

    stage.decorate(compute, gated=True, on_oom="split")
    async with stage.busy() as callers:
        for item in ("one", "bad", ["two", "three"], "four"):
            await callers.call(item)
        stage.let_through(20)
    assert isinstance(callers.answers.pop(2), MemoryError)
    assert callers.answers == {0: "busy", 1: "one", 3: ["two", "three"], 4: "four"}


async def test_a_length_that_raises_is_an_error_of_its_caller_alone(stage: Stage) -> None:
    def length(item: Any) -> int:
        if item == 13:
            raise LookupError("no length")
        return 1

    stage.decorate(gated=True, length=length)
    async with stage.busy() as callers:
        await callers.call(1)
        bad = [await callers.call(13), await callers.call([2, 13])]
        assert [type(callers.answers[number]) for number in bad] == [LookupError, LookupError]
        await callers.call(3)
        stage.let_through(2)
    assert stage.batches[1:] == [[1, 3]]
    assert [callers.answers[number] for number in (1, 4)] == [("done", 1), ("done", 3)]


# --- an exception of one's own


class KeywordOnly(Exception):
    """Error with arguments that differ from the arguments of its constructor."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code", "never_set")

    def __init__(self, code: int | None) -> None:
        self.code = code


class Uncopyable(ValueError):
    """Error without a constructor, as in compiled libraries."""

    def __new__(cls, *_: object) -> Self:
        raise TypeError("it is made elsewhere")


def statement(code: str) -> Make:
    """Return a function that runs `code`."""
    return lambda: exec(code, {})


attribute = statement("object().missing")


def group() -> None:
    try:
        attribute()
    except AttributeError as error:
        raise ExceptionGroup("several", [error, KeywordOnly(code=2)]) from error


def from_none() -> None:
    try:
        attribute()
    except AttributeError:
        raise KeyError("gone") from None


keyword_only = partial(KeywordOnly, code=3)
slotted = partial(Slotted, None)
uncopyable = partial(ValueError.__new__, Uncopyable, "several")

COPIED: list[Any] = [
    *(attribute, group, keyword_only, slotted, from_none),
    statement("open('/nowhere/at all')"),
    statement("b'\\xff'.decode()"),
]
"""Errors that can be copied."""


async def test_each_caller_gets_an_exception_of_its_own(stage: Stage) -> None:
    """The function may keep the exception that it returned, and return it again."""
    original: Any = Refused("no")
    original.code = 3
    original.add_note("of all")
    stage.decorate(lambda items: [original for _ in items], gated=True)
    async with stage.callers() as callers:
        await callers.call("bad")
        await stage.running(1)
        for _ in range(4):
            await callers.call("bad")
        stage.let_through(2)
    errors = [callers.answers[number] for number in range(5)]
    assert len({id(error) for error in [original, *errors]}) == 6
    for error in errors[::4]:
        error.add_note("of one")
        error.code = 4
        error.__cause__ = ValueError()
    for error in [original, *errors[1:4]]:
        assert (type(error), error.args, error.__cause__) == (Refused, ("no",), None)
        assert (error.code, error.__notes__[0]) == (3, "of all")
        assert "of one" not in error.__notes__
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors}) == 1
    assert stage.fn.stats.errors == 5


async def seen(call: Callable[[], Any], number: int) -> str:
    """Return all that the caller with that number sees of the error of its call."""
    try:
        await call()
    except Exception as error:
        own = [
            frame.f_locals["number"]
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code is seen.__code__
        ]
        assert own == [number], "frames, and locals, of others"
        return "".join(traceback.format_exception(error))
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("make", [group, from_none, keyword_only, uncopyable])
async def test_a_caller_in_company_sees_what_a_lone_one_sees(stage: Stage, make: Make) -> None:
    if make is uncopyable and stage.calls_from_threads:
        pytest.skip("threads that raise one object at the same moment see frames of each other")
    stage.decorate(failing(make), gated=True)
    texts: dict[int, str] = {}

    async def one(number: int) -> None:
        texts[number] = await seen(lambda: stage.call("bad"), number)

    stage.let_through()
    await one(0)
    async with stage.callers() as callers:
        await callers.call("busy")
        await stage.running(2)
        async with anyio.create_task_group() as group:
            for number in range(1, 5):
                group.start_soon(one, number)
            await stage.queued(4)
            stage.let_through(2)
    assert list(texts.values()) == [texts[0]] * 5


@pytest.mark.parametrize("make", [keyword_only, uncopyable])
def test_futures_of_one_batch_raise_no_frames_of_each_other(make: Make) -> None:
    gate = Gate()
    fn: Any = batched.dynamically(lambda items: failing(make)(gate(items)))
    fn.submit("busy")
    assert gate.entered.wait(BOUND)
    futures = [fn.submit("bad") for _ in range(4)]
    gate.opened.set()
    concurrent.futures.wait(futures, timeout=BOUND)  # the worker touches the error no more

    async def call(number: int) -> None:
        futures[number].result(BOUND)

    texts = [asyncio.run(seen(lambda n=number: call(n), number)) for number in range(4)]  # type: ignore[misc]  # of the default
    assert texts == [texts[0]] * 4
    fn.shutdown()


@pytest.mark.parametrize("make", COPIED)
def test_a_copy_equals_the_original(make: Make) -> None:
    def state(error: Any) -> list[Any]:
        public = [name for name in dir(error) if not name.startswith("__")]
        values = {n: v for n in public if not callable(v := getattr(error, n, "unset"))}
        texts = [str(error), repr(error), *traceback.format_exception(error)]
        return [type(error), values, error.args, texts]

    with pytest.raises(Exception) as info:  # of every kind
        raise make()
    error: Any = info.value
    twin = copy_exception(error)
    assert twin is not error
    assert state(twin) == state(error)
    assert twin.__cause__ is error.__cause__
    assert twin.__suppress_context__ is error.__suppress_context__


def test_an_error_whose_state_cannot_be_set_is_not_copied() -> None:
    numbers = iter("12")

    class Numbered(ExceptionGroup[Exception]):  # its message is read-only
        def __new__(cls, message: str, parts: list[Exception]) -> Self:
            return super().__new__(cls, f"{message} {next(numbers)}", parts)

    error = Numbered("part", [ValueError()])
    assert copy_exception(error) is error


# --- errors that callers would mistake, and wrong outputs


@pytest.mark.parametrize(
    "error",
    [
        *(SystemExit(3), StopIteration(1), StopAsyncIteration()),
        *(asyncio.CancelledError(), concurrent.futures.CancelledError()),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_exceptions_that_must_not_reach_a_caller_are_wrapped_and_the_next_call_is_served(
    stage: Stage, error: BaseException
) -> None:
    stage.decorate(failing(lambda: error))
    # Python itself turns a StopIteration of a coroutine into a RuntimeError
    kind = RuntimeError if type(error) is StopIteration else batched.BatchFunctionError
    with pytest.raises(kind) as raised:
        await stage.call("bad")
    cause = raised.value.__cause__
    assert cause is not None
    assert (type(cause), cause.args) == (type(error), error.args)
    assert await stage.call("good") == "good"


async def test_one_result_too_few_is_told_to_every_caller_of_the_batch(
    stage: Stage,
) -> None:
    stage.decorate(lambda items: items[1:] if 13 in items else items, gated=True)
    async with stage.busy() as callers:
        short = [await callers.call(13), await callers.call([1, 2])]
        stage.let_through(2)
    for number in short:
        error = callers.answers[number]
        assert isinstance(error, batched.BatchSizeMismatch)
        assert (error.expected, error.actual) == (3, 2)
    assert stage.fn.stats.errors == 2
    stage.let_through()
    assert await stage.call(3) == 3


# --- code of users that fails while an error is handled


METHODS = ["__str__", "__eq__", "__bool__", "__setattr__", "__getattribute__"]
PROPERTIES = ["__class__", "__cause__", "__traceback__", "__dict__", "__notes__", "args"]


def forbid(*_: object) -> Any:
    raise SystemExit


@pytest.mark.parametrize(
    ("base", "settings"),
    [(Exception, {}), (Exception, {"isolate_errors": True}), (BaseException, {})],
)
@pytest.mark.parametrize("member", METHODS + PROPERTIES)
def test_a_hostile_error_reaches_its_callers_and_harms_no_other(
    base: type[BaseException], member: str, settings: dict[str, Any]
) -> None:
    body = {member: forbid if member in METHODS else property(forbid)}
    kind: Any = type("Hostile", (base,), body)
    expected = kind if base is Exception else batched.BatchFunctionError
    gate = Gate()

    def work(items: list[Any], tag: int = 0) -> list[Any]:
        gate(items)
        if "bad" in items:
            raise kind
        return items

    fn: Any = batched.dynamically(batch_size=2, **settings)(work)
    with ThreadPoolExecutor(4) as pool, fn:
        first = fn.submit("first")
        assert gate.entered.wait(BOUND)
        bad = [fn.submit("bad"), fn.submit("bad"), pool.submit(fn, "bad"), pool.submit(fn, "bad")]
        good = fn.submit("good", tag=1)
        gate.opened.set()
        assert first.result(BOUND) == "first"
        bad.append(pool.submit(bad[0].result))
        # not the answers, for pytest cannot show them either
        assert [type(each.exception(BOUND)) is expected for each in bad] == [True] * 5
        assert good.result(BOUND) == "good"
        assert fn("good") == "good"


def test_a_log_that_fails_harms_nobody() -> None:
    messages: list[str] = []

    def broken(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        raise SystemExit

    logging.getLogger("batched").addFilter(broken)
    try:
        fn: Any = batched.dynamically(on_batch=forbid)(sorted)
        assert [fn(item) for item in range(3)] == [0, 1, 2]
        fn.shutdown()
    finally:
        logging.getLogger("batched").removeFilter(broken)
    assert any("on_batch" in message for message in messages)
