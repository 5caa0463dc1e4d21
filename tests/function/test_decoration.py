"""Decoration: wrong settings and functions are refused with one sentence.

A decorated function looks like the function.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import pickle
import pydoc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import batched
from batched._collate.features.settings import FeatureSettings
from batched._function.settings import InferenceSettings, Settings


@batched.dynamically
def doubled(items: list[int], plus: int = 0) -> list[int]:
    """Twice each item."""
    return [2 * item + plus for item in items]


@batched.aio.dynamically
async def awaited(items: list[int]) -> list[int]:
    return items


@batched.aio.dynamically
def threaded(items: list[int]) -> list[int]:
    return items


DECORATORS = [batched.dynamically, batched.aio.dynamically]


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be an integer of at least 1, got 2.5"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer of at least 1, got True"),
        ({"timeout_ms": -1}, ValueError, "timeout_ms must be at least 0 and finite, got -1"),
        (
            {"timeout_ms": float("nan")},
            ValueError,
            "timeout_ms must be at least 0 and finite, got nan",
        ),
        (
            {"timeout_ms": "5"},
            TypeError,
            "timeout_ms must be a number of milliseconds, at least 0 and finite, got '5'",
        ),
        (
            {"small_batch_threshold": -1},
            ValueError,
            "small_batch_threshold must be at least 0, got -1",
        ),
        (
            {"max_concurrent_batches": 0},
            ValueError,
            "max_concurrent_batches must be at least 1, got 0",
        ),
        (
            {"flush": "never"},
            ValueError,
            "flush must be one of 'auto', 'eager', 'window', got 'never'",
        ),
        ({"name": 3}, TypeError, "name must be a string, got 3"),
        (
            {"batchsize": 3},
            TypeError,
            "there is no setting 'batchsize'; did you mean 'batch_size'?",
        ),
        ({"max_wait": 3}, TypeError, "there is no setting 'max_wait'; the settings are batch_size"),
    ],
)
def test_a_wrong_setting_is_told_at_decoration(
    decorator: Any, settings: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error) as raised:
        decorator(**settings)
    assert str(raised.value).startswith(sentence)


def of_one_text(text: str) -> int:
    return len(text)


def of_one_row(row: dict[str, Any]) -> int:
    return len(row)


def of_an_evaluated_one(text: Any) -> int:
    return len(text)


of_an_evaluated_one.__annotations__["text"] = str


async def of_one_awaited(key: bytes) -> bytes:
    return key


class OfOne:
    def method(self, text: str) -> int:
        return len(text)

    @classmethod
    def class_method(cls, text: str) -> int:
        return len(text)

    @staticmethod
    def static_method(text: str) -> int:
        return len(text)

    def __call__(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize(
    ("func", "takes"),
    [
        (of_one_text, "text: str"),
        (of_one_row, "row: dict[str, Any]"),
        (of_an_evaluated_one, "text: str"),
        (of_one_awaited, "key: bytes"),
        (OfOne.__dict__["method"], "text: str"),
        (OfOne.__dict__["class_method"], "text: str"),
        (OfOne.__dict__["static_method"], "text: str"),
        (OfOne().method, "text: str"),
        (OfOne(), "text: str"),
    ],
)
def test_a_function_of_one_item_is_told_to_take_a_list(func: Any, takes: str) -> None:
    with pytest.raises(TypeError) as raised:
        batched.aio.dynamically(func)
    name, _, annotation = takes.partition(": ")
    assert f"takes one item ({takes})" in str(raised.value)
    assert f"`{name}: list[{annotation}]`" in str(raised.value)


def wrapped_plainly(func: Any) -> Any:
    @functools.wraps(func)
    def wrapper(*args: Any) -> Any:
        return func(*args)

    return wrapper


async def of_features(features: dict[str, Any]) -> Any:
    return features


def test_a_coroutine_function_behind_a_plain_wrapper_is_told_what_to_do() -> None:
    embed = batched.aio.dynamically(wrapped_plainly(awaited.__wrapped__))
    encode = batched.aio.inference.dynamically(wrapped_plainly(of_features))
    for call in (embed(1), encode({"ids": np.ones((1, 2))})):
        with pytest.raises(
            batched.BatchFunctionError,
            match=r"coroutine, which nothing awaits.*wrapper .* must be an `async def`",
        ):
            asyncio.run(_awaited(call))


def of_a_tuple(items: tuple[int, ...]) -> tuple[int, ...]:
    return items


def of_a_string_of_which_nothing_is_known(items: strange) -> Any:  # type: ignore[name-defined]  # noqa: F821  it is undefined
    return items


@pytest.mark.parametrize(
    "func",
    [
        lambda items: items,
        lambda items, prompt="": items,
        of_a_tuple,
        of_a_string_of_which_nothing_is_known,
        lambda *items: items[0],
        functools.partial(lambda prompt, items: items, "query"),
    ],
)
def test_a_function_that_may_take_a_list_is_taken_at_its_word(func: Any) -> None:
    assert list(batched.dynamically(func)([1, 2])) == [1, 2]


def test_a_builtin_of_which_no_signature_is_known_is_taken_at_its_word() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    assert batched.dynamically(max)([[1, 2], [3, 4]]) == [3, 4]  # type: ignore[call-overload]  # of pairs


def test_an_annotated_argument_after_the_items_is_not_taken_for_the_items() -> None:
    @batched.dynamically
    def embed(texts, prompt: str = ""):  # type: ignore[no-untyped-def]  # as users write them
        return [prompt + text for text in texts]

    assert embed("a", "b") == "ba"


def test_numpy_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert (
        batched.dynamically(batch_size=numpy.int64(4), timeout_ms=numpy.float32(1))(
            lambda items: items
        )(1)
        == 1
    )


def generator(items: list[int]) -> Iterator[int]:
    yield from items


async def async_generator(items: list[int]) -> AsyncIterator[int]:
    for item in items:
        yield item


class Coroutine:
    async def __call__(self, items: list[int]) -> list[int]:
        return items


class Plain:
    def __call__(self, items: list[int]) -> list[int]:
        return items


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("func", [generator, async_generator, functools.partial(generator)])
def test_generator_functions_are_refused(decorator: Any, func: Any) -> None:
    with pytest.raises(TypeError, match="generator function"):
        decorator(func)


@pytest.mark.parametrize(
    "func", [awaited.__wrapped__, functools.partial(awaited.__wrapped__), Coroutine()]
)
def test_coroutine_functions_belong_to_aio(func: Any) -> None:
    with pytest.raises(TypeError, match=r"batched\.aio\.dynamically"):
        batched.dynamically(func)
    assert asyncio.run(_awaited(batched.aio.dynamically(func)(3))) == 3


@pytest.mark.parametrize(
    "batch",
    [
        lambda: batched.aio.dynamically(prefetch=1)(awaited.__wrapped__),
        lambda: awaited.with_options(prefetch=1),
    ],
)
def test_coroutine_functions_have_nothing_made_ready(batch: Callable[[], object]) -> None:
    with pytest.raises(
        TypeError, match="awaited is a coroutine function.*prefetch needs a plain one"
    ):
        batch()


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("func", [32, None, Plain, "text"])
def test_only_functions_can_be_decorated(decorator: Any, func: Any) -> None:
    with pytest.raises(TypeError, match="only a function that takes a list"):
        decorator(func)


@pytest.mark.parametrize("func", [doubled, awaited])
def test_a_batched_function_is_not_batched_twice(func: Any) -> None:
    with pytest.raises(TypeError, match="with_options"):
        batched.aio.dynamically(func)


@pytest.mark.parametrize("decorator", DECORATORS)
def test_a_function_without_parameters_is_refused(decorator: Any) -> None:
    def nothing() -> list[int]:
        return []

    with pytest.raises(TypeError, match="nothing takes no argument for the list of items"):
        decorator(nothing)


@pytest.mark.parametrize("decorator", DECORATORS)
def test_settings_by_position_are_refused(decorator: Any) -> None:
    with pytest.raises(TypeError, match="settings are passed by keyword"):
        decorator(64)
    with pytest.raises(TypeError, match="positional arguments"):
        decorator(64, 5.0)


def test_a_misspelt_name_of_the_items_is_told() -> None:
    fn: Any = doubled
    with pytest.raises(
        TypeError,
        match=r"needs an item, or a list of items \(items\), got only "
        r"item",
    ):
        fn(item=3)


def test_callable_objects_and_builtins_can_be_decorated() -> None:
    assert batched.dynamically(Plain())([1, 2]) == [1, 2]
    fn: Any = batched.dynamically(sorted)
    assert fn([1]) == [1]


def test_settings_can_be_given_in_steps() -> None:
    fast = batched.dynamically(timeout_ms=1.0)
    fn: Any = fast(batch_size=2)(lambda items: items)
    assert fn([1, 2, 3]) == [1, 2, 3]
    assert fn.stats.batch_sizes == {1: 1, 2: 1}


EVERY_DECORATOR: dict[str, Any] = {
    "batched.dynamically": batched.dynamically,
    "batched.aio.dynamically": batched.aio.dynamically,
    "batched.inference.dynamically": batched.inference.dynamically,
    "batched.aio.inference.dynamically": batched.aio.inference.dynamically,
}
every_decorator = pytest.mark.parametrize(
    ("name", "decorator"), EVERY_DECORATOR.items(), ids=EVERY_DECORATOR
)


@every_decorator
def test_the_signature_has_every_setting_with_its_default_and_type(
    name: str, decorator: Any
) -> None:
    [func, *settings] = inspect.signature(decorator).parameters.values()
    assert (func.name, func.kind) == ("func", inspect.Parameter.POSITIONAL_ONLY)
    kind = InferenceSettings if "inference" in name else Settings
    spread = {"spread_kwargs"} if "inference" in name else set()
    assert {each.name for each in settings} == set(kind.__annotations__) - {"pad_tokens"} | spread
    shown = [str(each) for each in settings]
    assert "batch_size: int = 32" in shown
    assert "flush: Literal['auto', 'eager', 'window'] = 'auto'" in shown
    assert "max_queue_size: int | None = None" in shown
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in settings)
    assert " at 0x" not in str(inspect.signature(decorator))
    assert decorator(**{each.name: each.default for each in settings}) is not None


@every_decorator
def test_a_decorator_shows_its_settings(name: str, decorator: Any) -> None:
    given = decorator(batch_size=64, name="embedder")
    assert inspect.signature(given).parameters["batch_size"].default == 64


def test_help_explains_every_setting() -> None:
    shown = [pydoc.render_doc(decorator) for decorator in EVERY_DECORATOR.values()]
    for name in Settings.__annotations__:
        assert f"{name}: " in shown[0]
    for name in FeatureSettings.__annotations__:
        assert f"{name}: " in shown[2]
    assert "`batched.dynamically`" in shown[1]
    assert "`batched.inference.dynamically`" in shown[3]
    assert not any(" at 0x" in text for text in shown)


@every_decorator
def test_the_settings_of_a_function_can_be_read_back(name: str, decorator: Any) -> None:
    fn = decorator(batch_size=64, name="embedder")(Plain())
    given = inspect.signature(decorator(batch_size=64, name="embedder")).parameters.values()
    assert dict(fn.options) == {each.name: each.default for each in given if each.name != "func"}
    assert "'batch_size': 64" in repr(fn.options)
    with pytest.raises(TypeError, match="item assignment"):
        fn.options["batch_size"] = 3
    again = fn.with_options(**fn.options)
    assert again is not fn
    assert again.options == fn.options
    assert fn.with_options(batch_size=2).options == {**fn.options, "batch_size": 2}


def test_the_name_among_the_settings_of_a_function_is_the_one_in_use() -> None:
    assert doubled.options["name"] == "doubled"


def test_a_method_has_the_settings_that_its_instance_uses() -> None:
    class Model:
        @batched.dynamically(batch_size=4)
        def length(self, texts: list[str]) -> list[int]:
            return [len(text) for text in texts]

    bound = Model().length
    assert bound.options["batch_size"] == 4
    assert bound.with_options(**bound.options)("text") == 4
    assert bound.with_options(batch_size=8).options["batch_size"] == 8


def test_what_calls_pass_and_get_can_be_imported() -> None:
    def uses(ids: batched.Feature, given: batched.Features) -> batched.Future[int]:
        return doubled.submit(1)

    assert set(get_type_hints(uses)) == {"ids", "given", "return"}
    assert isinstance(uses([], {}), batched.Future)


def test_types_are_given_their_parameters_as_checkers_have_them() -> None:
    def uses(
        plain: batched.Batched[int, str] | None,
        awaits: batched.AsyncBatched[int, str, ...],
        features: batched.BatchedInference[int],
        awaits_features: batched.AsyncBatchedInference[int],
    ) -> None: ...

    hints = get_type_hints(uses)
    assert [get_args(hint) for hint in hints.values()][1:4] == [(int, str, ...), (int,), (int,)]
    assert get_origin(hints["features"]) is batched.BatchedInference
    assert isinstance(doubled, batched.Batched)


def test_bare_and_called_forms_are_the_same() -> None:
    fns: list[Any] = [
        batched.dynamically(lambda items: items),
        batched.dynamically()(lambda items: items),
    ]
    for fn in fns:
        assert fn([1]) == [1]


def test_it_looks_like_the_function_it_wraps() -> None:
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Twice each item."
    assert doubled.__module__ == __name__
    assert doubled.__wrapped__([1]) == [2]
    assert list(inspect.signature(doubled).parameters) == ["items", "plus"]
    assert repr(doubled) == "<batched doubled>"
    with pytest.raises(AttributeError, match="no_such_thing|attribute 'no_such_thing'"):
        _ = doubled.no_such_thing


def test_coroutine_functions_are_known_as_such() -> None:
    assert inspect.iscoroutinefunction(awaited)
    assert inspect.iscoroutinefunction(threaded)
    assert inspect.iscoroutinefunction(doubled.acall)
    assert not inspect.iscoroutinefunction(doubled)


@pytest.mark.parametrize("func", [Coroutine(), functools.partial(awaited.__wrapped__), Plain()])
def test_coroutine_functions_without_a_name_are_known_as_such(func: Any) -> None:
    assert inspect.iscoroutinefunction(batched.aio.dynamically(func))
    assert not inspect.iscoroutinefunction(batched.dynamically(Plain()))


def retrying(wrapped: Any) -> Any:
    """Call `wrapped` again if it fails, as a decorator that inspects its function."""
    if inspect.iscoroutinefunction(wrapped):

        @functools.wraps(wrapped)
        async def awaiting(*args: Any) -> Any:
            try:
                return await wrapped(*args)
            except ConnectionError:
                return await wrapped(*args)

        return awaiting

    @functools.wraps(wrapped)
    def calling(*args: Any) -> Any:
        try:
            return wrapped(*args)
        except ConnectionError:
            return wrapped(*args)

    return calling


class Flaky:
    """A batch function that fails every other time."""

    def __init__(self) -> None:
        self.called = 0

    def __call__(self, items: list[int]) -> list[int]:
        self.called += 1
        if self.called % 2:
            raise ConnectionError
        return items


class AsyncFlaky(Flaky):
    async def __call__(self, items: list[int]) -> list[int]:  # type: ignore[override]  # on purpose
        return super().__call__(items)


@pytest.mark.parametrize("kind", [Flaky, AsyncFlaky])
def test_a_retrying_decorator_tries_again(kind: type[Flaky]) -> None:
    for func in (kind(), functools.partial(kind())):
        again = retrying(batched.aio.dynamically(func))
        assert asyncio.run(_awaited(again(3))) == 3
    if kind is Flaky:
        assert retrying(batched.dynamically(Flaky()))(3) == 3


@pytest.mark.parametrize("fn", [doubled, awaited, threaded])
def test_functions_pickle_by_name(fn: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(fn, protocol)) is fn


def _tripled(items: list[int]) -> list[int]:
    return [3 * item for item in items]


tripled = batched.dynamically(_tripled)
small = doubled.with_options(batch_size=2)


class Attribute:
    own = batched.dynamically(staticmethod(_tripled))


@pytest.mark.parametrize("fn", [tripled, small, Attribute.own])
def test_functions_under_another_name_than_their_own_pickle_by_that(fn: Any) -> None:
    assert pickle.loads(pickle.dumps(fn)) is fn
    assert copy.deepcopy(fn) is fn


@pytest.mark.parametrize("func", [Plain(), functools.partial(_tripled)])
def test_what_is_called_and_has_no_name_pickles_by_value(func: Any) -> None:
    fn = batched.dynamically(batch_size=2)(func)
    twin = pickle.loads(pickle.dumps(fn))
    assert twin([1, 2, 3]) == fn([1, 2, 3])
    assert twin.options == fn.options


@dataclasses.dataclass
class Config:
    embed: Any = doubled
    other: Any = dataclasses.field(default=doubled)


class Attributes:
    embed = doubled
    called = batched.dynamically(Plain())
    partly = batched.dynamically(functools.partial(doubled.__wrapped__, plus=1))
    builtin: Any = batched.dynamically(sorted)
    bound = batched.dynamically(Plain().__call__)


@pytest.mark.parametrize("owner", [Config(), Config, Attributes(), Attributes])
def test_a_function_that_is_no_method_stays_one_as_an_attribute_of_a_class(owner: Any) -> None:
    assert owner.embed is doubled
    assert owner.embed([1, 2], 1) == [3, 5]
    assert owner.embed.submit(1).result() == 2


def test_the_default_of_a_field_is_the_function_itself() -> None:
    assert Config().other is Config.other is doubled
    assert Config() == Config()


def test_what_does_not_bind_stays_unbound_as_an_attribute_of_a_class() -> None:
    for owner in (Attributes, Attributes()):
        assert owner.called([1]) == owner.bound([1]) == owner.builtin([1]) == [1]
        assert owner.partly([1]) == [3]


def _on_instance(self: Any, items: list[int]) -> list[int]:
    return [self.factor * item for item in items]


@pytest.mark.parametrize("func", [_on_instance, lambda self, items: _on_instance(self, items)])
def test_a_function_that_takes_an_instance_is_a_method_wherever_it_was_defined(func: Any) -> None:
    class Model:
        factor = 3
        method: Any = batched.dynamically(func)

    assert Model().method([1, 2]) == Model.method(Model(), [1, 2]) == [3, 6]


def test_an_item_in_place_of_an_instance_is_told_so() -> None:
    class Model:
        method: Any = batched.dynamically(_on_instance)

    with pytest.raises(
        TypeError, match="_on_instance is a method, and got .* type int as its inst"
    ):
        Model.method(3)


def test_a_function_without_a_name_of_its_own_does_not_pickle() -> None:
    with pytest.raises(Exception, match="pickle|not the same object"):
        pickle.dumps(doubled.with_options(batch_size=2))


def test_a_name_is_used_in_messages_and_for_threads() -> None:
    fn: Any = batched.dynamically(name="embedder")(lambda items: None)  # type: ignore[misc, arg-type]  # wrong on purpose
    with pytest.raises(batched.BatchFunctionError, match="^embedder returned NoneType"):
        fn(1)
    assert repr(fn) == "<batched embedder>"


def test_many_items_as_arguments_are_told_to_be_a_list() -> None:
    said = r"doubled: too many positional arguments; many items are passed as one list, doubled\(\["
    call: Any = doubled
    with pytest.raises(TypeError, match=said):
        call(1, 2, 3)
    with pytest.raises(TypeError, match=r"'minus'$"):
        call(1, minus=2)


def test_extra_arguments_with_defaults_and_without_share_a_batch_only_if_equal() -> None:
    assert doubled([1, 2], 1) == doubled([1, 2], plus=1) == [3, 5]

    @batched.dynamically
    def strict(items: list[int], *, by: int) -> list[int]:
        return [by * item for item in items]

    assert strict([1, 2], by=3) == [3, 6]
    with pytest.raises(TypeError, match="strict: missing a required"):
        strict([1, 2])  # type: ignore[call-overload]  # wrong on purpose
