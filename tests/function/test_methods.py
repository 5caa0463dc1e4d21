"""Batched methods: one batcher per instance, of any class, that ends with the instance."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import inspect
import pickle
import weakref
from typing import Any
from unittest import mock

import pytest

import batched
from stage import BOUND, Gate, wait_until


class Model:
    """At module level, so that it pickles."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    @batched.dynamically(batch_size=4)
    def scaled(self, items: list[int], plus: int = 0) -> list[int]:
        """Return items times the factor."""
        return [self.factor * item + plus for item in items]

    @batched.aio.dynamically
    async def awaited(self, items: list[int]) -> list[int]:
        return [self.factor * item for item in items]

    @batched.dynamically
    @classmethod
    def named(cls, items: list[int]) -> list[str]:
        return [f"{cls.__name__}{item}" for item in items]

    @batched.dynamically
    @staticmethod
    def inner(items: list[int]) -> list[int]:
        return [-item for item in items]

    def negated_batch(self, items: list[int]) -> list[int]:
        return [-self.factor * item for item in items]

    negated = batched.dynamically(negated_batch)
    squared: Any = batched.dynamically(lambda self, items: [item**2 for item in items])


class Derived(Model):
    pass


class Overriding(Model):
    @property
    def above(self) -> Any:
        return super().scaled

    @batched.dynamically
    def scaled(self, items: list[int], plus: int = 0) -> list[int]:
        return [100 + result for result in super().scaled(items, plus)]


def test_each_instance_is_served_with_itself_also_through_its_class() -> None:
    one, two = Model(2), Model(3)
    assert one.scaled(5) == 10
    assert two.scaled(5) == 15
    assert one.scaled([1, 2], plus=1) == [3, 5]
    assert Model.scaled(one, [1, 2], plus=1) == [3, 5]
    assert (one.scaled.stats.calls, two.scaled.stats.calls) == (3, 1)
    with pytest.raises(AttributeError, match=r"with_options\(length=\.\.\.\)"):
        setattr(Model.scaled, "length", len)  # noqa: B010
    assert asyncio.run(Model.awaited(one, 4)) == 8
    assert Model.inner(3) == one.inner(3) == -3
    assert (Derived(2).scaled(5), Overriding(2).scaled(5)) == (10, 110)


def test_a_waiting_request_and_a_bound_method_keep_their_instance() -> None:
    gate = Gate()

    class Slow:
        @batched.dynamically
        def method(self, items: list[int]) -> list[int]:
            return gate(items)

    slow = Slow()
    ref = weakref.ref(slow)
    futures = [slow.method.submit(1), slow.method.submit(2)]
    del slow
    gc.collect()
    assert ref() is not None
    gate.opened.set()
    assert [future.result(BOUND) for future in futures] == [1, 2]
    del futures
    gc.collect()
    wait_until(lambda: ref() is None)

    bound = Slow().method
    gc.collect()
    assert bound(3) == 3


def test_equal_instances_stay_apart_and_copies_get_their_own() -> None:
    @dataclasses.dataclass
    class Point:
        x: int

        @batched.dynamically
        def plus(self, items: list[int]) -> list[int]:
            return [self.x + item for item in items]

    one, two = Point(1), Point(1)
    assert one == two
    assert one.plus(1) == two.plus(1) == 2
    assert one.plus._batcher is not two.plus._batcher
    for twin in (copy.copy(one), copy.deepcopy(one)):
        twin.x = 5
        assert twin.plus(1) == 6
        assert twin.plus.stats.calls == 1


def test_an_instance_without_weak_references_and_an_item_in_its_place_are_refused() -> None:
    class Slotted:
        __slots__ = ("x",)

        @batched.dynamically
        def method(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match=r"type Slotted .* add '__weakref__' to them"):
        Slotted().method(1)
    with pytest.raises(
        TypeError,
        match=r"^Model\.scaled is a method, and got an object of type int as its instance: call "
        r"it on an instance of its class;.* wrap it in staticmethod$",
    ):
        Model.scaled(3)


def test_other_settings_on_a_method_are_for_that_instance() -> None:
    one, two = Model(2), Model(3)
    other = one.scaled.with_options(batch_size=1)
    assert other([1, 2]) == [2, 4]
    assert other.stats.batch_sizes == {1: 2}
    assert other.__wrapped__([3]) == [6]
    assert one.scaled.stats.calls == 0
    assert two.scaled([1, 2]) == [3, 6]
    assert two.scaled.stats.batch_sizes == {2: 1}


def test_methods_pickle_by_their_instance_or_class_and_their_attribute() -> None:
    for method in (Model.scaled, Model.negated, Model.inner):
        assert pickle.loads(pickle.dumps(method)) is method
    twin = pickle.loads(pickle.dumps(Model(4).negated))
    assert (twin(2), twin.stats.calls) == (-8, 1)
    assert pickle.loads(pickle.dumps(Model().squared))(3) == 9
    held = pickle.loads(pickle.dumps(Holder(4)))
    held.factor = 3
    assert (held.held(5), held.bound(5)) == (-15, 15)


def test_a_method_that_its_instance_does_not_have_is_not_pickled_as_another() -> None:
    """The method that an overriding one calls by `super()`, and one with other settings."""
    overriding = Overriding(2)
    for method in (overriding.above, Model(2).scaled.with_options(batch_size=1)):
        with pytest.raises(pickle.PicklingError, match="not the same object as .*Model.scaled"):
            pickle.dumps(method)


class Holder(Model):
    def __init__(self, factor: int) -> None:
        super().__init__(factor)
        self.bound: Any = self.scaled
        self.held: Any = batched.dynamically(self.negated_batch)


def test_a_copied_object_holds_copies_of_its_own_methods() -> None:
    one = Holder(2)
    twin = copy.deepcopy(one)
    twin.factor = 3
    assert [twin.bound(5), twin.held(5)] == [15, -15]
    assert [one.bound(5), one.held(5)] == [10, -10]
    assert (twin.bound.__self__, twin.bound) == (twin, twin.scaled)
    assert twin.held.stats.calls == 1


def test_a_method_equals_itself_at_each_access_and_no_other() -> None:
    one, two = Model(2), Model(2)
    assert one.scaled == one.scaled
    assert hash(one.scaled) == hash(one.scaled)
    assert {one.scaled: 1}[one.scaled] == 1
    assert len({one.scaled, two.scaled, one.negated, one.scaled.with_options(batch_size=1)}) == 4
    assert Model.named == Model().named != Derived.named
    assert one.scaled != "scaled"
    overriding = Overriding(2)
    assert overriding.above == overriding.above != overriding.scaled


def test_a_method_knows_its_instance_and_the_method_of_its_class() -> None:
    model = Model(2)
    assert model.scaled.__self__ is model
    assert model.scaled.__func__ is Model.scaled
    assert Derived.named.__self__ is Derived
    assert Derived.named.__func__(Derived, 1) == "Derived1"
    for unbound in (Model.scaled, Model.inner, batched.dynamically(model.scaled.__wrapped__)):
        assert not hasattr(unbound, "__self__")
        assert not hasattr(unbound, "__func__")


def test_a_weak_method_lives_as_long_as_its_instance() -> None:
    model = Model(2)
    weak = weakref.WeakMethod(model.scaled)
    assert weak() == model.scaled
    assert weak == weakref.WeakMethod(model.scaled)
    del model
    gc.collect()
    assert weak() is None


@pytest.mark.parametrize("target", [Model, Model(2)], ids=["class", "instance"])
def test_a_mock_in_place_of_a_method_is_of_its_kind(target: Any) -> None:
    model = Model(2) if target is Model else target
    with (
        mock.patch.object(target, "scaled", autospec=True, return_value=7) as plain,
        mock.patch.object(target, "awaited", autospec=True, return_value=8),
    ):
        assert model.scaled(5, plus=1) == 7
        plain.assert_called_once_with(5, plus=1)
        assert asyncio.run(model.awaited(5)) == 8
        with pytest.raises(AttributeError):
            model.scaled.no_such_thing()
    assert model.scaled(5, plus=1) == 11


def test_a_method_looks_like_the_function_it_wraps() -> None:
    model = Model(2)
    for method in (model.scaled, Model.scaled):
        assert (method.__name__, method.__module__) == ("scaled", __name__)
        assert method.__qualname__ == "Model.scaled"
        assert method.__doc__ == "Return items times the factor."
        assert "Model.scaled" in repr(method)
        assert not inspect.iscoroutinefunction(method)
    assert model.scaled.__wrapped__([1]) == [2]
    assert Model.scaled.__wrapped__(model, [1]) == [2]
    said = "(items: 'list[int]', plus: 'int' = 0) -> 'list[int]'"
    assert str(inspect.signature(model.scaled)) == said
    assert list(inspect.signature(Model.scaled).parameters) == ["self", "items", "plus"]
    assert inspect.iscoroutinefunction(model.awaited)
    assert inspect.iscoroutinefunction(Model.awaited)
    with pytest.raises(AttributeError, match="of an instance"):
        _ = Model.scaled.stats


# --- every batched function of the process


def test_live_functions_are_listed_with_each_instance_or_class_that_was_called() -> None:
    class Model:
        @batched.dynamically
        def double(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

        @batched.dynamically
        @classmethod
        def halve(cls, items: list[int]) -> list[float]:
            return [item / 2 for item in items]

    @batched.dynamically
    def triple(items: list[int]) -> list[int]:
        return [3 * item for item in items]

    first, second = Model(), Model()
    first.double(1), second.double(2), second.double(3), first.halve(4)
    known = triple, first.double, second.double, Model.halve
    mine = [fn for fn in batched.live() if fn in known]
    assert sorted(fn.stats.calls for fn in mine) == [0, 1, 1, 2]
    del second, mine, known, triple

    def left() -> list[int]:
        gc.collect()
        names = [fn.__name__ for fn in batched.live()]
        return [names.count(name) for name in ("double", "halve", "triple")]

    wait_until(lambda: left() == [1, 1, 0])  # the worker may have answered a moment ago
