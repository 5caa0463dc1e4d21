"""Decoration: wrong settings and functions are refused; a decorated function looks as before."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import pydoc
from typing import Any

import numpy as np
import pytest

import batched
from batched._collate.features.settings import FeatureSettings
from batched._function.settings import InferenceSettings, Settings, StepSettings
from stage import python


@batched.dynamically
def doubled(items: list[int], plus: int = 0) -> list[int]:
    return [2 * item + plus for item in items]


@batched.aio.dynamically
async def awaited(items: list[int]) -> list[int]:
    return items


DECORATORS: list[Any] = [batched.dynamically, batched.aio.dynamically]


def test_a_coroutine_function_behind_a_plain_wrapper_fails_with_advice() -> None:
    @functools.wraps(awaited.__wrapped__)
    def wrapper(*args: Any) -> Any:
        return awaited.__wrapped__(*args)

    embed, encode = batched.aio.dynamically(wrapper), batched.aio.inference.dynamically(wrapper)
    for call in (embed(1), encode({"ids": np.ones((1, 2))})):
        with pytest.raises(
            batched.BatchFunctionError,
            match=r"coroutine, which nothing awaits.*wrapper .* must be an `async def`",
        ):
            asyncio.run(call)


def test_coroutines_in_place_of_results_are_refused() -> None:
    async def later() -> None: ...

    row: Any = later()
    fn = batched.dynamically(lambda _: [row])
    with pytest.raises(batched.BatchFunctionError, match=r"return await asyncio\.gather"):
        fn(1)
    row.close()


def test_annotations_are_never_evaluated() -> None:
    def fn(items: strange) -> Any:  # type: ignore[name-defined]  # noqa: F821  it is undefined
        return items

    assert batched.dynamically(fn)([1, 2]) == [1, 2]


class Coroutine:
    async def __call__(self, items: list[int]) -> list[int]:
        return items


class Plain:
    def __call__(self, items: list[int]) -> list[int]:
        return items


class Flowing:
    async def __call__(self, items: list[int]) -> Any:
        yield items


@pytest.mark.parametrize(
    "func", [awaited.__wrapped__, functools.partial(awaited.__wrapped__), Coroutine()]
)
def test_coroutine_functions_belong_to_aio(func: Any) -> None:
    with pytest.raises(TypeError, match=r"batched\.aio\.dynamically"):
        batched.dynamically(func)
    assert asyncio.run(batched.aio.dynamically(func)(3)) == 3


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (32, "only a function that takes a list .*; settings are passed by keyword"),
        (Plain, "a class cannot be batched, got .*Plain.*; decorate its method, or pass an inst"),
        (lambda items: (yield items), "is a generator function; let it return all results at once"),
        (doubled, "batched already; .* with_options"),
        (python, r"takes one str, and a batch function gets a list of items: \w+: list\[str\]"),
        (lambda: [1], "takes no argument for the list of items"),
        (Flowing(), "is a generator function"),
    ],
)
def test_an_object_that_cannot_be_batched_is_refused(func: Any, message: str) -> None:
    for decorator in DECORATORS:
        with pytest.raises(TypeError, match=message):
            decorator(func)
    batched.dynamically(functools.wraps(python)(lambda items: items))  # of lists, as it is called
    batched.inference.dynamically(spread_kwargs=True)(python)  # no first list


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"name": 3}, TypeError, "name must be a string that is not empty, got 3"),
        ({"name": ""}, TypeError, "name must be a string that is not empty, got ''"),
        ({"length": 3}, TypeError, "length must be a plain function of an item that returns its"),
        ({"on_batch": 3}, TypeError, "on_batch must be a plain function of a BatchRecord, got 3"),
        ({"on_oom": "skip"}, ValueError, "on_oom must be 'split' or 'raise', got 'skip'"),
        ({"isolate_errors": 1}, TypeError, "isolate_errors must be True or False, got 1"),
        ({"max_wait": 3}, TypeError, "no setting 'max_wait'; the settings are batch_size"),
        ({"max_wait_ms": 3}, TypeError, "no setting 'max_wait_ms'; did you mean 'timeout_ms'"),
        ({"pad_token": 1}, TypeError, r"'pad_token'; it belongs to batched\S*inference"),
        ({"timeout_ms": 0.005}, ValueError, r"timeout_ms is a time .*at least 0\.1, got 0\.005"),
        ({"queue_timeout_ms": 0.5}, ValueError, r"queue_timeout_ms is a time .* 1, got 0\.5"),
        ({"on_full": "raise"}, ValueError, "on_full='raise' needs max_queue_size"),
    ],
)
def test_a_wrong_setting_is_refused_at_decoration(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    for decorator in DECORATORS:
        with pytest.raises(error, match=message):
            decorator(**settings)


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "kind", "name"),
    [
        ({"pad_token": 0}, TypeError, "pad_token"),
        ({"pad_token": {"x": "pad"}}, TypeError, "pad_token"),
        ({"pad_token": {1: 0}}, TypeError, "pad_token"),
        ({"pad_token": {}, "pad_tokens": {}}, TypeError, "pad_tokens"),
        ({"padding_side": "middle"}, ValueError, "padding_side"),
        ({"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of"),
        ({"unpad": True}, TypeError, "unpad"),
        ({"unpad": {"x": {"1": "ids"}}}, TypeError, "unpad"),
        ({"unpad": {"x": {0: "ids"}}}, ValueError, "unpad"),
        ({"spread_kwargs": 1}, TypeError, "spread_kwargs"),
        ({"output_device": 1.5}, ValueError, "output_device"),
        ({"device": "nowhere"}, ValueError, "device='nowhere': Expected one of cpu, cuda"),
    ],
)
def test_a_wrong_setting_of_features_is_refused_at_decoration(
    settings: dict[str, Any], kind: type[Exception], name: str
) -> None:
    if "device" in name:
        pytest.importorskip("torch")
    for decorator in (batched.inference.dynamically, batched.aio.inference.dynamically):
        with pytest.raises(kind, match=name):
            decorator(**settings)


EVERY_DECORATOR: list[Any] = [
    *(batched.dynamically, batched.aio.dynamically),
    *(batched.inference.dynamically, batched.aio.inference.dynamically),
    *(batched.continuously, batched.aio.continuously),
]
every_decorator = pytest.mark.parametrize("decorator", EVERY_DECORATOR)


@every_decorator
def test_a_decorator_is_a_function_whose_signature_has_every_setting(decorator: Any) -> None:
    assert inspect.isfunction(decorator)
    [func, *settings] = inspect.signature(decorator).parameters.values()
    assert (func.name, func.kind) == ("func", inspect.Parameter.POSITIONAL_ONLY)
    kind: Any = StepSettings if decorator.__name__ == "continuously" else Settings
    more = {"prepare"} | ({"unpack"} if kind is Settings else set())
    if "inference" in decorator.__module__:
        # these change the type of the decorated function
        kind, more = InferenceSettings, {"prepare", "spread_kwargs"}
    assert {each.name for each in settings} == set(kind.__annotations__) - {"pad_tokens"} | more
    assert {"batch_size=32", "max_queue_size=None", "on_full='wait'"} <= set(map(str, settings))
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in settings)
    assert decorator(**{each.name: each.default for each in settings}) is not None
    if decorator in (batched.aio.dynamically, batched.aio.continuously):
        text = " ".join(str(decorator.__doc__).split())
        for each in settings:
            default = repr(each.default).replace("'", '"')
            assert each.name == "timeout_ms" or f"{each.name}={default}" in text


def test_help_explains_every_setting() -> None:
    shown = [pydoc.render_doc(decorator) for decorator in EVERY_DECORATOR]
    for name in [*Settings.__annotations__, "prepare", "unpack"]:
        assert f"{name}: " in shown[0]
    for name in FeatureSettings.__annotations__:
        assert f"{name}: " in shown[2]
    assert "max_pieces: " in shown[4]
    assert not any(" at 0x" in text for text in shown)


@every_decorator
def test_the_settings_of_a_function_can_be_read_back(decorator: Any) -> None:
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


def test_a_name_near_the_decorator_is_refused_with_a_hint() -> None:
    for name in ("batch", "dynamic"):
        said = rf"no attribute '{name}'; did you mean 'dynamically'\?$"
        with pytest.raises(AttributeError, match=said) as caught:
            getattr(batched, name)
        assert caught.value.obj is None  # else Python would add a hint of its own


def test_modules_load_when_they_are_first_used() -> None:
    done = python(
        """
        import sys
        import batched

        late = ["asgi", "metrics", "offline", "testing", "tracing"]
        assert not sys.modules.keys() & {f"batched.{name}" for name in late}
        assert set(late) <= set(dir(batched))
        for name in ("asgi", "testing", "tracing"):
            assert getattr(batched, name) is sys.modules[f"batched.{name}"]
        assert not hasattr(batched, "no_such_thing")
        assert "pytest" not in sys.modules  # which `batched.testing` is for
        """
    )
    assert done.returncode == 0, done.stderr


def test_inspect_recognizes_coroutine_functions() -> None:
    funcs: list[Any] = [Coroutine(), functools.partial(awaited.__wrapped__), Plain()]
    nameless = [batched.aio.dynamically(func) for func in funcs]
    for fn in (awaited, doubled.acall, *nameless):
        assert inspect.iscoroutinefunction(fn)
    for fn in (doubled, batched.dynamically(Plain())):
        assert not inspect.iscoroutinefunction(fn)


@dataclasses.dataclass
class Config:
    embed: Any = doubled


class Attributes:
    embed = doubled
    called = batched.dynamically(Plain())
    partly = batched.dynamically(functools.partial(doubled.__wrapped__, plus=1))
    builtin: Any = batched.dynamically(sorted)
    bound = batched.dynamically(Plain().__call__)
    of_two = batched.dynamically(lambda items, plus: [item + plus for item in items])


def test_a_function_stays_a_function_as_an_attribute_of_a_class() -> None:
    for owner in (Config(), Config, Attributes(), Attributes):
        assert owner.embed is doubled
        assert owner.embed([1, 2], 1) == [3, 5]
    for owner in (Attributes(), Attributes):
        assert owner.called([1]) == owner.bound([1]) == owner.builtin([1]) == [1]
        assert owner.partly([1]) == owner.of_two([1], 2) == [3]


def test_wrong_arguments_are_refused_with_advice() -> None:
    said = r"doubled: too many positional arguments; many items are passed as one list, doubled\(\["
    call: Any = doubled
    with pytest.raises(TypeError, match=said):
        call(1, 2, 3)
    with pytest.raises(TypeError, match=r"'minus'$"):
        call(1, minus=2)
    misspelt = r"needs an item, or a list of items \(items\), got only item"
    with pytest.raises(TypeError, match=misspelt):
        call(item=3)
    assert call(items=[3]) == [6], "items may be passed by their name"


def test_a_method_without_self_is_refused_with_advice() -> None:
    def decorate(kind: Any) -> None:
        class Model:
            @batched.dynamically
            @kind  # type: ignore[untyped-decorator]  # `staticmethod`, or nothing
            def embed(this: Any, items: Any) -> Any:  # noqa: N805  # the mistake
                return items

    with pytest.raises(
        TypeError, match=r"Model\.embed is in a class: the first parameter of a met"
    ):
        decorate(lambda func: func)
    decorate(staticmethod)


@pytest.mark.parametrize("decorator", DECORATORS)
def test_wrong_uses_of_a_function_are_refused_with_advice(decorator: Any) -> None:
    fn = decorator(lambda items: items)
    for items in ("text", b"bytes", None, {"a": 1}, type("DataFrame", (), {})()):
        with pytest.raises(TypeError, match="map takes many items, as a list, got a"):
            fn.map(items)
    with pytest.raises(ValueError, match="buffersize must be at least 1, got 0"):
        fn.map([1], buffersize=0)
    with pytest.raises(AttributeError, match="'close'; did you mean 'shutdown'"):
        fn.close()
    with pytest.raises(AttributeError) as caught:
        _ = fn.statistics
    assert (caught.value.name, caught.value.obj) == ("statistics", fn)
    with pytest.raises(AttributeError, match=r"with_options\(device=\.\.\.\)"):
        fn.device = "cpu"
    assert not hasattr(fn, "device")
    fn.note = "kept"
    assert fn.note == "kept"
