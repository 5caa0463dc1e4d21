"""Decorators of Python and of other libraries, above and below the batching decorator.

The cases are the table of `docs/calling.md`, "With other decorators".
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import functools
import inspect
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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


def nameless(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: func(*args, **kwargs)


@contextlib.contextmanager
def timed() -> Iterator[None]:
    yield


class Timer(contextlib.ContextDecorator):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.asynccontextmanager
async def timed_coroutine() -> Any:
    yield


@wrapt.decorator
def passed_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


ABOVE, BELOW = "above", "below"
BOTH = (ABOVE, BELOW)


class Case(NamedTuple):
    decorator: Decorator
    plain: tuple[str, ...] = BOTH
    """Places on a plain function or method that work: above or below the batching decorator."""
    coroutine: tuple[str, ...] = BOTH
    """Places on a coroutine function or method that work."""


retry = stamina.retry(on=ConnectionError, attempts=2, wait_initial=0, wait_jitter=0)
waits = Histogram("waits", "Waits", registry=None)

CASES = {
    "`functools.wraps` on a `def` wrapper": Case(wraps, coroutine=(ABOVE,)),
    "`functools.wraps` on an `async def` wrapper": Case(wraps_coroutine, plain=()),
    "a wrapper without `functools.wraps`": Case(nameless, (ABOVE,), (ABOVE,)),
    "`functools.cache`, `functools.lru_cache`": Case(functools.cache, (ABOVE,), (ABOVE,)),
    "`@contextlib.contextmanager`": Case(lambda func: timed()(func), coroutine=(ABOVE,)),
    "`contextlib.ContextDecorator`": Case(Timer(), coroutine=(ABOVE,)),
    "`@contextlib.asynccontextmanager`": Case(lambda func: timed_coroutine()(func), plain=()),
    "`abc.abstractmethod`": Case(abc.abstractmethod),
    "`typing.override`, `typing.final`": Case(typing_extensions.override),
    "`typing_extensions.deprecated`": Case(
        lambda func: typing_extensions.deprecated("use another", category=None)(func)
    ),
    "`unittest.mock.patch`": Case(unittest.mock.patch("os.sep", "/")),
    "`stamina.retry`": Case(retry),
    "`tenacity.retry`": Case(tenacity.retry(stop=tenacity.stop_after_attempt(2))),
    "`wrapt.decorator`": Case(passed_on),
    "OpenTelemetry, `start_as_current_span`": Case(
        trace.get_tracer(__name__).start_as_current_span("double")
    ),
    "`prometheus_client`, `.time()`": Case(waits.time(), (BELOW,), ()),
    "`pydantic.validate_call`": Case(pydantic.validate_call, (BELOW,), (BELOW,)),
}


def features(*widths: int) -> dict[str, Any]:
    return {"input_ids": [np.ones(width, int) for width in widths]}


def double(items: list[int], plus: int = 0) -> list[int]:
    return [2 * item + plus for item in items]


def total(features: dict[str, Any]) -> Any:
    return features["input_ids"].sum(axis=1)


def scale(self: Any, items: list[int], plus: int = 0) -> list[int]:
    return [self.factor * item + plus for item in items]


def scaled_total(self: Any, features: dict[str, Any]) -> Any:
    return self.factor * features["input_ids"].sum(axis=1)


class Place(NamedTuple):
    """One decorator above or below the batching decorator, on functions of one kind."""

    name: str
    place: str
    coroutines: bool

    @property
    def caches(self) -> bool:
        """Whether arguments need a hash, which a list and a dict do not have."""
        return "cache" in self.name

    def of_items(self, func: Any) -> Any:
        return self._apply((batched.aio if self.coroutines else batched).dynamically, func)

    def of_features(self, func: Any) -> Any:
        module: Any = batched.aio if self.coroutines else batched
        return self._apply(module.inference.dynamically, func)

    def _apply(self, batching: Decorator, func: Any) -> Any:
        other = CASES[self.name].decorator
        if self.coroutines:
            func = coroutine_function(func)
        return other(batching(func)) if self.place == ABOVE else batching(other(func))


def coroutine_function(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return awaited


def result(value: Any) -> Any:
    async def main() -> Any:
        return await value

    return asyncio.run(main()) if inspect.isawaitable(value) else value


places = pytest.mark.parametrize(
    "place",
    [
        Place(name, place, coroutines)
        for name, case in CASES.items()
        for coroutines, allowed in ((False, case.plain), (True, case.coroutine))
        for place in allowed
    ],
    ids=lambda place: f"{place.name} {place.place}{' coroutine' if place.coroutines else ''}",
)


@places
def test_a_function_keeps_its_results_with_another_decorator(place: Place) -> None:
    of_items, of_features = place.of_items(double), place.of_features(total)
    calls: list[Callable[[], Any]] = [
        lambda: of_items(2),
        lambda: of_items(3),
        lambda: of_items(2, plus=1),
    ]
    assert [result(call()) for call in calls] == [4, 6, 5]
    if not place.caches:
        assert result(of_items([1, 2])) == [2, 4]
        assert list(result(of_features(features(2, 3)))) == [2, 3]


@places
def test_a_method_keeps_its_instance_with_another_decorator(place: Place) -> None:
    class Model:
        of_items = place.of_items(scale)
        of_features = place.of_features(scaled_total)

        def __init__(self, factor: int) -> None:
            self.factor = factor

    class Derived(Model):
        pass

    one, two = Model(2), Derived(3)
    calls: list[Callable[[], Any]] = [
        lambda: one.of_items(2),
        lambda: two.of_items(2),
        lambda: Model.of_items(two, 5),
    ]
    assert [result(call()) for call in calls] == [4, 6, 15]
    assert result(one.of_items(2, plus=1)) == 5
    if not place.caches:
        assert result(one.of_items([1, 2])) == [2, 4]
        assert list(result(one.of_features(features(2, 3)))) == [4, 6]


def table(title: str) -> dict[str, list[str]]:
    """Return the cells of the table in a section of `docs/calling.md`, by the first cell."""
    page = (Path(__file__).parents[2] / "docs" / "calling.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: cells for first, *cells in rows}


def test_the_table_of_the_page_is_true() -> None:
    stated = table("With other decorators")
    tried = {
        name: [", ".join(places) or "no" for places in (case.plain, case.coroutine)]
        for name, case in CASES.items()
    }
    assert stated == tried


def test_a_retry_above_repeats_a_call_and_one_below_a_batch() -> None:
    class Model:
        def __init__(self) -> None:
            self.batches: list[list[int]] = []

        def double(self, items: list[int]) -> list[int]:
            self.batches.append(items)
            if len(self.batches) == 1:
                raise ConnectionError
            return [2 * item for item in items]

        above: Any = retry(batched.dynamically(double))
        below: Any = batched.dynamically(retry(double))
        tenacious: Any = tenacity.retry(stop=tenacity.stop_after_attempt(2))(above.__wrapped__)

    for name in ("above", "below", "tenacious"):
        model = Model()
        assert getattr(model, name)(4) == 8
        assert model.batches == [[4], [4]]


def test_a_cache_above_answers_a_second_call_for_the_same_instance_alone() -> None:
    batches = []

    class Model:
        @functools.lru_cache(8)  # noqa: B019  # the instances live as long as the test
        @batched.dynamically
        def double(self, items: list[int]) -> list[int]:
            batches.append(items)
            return [2 * item for item in items]

    one, two = Model(), Model()
    assert [one.double(4), one.double(4), two.double(4)] == [8, 8, 8]
    assert batches == [[4], [4]]


class Kinds:
    """Class methods and static methods, with the batching decorator above and below."""

    @staticmethod
    @batched.dynamically
    def static_above(items: list[int], plus: int) -> list[int]:
        return [item + plus for item in items]

    @batched.dynamically
    @staticmethod
    def static_below(items: list[int], plus: int) -> list[int]:
        return [item + plus for item in items]

    @classmethod
    @batched.dynamically
    def class_above(cls, items: list[int], plus: int) -> list[str]:
        return [f"{cls.__name__}{item + plus}" for item in items]

    @batched.dynamically
    @classmethod
    def class_below(cls, items: list[int], plus: int) -> list[str]:
        return [f"{cls.__name__}{item + plus}" for item in items]

    @staticmethod
    @wraps
    @batched.dynamically
    def static_wrapped(items: list[int], plus: int) -> list[int]:
        return [item + plus for item in items]

    @classmethod
    @wraps
    @batched.dynamically
    def class_wrapped(cls, items: list[int], plus: int) -> list[str]:
        return [f"{cls.__name__}{item + plus}" for item in items]

    @staticmethod
    @batched.dynamically
    def of_instances(kinds: list[Kinds], plus: int) -> list[int]:
        return [id(kind) + plus for kind in kinds]


class Derived(Kinds):
    pass


@pytest.mark.parametrize("owner", [Kinds, Kinds(), Derived, Derived()])
def test_class_methods_and_static_methods_work_above_and_below(owner: Any) -> None:
    name = (owner if isinstance(owner, type) else type(owner)).__name__
    for func in (owner.static_above, owner.static_below, owner.static_wrapped):
        assert func(3, 1) == 4
    for func in (owner.class_above, owner.class_below, owner.class_wrapped):
        assert func(3, 1) == f"{name}4"
    for func in (owner.static_above, owner.static_below, owner.class_below):
        assert func.submit(3, 1).result() == asyncio.run(func.acall(3, 1)) == func(3, 1)


def test_a_static_method_takes_instances_of_its_class_as_items() -> None:
    kinds = Kinds()
    assert Kinds.of_instances(kinds, 1) == id(kinds) + 1


def test_a_transparent_decorator_passes_on_the_members_of_a_method() -> None:
    class Model:
        @passed_on
        @batched.dynamically
        def double(self, items: list[int], plus: int = 0) -> list[int]:
            return [2 * item + plus for item in items]

    one: Any = Model()
    assert one.double(2) == one.double.submit(2).result() == asyncio.run(one.double.acall(2)) == 4
    assert list(one.double.map([1, 2])) == [2, 4]
    assert one.double.stats.calls == 5


def test_a_method_below_a_wrapper_belongs_to_its_instance() -> None:
    class Model:
        @wraps
        @batched.dynamically
        def double(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    one, two = Model(), Model()
    assert [one.double(2), two.double(2)] == [4, 4]
    unbound: Any = vars(Model)["double"].__wrapped__
    assert unbound.__get__(one).stats.calls == unbound.__get__(two).stats.calls == 1
    assert unbound.__get__(one).submit(3).result() == 6


def test_a_cached_property_may_be_a_batched_function() -> None:
    class Model:
        factor = 2

        def scale(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

        @functools.cached_property
        def batched_scale(self) -> batched.Batched[int, int, []]:
            return batched.dynamically(self.scale)

    model = Model()
    assert [model.batched_scale(2), model.batched_scale(3)] == [4, 6]
    assert model.batched_scale.stats.calls == 2


def test_partial_and_dispatched_methods_are_bound() -> None:
    class Model:
        @batched.dynamically
        def scaled(self, items: list[int], factor: int) -> list[int]:
            return [factor * item for item in items]

        doubled = functools.partialmethod(scaled, factor=2)

        @functools.singledispatchmethod
        def scale(self, item: Any) -> Any:
            raise TypeError

        @scale.register(int)
        @batched.dynamically
        def _(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    model = Model()
    assert model.doubled(4) == 8
    assert model.scale(4) == 8


def test_an_abstract_method_must_be_overridden() -> None:
    class Model(abc.ABC):
        @abc.abstractmethod
        @batched.dynamically
        def above(self, items: list[int]) -> list[int]: ...

        @batched.dynamically
        @abc.abstractmethod
        def below(self, items: list[int]) -> list[int]: ...

    assert Model.__abstractmethods__ == {"above", "below"}


def test_a_pydantic_model_has_batched_methods_if_it_ignores_their_types() -> None:
    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(ignored_types=(batched.BatchedMethod, batched.Batched))
        factor: int

        @batched.dynamically
        def scaled(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

        @batched.aio.dynamically
        async def awaited(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

        @wraps
        @batched.dynamically
        def wrapped(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

    one, two = Model(factor=2), Model(factor=3)
    assert [one.scaled(5), two.scaled(5), asyncio.run(one.awaited(4))] == [10, 15, 8]
    assert one.wrapped(4) == 8
    assert one.model_copy(update={"factor": 4}).scaled(1) == 4
    assert list(Model.model_fields) == ["factor"]


@pytest.mark.parametrize("slots", [False, True])
def test_a_dataclass_has_a_batched_method_below_a_wrapper(slots: bool) -> None:
    options: Any = {"slots": slots, "weakref_slot": slots}

    @dataclasses.dataclass(frozen=True, **options)
    class Model:
        factor: int

        @wraps
        @batched.dynamically
        def scaled(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

    assert [Model(2).scaled(5), Model(3).scaled(5)] == [10, 15]
    assert [field.name for field in dataclasses.fields(Model)] == ["factor"]


def test_a_wrapper_looks_like_the_batched_function() -> None:
    class Model:
        @wraps_coroutine
        @batched.aio.dynamically
        async def awaited(self, items: list[int], plus: int = 0) -> list[int]:
            """Return the items."""
            return items

    assert Model.awaited.__doc__ == "Return the items."
    assert list(inspect.signature(Model.awaited).parameters) == ["self", "items", "plus"]
    assert all(name.startswith("__") for name in vars(Model.awaited)), "no state is copied"
