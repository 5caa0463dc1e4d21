"""User code that fails while an error is handled: only the callers of that batch get an error,
each its own.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched
import batched._execution.attempts
from batched._core.scheduler import Request
from batched._runtime.settling import complete
from stage import BOUND, Gate


class Unwelcome(BaseException):
    """What everything of a hostile error raises."""


def refuse(*_: object) -> Any:
    raise Unwelcome


METHODS = (
    "__str__",
    "__repr__",
    "__eq__",
    "__hash__",
    "__bool__",
    "__getattribute__",
    "__setattr__",
    "__reduce_ex__",
    "__reduce__",
    "__copy__",
    "with_traceback",
    "add_note",
)
PROPERTIES = (
    "__class__",
    "__cause__",
    "__context__",
    "__traceback__",
    "__suppress_context__",
    "__dict__",
    "__notes__",
    "args",
)
OF_THE_TYPE = ("__name__", "__mro__", "__flags__", "__reduce__", "__getattribute__")


def hostile(base: type[BaseException], member: str, of_type: bool) -> type[BaseException]:
    if of_type:
        body = {member: refuse if member == "__getattribute__" else property(refuse)}
        return type("Meta", (type,), body)("Hostile", (base,), {})  # type: ignore[no-any-return]
    made: Any = refuse if member in METHODS else property(refuse)
    return type("Hostile", (base,), {member: made})


HOSTILE = [
    *((member, False) for member in (*METHODS, *PROPERTIES)),
    *((member, True) for member in OF_THE_TYPE),
]

SETTINGS: list[dict[str, Any]] = [{}, {"on_oom": "split", "isolate_errors": True}]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return error


@pytest.fixture(params=HOSTILE, ids=lambda each: f"{'type' * each[1]}{each[0]}")
def member(request: pytest.FixtureRequest) -> tuple[str, bool]:
    each: tuple[str, bool] = request.param
    return each


@pytest.fixture(params=[Exception, BaseException])
def kind(request: pytest.FixtureRequest, member: tuple[str, bool]) -> type[BaseException]:
    return hostile(request.param, *member)


def told(answer: object, kind: type[BaseException]) -> bool:
    """Return whether the answer is an error of that kind."""
    return type(answer) is (kind if issubclass(kind, Exception) else batched.BatchFunctionError)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_hostile_error_reaches_its_callers_and_harms_no_other(
    kind: type[BaseException], settings: dict[str, Any]
) -> None:
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
        futures = [fn.submit("bad"), fn.submit("bad"), fn.submit("good", tag=1)]
        calls = [pool.submit(outcome, lambda: fn("bad")) for _ in range(2)]
        gate.opened.set()
        assert first.result(BOUND) == "first"
        answers = [future.exception(BOUND) for future in futures[:2]]
        answers += [outcome(futures[0].result), *(call.result(BOUND) for call in calls)]
        # not the answers, for pytest cannot show them either
        assert [told(answer, kind) for answer in answers] == [True] * 5
        assert futures[2].result(BOUND) == "good"
        assert fn("good") == "good"


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_cache_that_cannot_be_emptied_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(batched._execution.attempts, "free_cache", fail)
    gate = Gate()

    def work(items: list[Any]) -> list[Any]:
        gate(items)
        if len(items) > 1 or "bad" in items:
            raise MemoryError
        return items

    fn: Any = batched.dynamically(on_oom="split")(work)
    with fn:
        first = fn.submit("first")
        assert gate.entered.wait(BOUND)
        futures = [fn.submit(item) for item in ("good", "bad", "too")]
        gate.opened.set()
        assert first.result(BOUND) == "first"
        assert type(futures[1].exception(BOUND)) is MemoryError
        assert [future.result(BOUND) for future in futures[::2]] == ["good", "too"]


@pytest.fixture
def broken_log() -> Iterator[list[str]]:
    """Yield the list of logged messages, while each message meets a filter that raises."""
    messages: list[str] = []

    def broken(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        raise Unwelcome

    logger = logging.getLogger("batched")
    logger.addFilter(broken)
    yield messages
    logger.removeFilter(broken)


def test_a_log_that_fails_harms_nobody(broken_log: list[str]) -> None:
    def fail(_: object) -> None:
        raise ValueError

    fn: Any = batched.dynamically(on_batch=fail)(Gate())
    fn.__wrapped__.opened.set()
    with fn:
        future = fn.submit(1)
        future.add_done_callback(fail)
        assert future.result(BOUND) == 1
        for item in range(3):
            assert fn(item) == item
    assert any("on_batch" in message for message in broken_log)


def test_an_error_that_is_false_is_an_error_of_its_future() -> None:
    class Falsy(Exception):
        def __len__(self) -> int:
            return 0

    def work(items: list[Any]) -> list[Any]:
        raise Falsy

    fn: Any = batched.dynamically(work)
    future = fn.submit(1)
    with pytest.raises(Falsy):
        future.result(BOUND)
    fn.shutdown()


def test_a_join_that_fails_shows_its_caller_no_other_request() -> None:
    def join(request: Request, parts: list[Any]) -> Any:
        raise ValueError(parts)

    split, other = Request([1, 2], 2, "g"), Request([3], 1, "g")
    split.parts = [(0, 1), (1, 2)]
    assert complete([split, other], join, "fn") == 1
    assert split.error is not None
    frames = [frame for frame, _ in traceback.walk_tb(split.error.__traceback__)]
    assert [frame.f_code for frame in frames] == [join.__code__]
