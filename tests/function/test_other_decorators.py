"""Other decorators above and below the batching decorator, as `docs/calling.md` has them."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import pytest
import stamina
import tenacity
import typing_extensions
import wrapt
from opentelemetry import trace
from prometheus_client import Histogram

import batched

Decorator = Callable[[Any], Any]


def wraps(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return wrapper


def wraps_coroutine(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await func(*args, **kwargs)

    return wrapper


class Timer(contextlib.ContextDecorator, contextlib.nullcontext[None]):
    pass


timed = contextlib.contextmanager(lambda: iter([None]))


@contextlib.asynccontextmanager
async def timed_coroutine() -> Any:
    yield


@wrapt.decorator
def passed_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


BOTH = ABOVE, BELOW = "above", "below"


class Case(NamedTuple):
    """A decorator, and where it works on plain functions and on coroutine functions."""

    decorator: Decorator
    plain: tuple[str, ...] = BOTH
    coroutine: tuple[str, ...] = BOTH


waits = Histogram("waits", "Waits", registry=None)

CASES = {
    "`functools.wraps` on a `def` wrapper": Case(wraps, coroutine=(ABOVE,)),
    "`functools.wraps` on an `async def` wrapper": Case(wraps_coroutine, plain=()),
    "a wrapper without `functools.wraps`": Case(
        lambda f: lambda *a, **k: f(*a, **k), (ABOVE,), (ABOVE,)
    ),
    "`functools.cache`, `functools.lru_cache`": Case(functools.cache, (ABOVE,), (ABOVE,)),
    "`@contextlib.contextmanager`": Case(timed(), coroutine=(ABOVE,)),
    "`contextlib.ContextDecorator`": Case(Timer(), coroutine=(ABOVE,)),
    "`@contextlib.asynccontextmanager`": Case(timed_coroutine(), plain=()),
    "`abc.abstractmethod`": Case(abc.abstractmethod),
    "`typing.override`, `typing.final`": Case(typing_extensions.override),
    "`typing_extensions.deprecated`": Case(
        lambda func: typing_extensions.deprecated("use another", category=None)(func)
    ),
    "`unittest.mock.patch`": Case(unittest.mock.patch("os.sep", "/")),
    "`stamina.retry`": Case(stamina.retry(on=ConnectionError)),
    "`tenacity.retry`": Case(tenacity.retry(stop=tenacity.stop_after_attempt(2))),
    "`wrapt.decorator`": Case(passed_on),
    "OpenTelemetry, `start_as_current_span`": Case(
        trace.get_tracer(__name__).start_as_current_span("double")
    ),
    "`prometheus_client`, `.time()`": Case(waits.time(), (BELOW,), ()),
    "`pydantic.validate_call`": Case(pydantic.validate_call, (BELOW,), (BELOW,)),
}


def scale(self: Any, items: list[int], plus: int = 0) -> list[int]:
    return [self.factor * item + plus for item in items]


async def awaited_result(value: Any) -> Any:
    return await value


def result(value: Any) -> Any:
    return asyncio.run(awaited_result(value)) if inspect.isawaitable(value) else value


@pytest.mark.parametrize(
    ("name", "place", "coroutine"),
    [
        (name, place, coroutine)
        for name, case in CASES.items()
        for coroutine, allowed in ((False, case.plain), (True, case.coroutine))
        for place in allowed
    ],
)
def test_a_function_and_a_method_work_with_another_decorator(
    name: str, place: str, coroutine: bool
) -> None:
    other, batching = CASES[name].decorator, (batched.aio if coroutine else batched).dynamically

    def apply(plain: Any) -> Any:
        @functools.wraps(plain)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

        func = awaited if coroutine else plain
        return other(batching(func)) if place == ABOVE else batching(other(func))

    class Model:
        scaled = apply(scale)

        def __init__(self, factor: int) -> None:
            self.factor = factor

    function: Any = apply(lambda items, plus=0: [2 * item + plus for item in items])
    one, two = Model(2), Model(3)
    assert [result(function(2)), result(function(2, plus=1))] == [4, 5]
    calls = [one.scaled(2), two.scaled(2), one.scaled(2, plus=1)]
    assert [*map(result, calls)] == [4, 6, 5]
    assert result(Model.scaled(two, 5)) == 15
    if "cache" not in name:  # a list has no hash
        assert result(function([1, 2])) == result(one.scaled([1, 2])) == [2, 4]


def test_the_table_of_the_page_is_true() -> None:
    page = (Path(__file__).parents[2] / "docs" / "calling.md").read_text(encoding="utf-8")
    section = page.partition("\n## With other decorators\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {first: cells for first, *cells in rows} == {
        name: [", ".join(places) or "no" for places in (case.plain, case.coroutine)]
        for name, case in CASES.items()
    }
