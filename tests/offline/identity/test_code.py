"""Fingerprints: they change when the meaning of a step does, and with nothing else."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import json
import linecache
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import batched
from batched import offline
from batched.offline.identity.code import difference, fingerprint


def code_hash(func: Any) -> str:
    return json.dumps(fingerprint(step(fn=func))["parts"])


def define(source: str, folder: Path, **names: Any) -> Any:
    """Return the value `it` of a module that is edited to this source."""
    path = folder / "edited.py"
    path.write_text(textwrap.dedent(source))
    namespace = {"__name__": __name__, **names}
    linecache.cache.pop(str(path), None)
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["it"]


@pytest.fixture
def hash_of(tmp_path: Path) -> Callable[..., str]:
    return lambda source, **names: code_hash(define(source, tmp_path, **names))


def test_comments_formatting_docstrings_and_place_do_not_count(hash_of: Callable[..., str]) -> None:
    assert hash_of("def it(a, b=2):\n    return a + b, 'x'\n") == hash_of(
        '''

        def it(
            a, b=2,  # a comment
        ):
            """A docstring."""
            return (a + b,
                    "x")
        '''
    )


def test_batch_size_and_other_decorators_settings_do_not_count(hash_of: Callable[..., str]) -> None:
    plain = hash_of("def it(items):\n    return items\n")
    for size in 8, 64:
        source = f"@batched.dynamically(batch_size={size})\ndef it(items):\n    return items\n"
        assert hash_of(source, batched=batched) == plain
    cached = "@functools.lru_cache\ndef it(items):\n    return items\n"
    assert hash_of(cached, functools=functools) == plain


# before and after; where one word differs, {} stands for it
EDITS: list[tuple[str, str, str]] = [
    ("def it(a): return {}", "a", "-a"),
    ("{}def it(a): return a", "", "async "),
    ("async def it(a): return [x {}for x in a]", "async ", ""),
    ("def it(a, b={}): return a", "1", "2"),
    ("def it(a): return {}", "1", "1.0"),
    ("def it(a): return {}", "1", "True"),
    ("def it(a): return {}", "'x'", "b'x'"),
    ("def it(a): return f'{{a!{}:>{{9}}}}'", "r", "s"),
    ("def it(a):\n match a:\n  case {}: return 1", "None", "False"),
    ("it = lambda a: {}", "a", "not a"),
    ("N = {}\ndef it(a, b=N): return a", "1", "2"),
    ("N = {}\ndef it(a, *, b=N): return a", "1", "2"),
    ("def f(n):\n def g(a): return n\n return g\nit = f({})", "1", "2"),
    ("def f(n):\n def g(a): return n\n return g\nit = f({})", "('a',)", "('b',)"),
    ("def f(n):\n def g(a): return n\n return g\nit = f({})", "lambda x: 1", "lambda x: 2"),
    ("class it:\n def __call__(self, a): return {}", "a", "-a"),
    ("class it:\n size = {}\n def f(self): pass", "1", "2"),
    ("class it:\n {}\n def f(self): pass\n def g(self): pass", "pass", "@property"),
    ("class B:\n def f(self): return {}\nclass it(B): pass", "1", "2"),
    ("class B:\n def f(self): pass\nclass it(B): size = {}", "1", "2"),
    ("class B: pass\nclass C: pass\nclass it({}): pass", "B", "C"),
    ("class C:\n def f(self): return {}\nit = C().f", "1", "2"),
    ("class C:\n def __call__(self): return {}\nit = C()", "1", "2"),
    ("from functools import partial as p\nit = p(lambda a, b: a, {})", "1", "2"),
    ("from functools import partial as p\nit = p(print, sep={})", "['a']", "['b']"),
    (
        (
            "import functools\n"
            "def times(n):\n"
            " def decorate(f):\n"
            "  @functools.wraps(f)\n"
            "  def g(a): return f(a) * n\n"
            "  return g\n"
            " return decorate\n"
            "@times({})\n"
            "def it(a): return a"
        ),
        "1",
        "2",
    ),
    (
        (
            "import dataclasses\n"
            "@dataclasses.dataclass(frozen=True)\n"
            "class C:\n"
            " n: int\n"
            " def __call__(self, a): return a\n"
            "it = C({})"
        ),
        "1",
        "2",
    ),
    ("it = {}", "len", "sum"),
    ("it = str.{}", "upper", "lower"),
]


@pytest.mark.parametrize(("source", "before", "after"), EDITS)
def test_an_edit_of_the_meaning_counts(
    source: str, before: str, after: str, hash_of: Callable[..., str]
) -> None:
    first = hash_of(source.format(before))
    assert hash_of("\n# moved\n" + source.format(before)) == first
    assert hash_of(source.format(after)) != first


def test_two_lambdas_on_one_line_are_told_apart() -> None:
    a, b, c = (lambda x: x + 1), (lambda x: x + 2), (lambda x: x + 1)
    outer: Callable[[], Callable[[], int]]
    outer, inner = (lambda: lambda: 3), (lambda: 3)
    assert code_hash(a) == code_hash(c) != code_hash(b)
    assert code_hash(outer()) == code_hash(inner) != code_hash(outer)


def test_a_function_without_source_counts_by_its_bytecode() -> None:
    def made(source: str) -> Any:
        namespace: dict[str, Any] = {"__name__": "made"}
        exec(source, namespace)
        return namespace["f"]

    assert code_hash(made("def f(x): return x in {'a', 'b', 'c'}")) == code_hash(
        made("\n\ndef f(x): return x in {'a', 'b', 'c'}")
    )
    assert code_hash(made("def f(x): return x + 1")) != code_hash(made("def f(x): return x + 2"))
    assert code_hash(made("def f(x): return x.a")) != code_hash(made("def f(x): return x.b"))
    made_class = "class f:\n def g(self): return {}"
    assert code_hash(made(made_class.format(1))) != code_hash(made(made_class.format(2)))


def test_source_that_is_no_python_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "page.template").write_text("{% if it %}")
    namespace: dict[str, Any] = {}
    exec(compile("def it(): return 1", str(tmp_path / "page.template"), "exec"), namespace)
    first = code_hash(namespace["it"])
    exec(compile("def it(): return 2", str(tmp_path / "page.template"), "exec"), namespace)
    assert code_hash(namespace["it"]) != first


def test_state_that_a_function_changes_does_not_count() -> None:
    count = 0
    calls: list[int] = []
    lock = threading.Lock()

    def step(items: list[int], seen: dict[int, int] = {}) -> list[int]:  # noqa: B006  # on purpose
        nonlocal count
        with lock:
            count += 1
            calls.append(len(items))
            seen[count] = len(items)
        return items

    before = code_hash(step)
    step([1, 2])
    assert (count, calls) == (1, [2])
    assert code_hash(step) == before


def test_a_function_that_closes_over_itself_has_a_hash() -> None:
    def walk(items: list[Any]) -> list[Any]:
        return [walk(item) if isinstance(item, list) else item for item in items]

    assert code_hash(walk) == code_hash(walk)


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


def step(**changes: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {
        "fn": len,
        "name": "caption",
        "version": None,
        "args": (),
        "kwargs": {},
        "input": ("text",),
        "output": ("caption",),
        "preprocess": None,
        "postprocess": None,
        "route": None,
    }
    return SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize(
    ("one", "other"),
    [
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
    ],
)
def test_arguments_count_by_value(one: Any, other: Any) -> None:
    assert fingerprint(step(args=(one,))) == fingerprint(step(args=(one,)))
    for place in (
        ({"args": (one,)}, {"args": (other,)}),
        (
            {"kwargs": {"x": one}},
            {"kwargs": {"x": other}},
        ),
    ):
        before, after = (fingerprint(step(**changes)) for changes in place)
        assert difference(before, after) == (
            "step 'caption': its argument 0 differs"
            if "args" in place[0]
            else "step 'caption': its argument 'x' differs"
        )


def test_arrays_count_by_content() -> None:
    np = pytest.importorskip("numpy")
    prints = [
        json.dumps(fingerprint(step(args=(value,))))
        for value in (np.zeros(2), np.ones(2), np.ones(2, "f4"), np.ones((1, 2)), np.float64(1))
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(step(args=(np.ones(2),))) == fingerprint(step(args=(np.ones(2),)))


def test_the_state_of_an_argument_counts() -> None:
    for one, other in ((Opaque(1), Opaque(2)), ([Opaque([1])], [Opaque([2])])):
        assert difference(fingerprint(step(args=(one,))), fingerprint(step(args=(one,)))) is None
        assert difference(fingerprint(step(args=(one,))), fingerprint(step(args=(other,)))) == (
            "step 'caption': the attribute number of Opaque differs"
        )


def test_a_warning_names_the_parts_that_are_not_looked_into(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = memoryview(b"a")
    fingerprint(step(args=(Opaque(1), threading.Lock(), [1], object(), Path(), len)))
    assert caplog.messages == []
    fingerprint(step(args=([view, view],), kwargs={"generator": (x for x in "")}))
    (message,) = caplog.messages
    assert message == (
        "step 'caption': changes within its argument 0, its argument 'generator' are not noticed; "
        "version= says when they matter"
    )
    caplog.clear()
    fingerprint(step(args=(view,), version=1))
    assert caplog.messages == []


def test_each_run_warns_once_of_parts_that_are_not_looked_into(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def same(items: list[int], views: list[memoryview]) -> list[int]:
        return items

    settings: dict[str, Any] = {"input": "n", "output": "m", "args": ([memoryview(b"a")],)}
    for _ in range(2):
        caplog.clear()
        offline.run(same, [{"n": 1}], tmp_path / "out.jsonl", watch=False, **settings)
        assert ["not noticed" in message for message in caplog.messages] == [True]


def test_the_fingerprint_is_plain_json_and_keeps_no_argument() -> None:
    secret = "sk-1234"
    printed = fingerprint(step(args=(secret, {1: {secret}}), kwargs={"key": secret}))
    assert json.loads(json.dumps(printed)) == printed
    assert secret not in json.dumps(printed)


def test_mechanics_do_not_count() -> None:
    assert fingerprint(step(batch_size=8, workers=2)) == fingerprint(step(batch_size=64))


def test_a_version_stands_for_code_and_arguments() -> None:
    one = fingerprint(step(version="v3", fn=len, preprocess=str))
    assert one == fingerprint(step(version="v3", fn=sum, args=(1,), kwargs={"key": 2}))
    assert difference(one, fingerprint(step(version="v4"))) is not None


def test_the_name_of_a_step_does_not_count() -> None:
    assert difference(fingerprint(step(name="embed")), fingerprint(step())) is None


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {}, None),
        ({}, {"fn": sum}, "its code differs"),
        ({}, {"preprocess": str}, "its preprocess differs"),
        ({"route": len}, {"route": sum}, "its route differs"),
        ({"version": "v3"}, {"version": "v4"}, "its version was 'v3' and is 'v4'"),
        ({}, {"version": "v4"}, "its version was None and is 'v4'"),
        ({}, {"input": ("a", "b")}, "its list of input columns was ['text'] and is ['a', 'b']"),
        ({}, {"output": ("b",)}, "its list of output columns was ['caption'] and is ['b']"),
        ({"args": (1,)}, {"args": (2,)}, "its argument 0 differs"),
        ({"args": (1,)}, {"args": (1, 2)}, "its list of arguments differs"),
        ({"kwargs": {"a": 1}}, {"kwargs": {"a": 2}}, "its argument 'a' differs"),
        ({"kwargs": {"a": 1}}, {}, "its list of arguments differs"),
    ],
)
def test_the_difference_is_named(
    before: dict[str, Any], after: dict[str, Any], message: str | None
) -> None:
    found = difference(fingerprint(step(**before)), fingerprint(step(**after)))
    assert found == (None if message is None else f"step 'caption': {message}")


MODULE = '''
import dataclasses, enum, functools, re, threading
from types import SimpleNamespace
from batched.offline.identity.code import fingerprint

class Opaque: pass

@dataclasses.dataclass(frozen=True)
class Config:
    n: int
    names: frozenset

def made(*values):
    def step(items, extra=Opaque(), names=frozenset({"a", "b", "c"})):
        """Doc."""
        print(f"{items!r:>{3}} {items = }", values)
        match items:
            case [1, *_, None]: return {"a", "b", "c"}
        return [x for x in items if x not in {"a", "b", "c"}]
    return step

class Model:
    names = {"a", "b", "c"}
    def __init__(self, lock=threading.Lock()): self.lock = lock
    def __call__(self, items): return items

ARGUMENTS = (Opaque(), object(), threading.Lock(), {"a", "b", "c"}, Config(1, frozenset("abc")),
    {"x": {"a", "b", "c"}}, functools.partial(made, {"a", "b", "c"}), re.compile("a"), Opaque,
    lambda: 1, len, [Opaque()], 0.1)

def show():
    found = []
    partial = functools.partial(len, ARGUMENTS)
    for fn in made(*ARGUMENTS), Model, Model(), Model().__call__, partial, lambda items: ARGUMENTS:
        found.append(fingerprint(SimpleNamespace(fn=fn, name="s", version=None, args=ARGUMENTS,
            kwargs={"a": Opaque()}, input=("a",), output=("b",), preprocess=fn, postprocess=None,
            route=None)))
    return found
'''


def test_the_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        MODULE + "\nif __name__ == '__main__':\n    import json; print(json.dumps(show()))\n"
    )
    printed = []
    for seed, command in (
        ("1", ["-c", "import json, steps; print(json.dumps(steps.show()))"]),
        ("2", ["-c", "x = 'moved' * 9999; import json, steps; print(json.dumps(steps.show()))"]),
        ("3", ["steps.py"]),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        printed.append(json.loads(done.stdout))
    for other in printed[1:]:
        for old, new in zip(printed[0], other, strict=True):
            assert difference(old, new) is None


def test_the_hash_of_source_is_the_same_with_every_python(tmp_path: Path) -> None:
    # as computed by CPython 3.11, 3.12 and 3.13
    source = '''
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
        it = outer(1), Model, lambda a, /, b: a[1:b, ...]
        '''
    parts = [fingerprint(step(fn=one))["parts"] for one in define(source, tmp_path)]
    assert [one["its code"] for one in parts] == PINNED


PINNED = [
    "#3dc55b1586c902988e57168fd3fc1f2f",
    "#b77d0dcdcfd17b15b059f7f3f2512191",
    "#014d187773c366af7f24a67e88af037e",
]
