"""Which calls may share a batch, as their extra arguments tell it."""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import Any

import pytest

from batched._collate.arguments import CACHE_LIMIT, Arguments, Binder
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Request, Scheduler


def embed(
    texts: list[str], prompt: Any = "", *more: Any, scale: Any = 1.0, **options: Any
) -> list[str]:
    return texts


BINDER = Binder(embed, "embed", leading=1)


def bound(*args: Any, **kwargs: Any) -> Arguments:
    """The extra arguments of one call of `embed`, as its binder sees them."""
    return BINDER.bind(args, kwargs)


def same(one: Any, other: Any) -> bool:
    """Whether calls that differ in this value may share a batch; asked in every way a call can pass
    it.
    """
    answers = {
        bound(one) == bound(other),
        bound(scale=one) == bound(scale=other),
        bound("", one) == bound("", other),
        bound(option=one) == bound(option=other),
        bound([one]) == bound([other]),
        bound({"key": (one,)}) == bound({"key": (other,)}),
        len({bound(one): 1, bound(other): 2}) == 1,
    }
    assert len(answers) == 1
    return answers.pop()


# ---------------------------------------------------------------- keys carry types


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (1.0, True),
        (0, False),
        (0, None),
        ("1", 1),
        ("a", b"a"),
        (0.0, -0.0),
        (math.nan, 0.0),
        (1 + 0j, 1),
        ([], ()),
        ([1], (1,)),
        ([], {}),
        (set(), frozenset()),
        ({1}, frozenset({1})),
        ({1}, [1]),
        ({"a": 1}, [("a", 1)]),
        ({"a": 1}, {("a", 1)}),
        ([1], [1.0]),
        ([1], [True]),
        ({1}, {1.0}),
        ({1: "a"}, {True: "a"}),
        ({"a": 1}, {"a": True}),
        ([0.0], [-0.0]),
        ([[1], 2], [[1, 2]]),
        ((1, (2,)), ((1, 2),)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_values_of_different_types_or_contents_do_not_share_a_batch(one: Any, other: Any) -> None:
    assert not same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1000, int("1000")),
        (1.5, float("1.5")),
        (math.nan, float("nan")),
        ("query", "".join(["que", "ry"])),
        (None, None),
        ([1, [2, {"a": {3}}]], [1, [2, {"a": {3}}]]),
        ({"a": 1, "b": [2]}, {"a": 1, "b": [2]}),
        ({1, 2, 3}, {3, 2, 1}),
        (frozenset({1}), frozenset({1})),
        ([math.nan], [float("nan")]),
        ({"a": math.nan}, {"a": float("nan")}),
        (len, len),
    ],
)
def test_values_of_the_same_type_and_content_share_a_batch(one: Any, other: Any) -> None:
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [([1, 2], [2, 1]), ([1], [1, 1]), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({1}, {1, 2})],
)
def test_containers_are_compared_by_content(one: Any, other: Any) -> None:
    assert not same(one, other)


def test_an_object_without_equality_of_its_own_is_compared_by_identity() -> None:
    one, other = object(), object()
    assert same(one, one)
    assert not same(one, other)


Point = namedtuple("Point", "x")  # noqa: PYI024  # as users write them


class Names(list[str]):
    pass


class Temperature(float):
    def __repr__(self) -> str:
        return f"{float(self):.1f} degrees"


@dataclass(frozen=True)
class Option:
    value: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0j, -0j),
        (Decimal("1.0"), Decimal("1.00")),
        (Decimal(0), Decimal("-0")),
        (Decimal(1), Fraction(1)),
        (Point(1), Point(True)),
        (Point(1), (1,)),
        (Temperature(1.01), Temperature(1.04)),
        (
            datetime(2026, 1, 1, 12, tzinfo=UTC),
            datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1))),
        ),
    ],
)
def test_what_is_equal_but_not_alike_does_not_share_a_batch(one: Any, other: Any) -> None:
    assert not same(one, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Decimal("1.0"),
        lambda: 1 + 2j,
        lambda: Point([1]),
        lambda: Option(1),
        lambda: Temperature(1.01),
    ],
)
def test_other_values_that_are_alike_share_a_batch(make: Callable[[], Any]) -> None:
    assert same(make(), make())


@pytest.mark.parametrize(
    "value", [Names("ab"), Counter("aab"), OrderedDict(a=1)], ids=lambda value: type(value).__name__
)
def test_containers_of_the_users_own_are_not_taken_apart(value: Any) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        bound(value)


def test_numbers_of_numpy_are_told_apart_by_type_and_sign() -> None:
    numpy = pytest.importorskip("numpy")
    values = [
        numpy.float32(0.0),
        numpy.float64(0.0),
        numpy.float64(-0.0),
        numpy.int64(0),
        numpy.bool_(False),
        0.0,
        0,
    ]
    for index, one in enumerate(values):
        for other in values[:index]:
            assert not same(one, other)
        assert same(one, type(one)(one))


def test_numbers_of_the_users_own_are_not_mistaken_for_each_other_when_they_look_alike() -> None:
    @Number.register
    class Weight:
        def __init__(self, grams: int) -> None:
            self.grams = grams

        def __repr__(self) -> str:
            return f"{self.grams / 1000:.1f} kg"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Weight) and other.grams == self.grams

        def __hash__(self) -> int:
            return hash(self.grams)

    assert not same(Weight(1001), Weight(1002))


def test_what_a_caller_changes_after_the_call_does_not_change_the_key() -> None:
    stop = ["a"]
    before = bound(stop)
    stop.append("b")
    assert before == bound(["a"])
    assert before != bound(["a", "b"])


# ---------------------------------------------------------------- cost and lifetime of a key


class Config:
    """Compared by content, and large: looking at it takes long."""

    looks: list[str]

    def __init__(self, content: int, looks: list[str] | None = None) -> None:
        self.content = content
        self.looks = [] if looks is None else looks

    def __eq__(self, other: object) -> bool:
        self.looks.append("eq")
        return isinstance(other, Config) and other.content == self.content

    def __hash__(self) -> int:
        self.looks.append("hash")
        return hash(self.content)

    def method(self) -> None:
        """Does nothing."""


class Talkative(Config):
    def __repr__(self) -> str:
        raise AssertionError("it may be large")


@pytest.mark.parametrize("kind", [Config, Talkative])
def test_an_object_that_was_passed_before_is_not_compared_again(kind: type[Config]) -> None:
    config = kind(1)
    first = bound(config)
    config.looks.clear()
    assert bound(scale=1.0, prompt=config) is first
    assert set(config.looks) == {"hash"}


def test_objects_of_the_users_own_share_a_batch_if_they_are_equal() -> None:
    assert same(Config(1), Config(1))
    assert not same(Config(1), Config(2))
    assert same(Option(1), Option(True))


def test_an_object_without_an_equality_counts_as_itself_and_is_not_looked_at() -> None:
    class Model:
        def __repr__(self) -> str:
            raise AssertionError("it may be large")

    one, other = Model(), Model()
    assert same(one, one)
    assert not same(one, other)


def test_what_compares_by_elements_is_compared_by_identity() -> None:
    torch = pytest.importorskip("torch")
    one, other = torch.zeros(3), torch.zeros(3)
    assert same(one, one)
    assert not same(one, other)
    assert bound({"key": [one]}) is not bound({"key": [other]})


def test_methods_of_one_object_share_a_batch_and_those_of_its_equal_do_not() -> None:
    one, other = Config(1), Config(1)
    assert same(one.method, one.method)
    assert not same(one.method, other.method)
    assert not same(one.method, one.__eq__)
    assert one.looks == []


def test_the_signature_is_consulted_once_for_all_calls_of_one_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bindings: list[object] = []
    bind = inspect.Signature.bind

    def counted(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
        bindings.append(args)
        return bind(*args, **kwargs)

    monkeypatch.setattr(inspect.Signature, "bind", counted)
    binder = Binder(embed, "embed", leading=1)
    bindings.clear()
    for number in range(10):
        binder.bind((str(number),), {"scale": number, "option": number})
    assert len(bindings) == 1


def test_calls_of_ever_other_shapes_leave_no_more_than_some_bindings_behind() -> None:
    binder = Binder(embed, "embed", leading=1)
    for number in range(3 * CACHE_LIMIT):
        name = f"option{number}"
        assert binder.bind((), {name: 1}) == binder.bind((), {name: 1})
        assert binder.bind((), {name: 1}) != binder.bind((), {})
    assert len(binder._bindings) <= CACHE_LIMIT


@pytest.mark.parametrize("make", [lambda: Config(1), lambda: lambda: None, lambda: Names])
def test_arguments_live_as_long_as_calls_with_them_and_no_longer(make: Callable[[], Any]) -> None:
    binder = Binder(embed, "embed", leading=1)
    kept = len(binder._known)
    value, used = make(), weakref.WeakSet[Any]()
    waiting = binder.bind((value,), {})
    used.add(value)
    is_mine = not isinstance(value, type)
    del value
    assert len(used) == 1
    assert len(binder._known) == kept + 1
    del waiting
    assert len(binder._known) == kept
    assert len(used) == (0 if is_mine else 1)


def test_an_object_in_the_place_of_one_that_is_gone_is_not_taken_for_it() -> None:
    seen = {bound(Config(number)).unpack()[0][0].content for number in range(50)}
    assert seen == set(range(50))  # one after another, many of them in the same place in memory


# ---------------------------------------------------------------- how a call passes its arguments


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("",), {}),
        ((), {"prompt": ""}),
        ((), {"scale": 1.0}),
        (("",), {"scale": 1.0}),
        ((), {"prompt": "", "scale": 1.0}),
    ],
)
def test_an_argument_left_out_equals_its_default(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert bound(*args, **kwargs) == bound()
    assert hash(bound(*args, **kwargs)) == hash(bound())


def test_a_default_carries_its_type_too() -> None:
    assert bound(scale=1) != bound()
    assert bound(scale=True) != bound()


def test_a_default_that_is_a_container_equals_nothing_that_is_passed() -> None:
    """The function may have changed it."""

    def generate(  # as users write them
        prompts: list[str],
        stop: list[str] = ["\n"],  # noqa: B006  the test is about lists as defaults
        bias: dict[str, float] = {},  # noqa: B006  and dicts
    ) -> list[str]:
        return prompts

    binder = Binder(generate, "generate", leading=1)
    assert binder.bind((["\n"],), {"bias": {}}) != binder.bind((), {})
    assert binder.bind((), {}) == binder.bind((), {})
    assert binder.bind(((),), {}) != binder.bind((), {})


@pytest.mark.parametrize("default", [object(), bytearray(b"a")])
def test_a_default_that_can_not_be_compared_is_a_key_of_its_own(default: object) -> None:
    def pool(rows: list[int], how: object = default, scale: int = 1) -> list[int]:
        return rows

    binder = Binder(pool, "pool", leading=1)
    assert binder.bind((), {}) == binder.bind((), {"scale": 1})
    assert binder.bind((), {}) != binder.bind(("mean",), {})


def test_an_argument_by_position_equals_the_same_by_keyword() -> None:
    assert bound("query") == bound(prompt="query")
    assert hash(bound("query")) == hash(bound(prompt="query"))
    assert bound("query") != bound(scale="query")


def test_the_order_of_keywords_does_not_matter() -> None:
    assert bound(scale=2.0, beam=3, prompt="a") == bound(prompt="a", beam=3, scale=2.0)


def test_surplus_arguments_count() -> None:
    assert bound("", 1, 2) == bound("", 1, 2)
    assert bound("", 1, 2) != bound("", 2, 1)
    assert bound("", 1) != bound("")
    assert bound(beam=3) == bound(beam=3)
    assert bound(beam=3) != bound(beam=4)
    assert bound(beam=3) != bound()


def test_a_gathered_keyword_is_not_mistaken_for_the_positional_argument_of_its_name() -> None:
    def rank(texts: list[str], prompt: str = "", /, **more: str) -> list[str]:
        return texts

    binder = Binder(rank, "rank", leading=1)
    assert binder.bind(("a",), {"prompt": "z"}) != binder.bind(("b",), {"prompt": "z"})


def test_the_function_gets_the_arguments_as_they_were_given() -> None:
    thing = object()
    args, kwargs = bound(
        "query", ["a"], scale=2.0, beam={"b": [thing, {1}, (2,), frozenset({3}), Point([4])]}
    ).unpack()
    assert args == ("query", ["a"])
    assert kwargs == {"scale": 2.0, "beam": {"b": [thing, {1}, (2,), frozenset({3}), Point([4])]}}
    assert type(kwargs["beam"]["b"][4]) is Point
    assert bound().unpack() == ((), {})


def test_neither_caller_nor_function_changes_what_a_batch_gets() -> None:
    mine = {"stop": ["a"]}
    given = bound(mine)
    mine["stop"].append("b")
    first, _ = given.unpack()
    first[0]["stop"].clear()
    assert given.unpack() == (({"stop": ["a"]},), {})


def test_a_method_is_bound_without_its_instance() -> None:
    class Model:
        def embed(self, texts: list[str], prompt: str = "") -> list[str]:
            return texts

    binder = Binder(Model.embed, "Model.embed", leading=2)
    assert binder.bind(("",), {}) == binder.bind((), {})
    assert binder.bind(("query",), {}) == binder.bind((), {"prompt": "query"})
    assert binder.items_name == "texts"
    with pytest.raises(TypeError, match=r"^Model\.embed: too many positional arguments$"):
        binder.bind(("query", "more"), {})


def positional_only(texts: list[str], /, prompt: str = "") -> list[str]:
    return texts


def gathered(*args: Any) -> list[Any]:
    return list(args[0])


@pytest.mark.parametrize(
    ("func", "name"), [(embed, "texts"), (positional_only, None), (gathered, None), (dict, None)]
)
def test_the_keyword_of_the_items_is_known_if_they_have_one(
    func: Callable[..., Any], name: str | None
) -> None:
    assert Binder(func, "func", leading=1).items_name == name


def test_a_function_that_gathers_its_arguments_tells_calls_apart_by_them() -> None:
    binder = Binder(gathered, "gathered", leading=1)
    assert binder.bind((1,), {}) == binder.bind((1,), {})
    assert binder.bind((1,), {}) != binder.bind((2,), {})
    assert binder.bind((1,), {}) != binder.bind((), {})


def test_a_builtin_without_a_signature_can_be_called_too() -> None:
    binder = Binder(dict, "dict", leading=1)
    assert binder.bind((), {"a": 1}) == binder.bind((), {"a": 1})
    assert binder.bind((), {"a": 1}) != binder.bind((), {"a": True})
    assert binder.bind((1,), {}) != binder.bind((2,), {})
    assert binder.bind((), {}) == binder.bind((), {})
    with pytest.raises(TypeError, match=r"^dict: .*arguments="):
        binder.bind((bytearray(b"a"),), {})


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("func", "leading"),
    [(lambda **texts: texts, 1), (lambda self: self, 2), (lambda *, texts: texts, 1)],
)
def test_a_function_that_takes_no_items_is_refused_by_name(
    func: Callable[..., Any], leading: int
) -> None:
    with pytest.raises(TypeError, match=r"^shop\.embed takes no argument for the list of items$"):
        Binder(func, "shop.embed", leading=leading)


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        ((), {}, "missing a required argument: 'language'"),
        (("en", 1, 2), {}, "too many positional arguments"),
        (("en",), {"beam": 1}, "beam"),
    ],
)
def test_arguments_that_do_not_fit_are_a_type_error_that_names_the_function(
    args: tuple[Any, ...], kwargs: dict[str, Any], why: str
) -> None:
    def translate(texts: list[str], language: str, beams: int = 1) -> list[str]:
        return texts

    binder = Binder(translate, "shop.translate", leading=1)
    with pytest.raises(TypeError, match=rf"^shop\.translate: .*{why}"):
        binder.bind(args, kwargs)
    assert binder.bind(("en",), {}) == binder.bind((), {"language": "en", "beams": 1})


def test_an_argument_given_twice_is_a_type_error_that_names_the_function() -> None:
    with pytest.raises(TypeError, match=r"^embed: multiple values for argument 'prompt'$"):
        bound("query", prompt="query")


def test_items_given_twice_are_a_type_error_that_names_the_function() -> None:
    binder = Binder(positional_only, "func", leading=1)
    with pytest.raises(TypeError, match=r"^func: .*texts"):
        binder.bind((), {"texts": []})


@pytest.mark.parametrize(
    "wrapped", [lambda value: value, lambda value: [value], lambda value: {"a": (value,)}]
)
def test_what_can_not_be_compared_is_a_type_error_that_names_function_and_argument(
    wrapped: Callable[[Any], Any],
) -> None:
    value = wrapped(bytearray(b"mask"))
    with pytest.raises(TypeError) as caught:
        bound(scale=value)
    assert str(caught.value) == (
        "embed: calls are grouped by the values of their extra arguments, "
        f"and scale={value!r} cannot be compared: unhashable type: 'bytearray'"
    )
    assert caught.value.__cause__ is None


def test_a_refusal_names_a_large_value_in_a_few_words() -> None:
    with pytest.raises(TypeError, match=r"^embed: .*prompt=.* cannot be compared") as caught:
        bound(bytearray(b"mask" * 100_000))
    assert len(str(caught.value)) < 300


def test_an_array_is_a_type_error_that_names_function_and_argument() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(
        TypeError,
        match=r"^embed: .*prompt=array.*unhashable type: "
        r"'numpy\.ndarray'$",
    ):
        bound(numpy.zeros(2))


def test_a_failing_hash_reaches_the_caller_as_it_is() -> None:
    class Broken:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            raise OSError("no hash today")

    with pytest.raises(OSError, match=r"^no hash today$"):
        bound(Broken())
    assert bound("query") == bound("query")


class Incomparable:
    """All have the same hash, and comparing two of them fails."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise OSError("no comparison today")


def test_calls_whose_arguments_can_not_be_compared_are_answered_in_batches_of_their_own() -> None:
    scheduler = Scheduler(BatchPolicy())
    requests = [Request([None], 1, bound(Incomparable()), waker=None) for _ in range(3)]
    for request in requests:
        scheduler.submit(request, 0.0)
    scheduler.cancel(requests[1])
    for request in (requests[0], requests[2]):
        batch = scheduler.take(0.0)
        assert batch is not None
        assert batch.slices == [(request, 0, 1)]
        scheduler.finished(batch, 0.0)
    assert scheduler.waiting == 0


def test_calls_that_pass_the_same_object_do_not_compare_it() -> None:
    shared = Incomparable()
    assert bound(shared) == bound(shared)
    kept = bound(shared)
    assert {kept: "first"}[bound(shared)] == "first"
