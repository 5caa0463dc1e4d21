"""Fingerprints: the parts of a step that count, and the sentences on a difference."""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import numpy as np

from batched.offline.identity.code import difference, fingerprint
from steps_of_users import Load, load, step

__all__ = ["load"]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Name(str):
    __slots__ = ()


class Number(int):
    pass


@dataclasses.dataclass
class Config:
    name: str
    sizes: list[int]


class Opaque:
    def __init__(self, number: object) -> None:
        self.number = number


class Meaning:
    def __init__(self, meaning: str, number: int) -> None:
        self.meaning, self.number = meaning, number


ARGUMENTS: list[tuple[Any, Any]] = [
    (1, 2),
    (1, 1.0),
    (1, True),
    (1, "1"),
    (None, "None"),
    ("a", b"a"),
    ([1, 2], [2, 1]),
    ({"a": 1}, {"a": 2}),
    ({1, 2}, {1, 3}),
    (Path("a"), Path("b")),
    (Colour.RED, Colour.BLUE),
    (Name("a"), Name("b")),
    (Number(1), Number(2)),
    (re.compile("a"), re.compile("b")),
    (lambda x: x, lambda x: -x),
    (Opaque, Config),
    (ast, json),
    (Meaning("a", 1), Meaning("b", 1)),
    (SimpleNamespace(a=[1]), SimpleNamespace(a=[2])),
    (np.zeros(2), np.ones(2)),
    (np.ones(2), np.ones(2, "f4")),
    (np.ones(2), np.ones((1, 2))),
]


@pytest.mark.parametrize(("one", "other"), ARGUMENTS)
def test_arguments_count_by_value(one: Any, other: Any) -> None:
    assert fingerprint(step(args=(one,))) == fingerprint(step(args=(one,)))
    for before, after, noun in (
        ({"args": (one,)}, {"args": (other,)}, "0"),
        ({"kwargs": {"x": one}}, {"kwargs": {"x": other}}, "'x'"),
    ):
        found = difference(fingerprint(step(**before)), fingerprint(step(**after)))
        assert found == f"step 'embed': its argument {noun} differs"


def test_tensors_count_by_value() -> None:
    torch = pytest.importorskip("torch")
    tensors = [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 3.0]),
        torch.tensor([1.0, 3.0], dtype=torch.float16),
        torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
        torch.tensor(1.0),
        torch.tensor([1.0]),
    ]
    prints = [json.dumps(fingerprint(step(args=(each,)))) for each in tensors]
    assert prints == [json.dumps(fingerprint(step(args=(each.clone(),)))) for each in tensors]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(("one", "other"), [(Opaque(1), Opaque(2)), ([Opaque([1])], [Opaque([2])])])
def test_the_state_of_an_argument_counts(one: Any, other: Any) -> None:
    found = difference(fingerprint(step(args=(one,))), fingerprint(step(args=(other,))))
    assert found == "step 'embed': the attribute number of Opaque differs"


def test_an_instance_with_a_text_meaning_counts_by_that_text() -> None:
    one, same = Meaning("a", 1), Meaning("a", 2)
    assert fingerprint(step(args=(one,))) == fingerprint(step(args=(same,)))


def test_a_function_that_closes_over_itself_has_a_fingerprint() -> None:
    def walk(items: list[Any]) -> list[Any]:
        return [walk(item) if isinstance(item, list) else item for item in items]

    assert fingerprint(step(fn=walk)) == fingerprint(step(fn=walk))


def test_a_warning_names_the_parts_that_are_not_looked_into(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = memoryview(b"a")
    fingerprint(step(args=(Opaque(1), threading.Lock(), [1], object(), Path(), len)))
    assert caplog.messages == []
    parser = pytest.importorskip("pyarrow.csv").ParseOptions  # without attributes of data
    holder = type("Holder", (), {"__module__": "numpy"})()
    holder.parser = parser
    fingerprint(step(args=([view, view], holder), kwargs={"generator": (x for x in "")}))
    (message,) = caplog.messages
    assert message == (
        "step 'embed': changes within its argument 0, its argument 1, its argument 'generator' "
        "are not noticed; set version=, and change it whenever they change"
    )
    caplog.clear()
    fingerprint(step(args=(view,), version=1))
    assert caplog.messages == []


def test_the_fingerprint_is_plain_json_and_keeps_no_argument() -> None:
    secret = "sk-1234"
    printed = fingerprint(step(args=(secret, {1: {secret}}), kwargs={"key": secret}))
    assert json.loads(json.dumps(printed)) == printed
    assert secret not in json.dumps(printed)


def test_a_version_stands_for_code_and_arguments() -> None:
    one = fingerprint(step(version="v3", fn=len, preprocess=str))
    assert one == fingerprint(step(version="v3", fn=sum, args=(1,), kwargs={"key": 2}))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {}, None),
        ({}, {"name": "caption", "batch_size": 64, "workers": 2}, None),
        ({}, {"fn": sum}, "its code differs"),
        ({}, {"preprocess": str}, "its preprocess differs"),
        ({"route": len}, {"route": sum}, "its route differs"),
        ({"version": "v3"}, {"version": "v4"}, "its version was 'v3' and is 'v4'"),
        ({}, {"version": "v4"}, "its version was None and is 'v4'"),
        ({}, {"input": ("a", "b")}, "its list of input columns was ['text'] and is ['a', 'b']"),
        ({}, {"output": ("b",)}, "its list of output columns was ['vector'] and is ['b']"),
        ({"args": (1,)}, {"args": (2,)}, "its argument 0 differs"),
        ({"args": (1,)}, {"args": (1, 2)}, "its list of arguments differs"),
        ({"kwargs": {"a": 1}}, {}, "its list of arguments differs"),
    ],
)
def test_the_difference_is_named(
    before: dict[str, Any], after: dict[str, Any], message: str | None
) -> None:
    found = difference(fingerprint(step(**before)), fingerprint(step(**after)))
    assert found == (None if message is None else f"step 'embed': {message}")


SOURCE = '''
import dataclasses
def outer(k):
    async def inner(items, *, n=3, **kw):
        """Doc."""
        print(f"{k!r:>{n}} {items = } {'a'}" "b", -1, 1e400, b"x", 1j, ...)
        match items:
            case [1, *_, None] | {"a": True}: return -1
        with open("x") as a, open("y") as b:
            return [x async for x in items if x not in {"a", "b"}] + [{**kw}, *items]
    return inner
@dataclasses.dataclass
class Model:
    x: int = 3
    @property
    def p(self): return self.x
    def __call__(self, items): return [lambda: self.x for _ in items]
fn = print
args = outer(1), Model, lambda a, /, b: a[1:b, ...]
'''
PINNED = [
    "#3dc55b1586c902988e57168fd3fc1f2f",
    "#b77d0dcdcfd17b15b059f7f3f2512191",
    "#014d187773c366af7f24a67e88af037e",
]
"""Fingerprints as computed by CPython 3.11, 3.12 and 3.13."""


def test_the_fingerprint_of_source_is_the_same_with_every_python(load: Load) -> None:
    parts = load({"steps": SOURCE})["parts"]
    assert [parts[f"its argument {number}"] for number in range(3)] == PINNED
