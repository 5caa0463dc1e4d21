"""Fingerprints: edits that must be noticed, and code that must be accepted again."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import batched.offline.identity
from batched.offline.identity.code import difference, fingerprint

Load = Callable[[Mapping[str, str]], dict[str, Any]]
"""Write modules, and return the fingerprint of the step in the module `steps`."""


def step(**settings: Any) -> SimpleNamespace:
    """Return a step as fingerprints see it."""
    unset = dict.fromkeys(["version", "preprocess", "postprocess", "where", "route"])
    known = {"fn": len, "name": "embed", "args": (), "kwargs": {}}
    columns = {"input": ("text",), "output": ("vector",)}
    return SimpleNamespace(**{**unset, **known, **columns, **settings})


def step_in(module: Any) -> SimpleNamespace:
    """Return the step that the variables of a module are the settings of."""
    names = vars(module).keys() & {"fn", "name", "args", "kwargs"}
    return step(**{name: getattr(module, name) for name in names})


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that makes modules in a new folder, imported anew each time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def import_anew(files: Mapping[str, str]) -> dict[str, Any]:
        for name, source in files.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
            module = name.replace("/", ".").removesuffix(".__init__")
            monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        return fingerprint(step_in(importlib.import_module("steps")))

    return import_anew


EDITS: dict[str, tuple[str, ...]] = {
    # source of the module `steps` with {} for the edit; before; after; what the sentence names
    "a prompt in a function": ("def fn(a): return '{} ' + a", "Say", "Tell", "its code"),
    "a coroutine": ("{}def fn(a): return a", "", "async ", "its code"),
    "a bool": ("def fn(a): return {}", "1", "True", "its code"),
    "a nested function": ("def fn(a):\n def f(): return {}\n return f()", "1", "2", "its code"),
    "containers": ("P = dict(a=[(1, {{'{}'}})])\ndef fn(a): return P", "a", "b", "the global P"),
    "a string.Template": (
        "import string\nT = string.Template('{} $q')\ndef fn(a): return T.substitute(q=a)",
        *("Say", "Tell", "the global T"),
    ),
    "a Jinja template": (
        "import jinja2\nT = jinja2.Template('{} {{{{ q }}}}')\ndef fn(a): return T.render(q=a)",
        *("Say", "Tell", "the global T"),
    ),
    "a regular expression": (
        "import re\nR = re.compile('{}')\ndef fn(a): return R.sub('', a)",
        *("a" * 300 + "b", "a" * 300 + "c", "the global R"),
    ),
    "a class attribute": (
        "class S:\n prompt = '{}'\ndef fn(a): return S.prompt",
        *("a", "b", "the attribute prompt of S"),
    ),
    "an enum": (
        "import enum\nclass M(enum.Enum):\n FAST = {}\ndef fn(a): return M.FAST",
        *("1", "2", "the attribute _value_ of M"),
    ),
    "an instance with slots": (
        (
            "class S:\n __slots__ = 'by'\n def __init__(self, by): self.by = by\n"
            " def __call__(self, a): return a\nfn = S({})"
        ),
        *("1", "2", "the attribute by of S"),
    ),
    "a bound method below a decorator": (
        (
            "import functools\ndef d(f):\n @functools.wraps(f)\n def w(*a): return f(*a)\n"
            " return w\nclass S:\n def __init__(self, by): self.by = by\n"
            " @d\n def embed(self, a): return a\nfn = S({}).embed"
        ),
        *("1", "2", "the attribute by of S"),
    ),
    "a setting of a class that decorates": (
        (
            "import functools\nclass Repeat:\n def __init__(self, n): self.n = n\n"
            " def __call__(self, a): return a * self.n\n"
            "def f(a): return a\nfn = functools.update_wrapper(Repeat({}), f)"
        ),
        *("1", "2", "the attribute n of Repeat"),
    ),
    "a None beside a default of None that becomes a list": (
        (
            "P = {}\ndef f(a, out=None):\n out = out or []\n out.append(a)\n return out\n"
            "def fn(a): return f(a), P"
        ),
        *("None", "'x'", "the global P"),
    ),
    "an attribute that a class overrides": (
        "class B:\n p = 'a'\n def __call__(self, a): return self.p\nclass fn(B):\n {}",
        *("pass", "p = 'b'", "its code"),
    ),
    "a field of a pydantic class": (
        (
            "import pydantic\nclass S(pydantic.BaseModel):\n"
            " p: str = pydantic.Field(description='{}')\ndef fn(a): return S.model_validate(a)"
        ),
        *("a", "b", "the global S"),
    ),
    "an attribute that only the import changes": (
        (
            "class Prompts:\n def __init__(self): self.all = {{}}\n"
            " def add(self, name, text): self.all[name] = text\n"
            " def find(self, name): return self.all[name]\n"
            "P = Prompts()\nP.add('x', '{}')\ndef fn(a): return P.find('x')"
        ),
        *("a", "b", "the attribute all of Prompts"),
    ),
    "a property": ("class fn:\n {}\n def f(self): pass", "pass", "@property", "its code"),
    "a base class elsewhere": (
        "import other\nclass fn(other.Base):\n def __call__(self, a): return self.clean(a)",
        *("upper", "lower", "its base class Base"),
        "class Base:\n def clean(self, a): return a.{}()",
    ),
    "a default argument": ("def fn(a, *, p='{}'): return p", "a", "b", "the variable p of fn()"),
    "a constant with the name of a variable elsewhere": (
        (
            "P = '{}'\ndef f(a):\n P = a\n return [x for x in a if (lambda: P)()]\n"
            "def g(): return P\ndef fn(a): return f(a), g()"
        ),
        *("a", "b", "the global P"),
    ),
    "a constant of a module": (
        "import other\ndef fn(a): return other.P",
        *("1", "2", "the global P", "P = {}"),
    ),
    "a constant imported inside": (
        "def fn(a):\n from other import P\n return P",
        *("1", "2", "the global P", "P = {}"),
    ),
    "a constant of a module of a package": (
        "def fn(a):\n from my_package import other\n return other.P",
        *("1", "2", "the global P", "P = {}"),
    ),
    "a registry by a decorator": (
        (
            "OPS = {{}}\ndef register(f):\n OPS[f.__name__] = f\n return f\n"
            "@register\ndef op(a): return '{}'\ndef fn(a): return OPS['op'](a)"
        ),
        *("a", "b", "the global OPS"),
    ),
    "a decorator's setting": (
        (
            "import functools\ndef repeat(n):\n def decorate(f):\n  @functools.wraps(f)\n"
            "  def wrapper(a): return f(a) * n\n  return wrapper\n return decorate\n"
            "@repeat({})\ndef fn(a): return a"
        ),
        *("2", "3", "the variable n of fn()"),
    ),
    "a function below an installed decorator": (
        "import contextlib\n@contextlib.contextmanager\ndef fn(a): yield {}",
        *("1", "2", "the variable func of fn()"),
    ),
    "a partial": (
        "import functools\ndef f(a, by): return a * by\nfn = functools.partial(f, by={})",
        *("2", "3", "its code"),
    ),
    "a method of a builtin": ("fn = str.{}", "upper", "lower", "its code"),
    "a path": (
        "import pathlib\nP = pathlib.Path('{}')\ndef fn(a): return P",
        *("a", "b", "the global P"),
    ),
    "the type of an array": (
        "import numpy as np\nW = np.ones(2, '{}')\ndef fn(a): return a * W",
        *("f4", "f8", "the global W"),
    ),
    "a tensor": (
        "import torch\nW = torch.tensor({})\ndef fn(a): return a * W",
        *("1.0", "2.0", "the global W"),
    ),
    "the type of a tensor": (
        "import torch\nT = torch.{}\ndef fn(a): return a.to(T)",
        *("float32", "float16", "the global T"),
    ),
    "a large array": (
        "import numpy as np\nW = np.full(3 << 20, {})\ndef fn(a): return a * W",
        *("1.0", "2.0", ""),
    ),
    "a model": (
        "import torch\nW = torch.nn.Linear({}, 1)\ndef fn(a): return W(a)",
        *("1", "2", ""),
    ),
    "a keyword argument": ("fn = print\nkwargs = dict(p={{'{}'}})", "a", "b", "its argument 'p'"),
    "one more argument": ("fn = print\nargs = {}", "[1]", "[1, 2]", "its list of arguments"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_noticed_or_named(
    name: str, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    source, before, after, noun, *others = EDITS[name]
    for library in ("jinja2", "pydantic", "torch"):
        if f"import {library}" in source:
            pytest.importorskip(library)
    shown = []
    for word, place in ((before, ""), (before, "\n# moved\n"), (after, "")):
        files = {"other": "".join(others).replace("{}", word), "my_package/__init__": ""}
        files |= {"my_package/other": files["other"], "steps": place + source.format(word)}
        shown.append(load(files))
    assert difference(*shown[:2]) is None
    found = difference(*shown[1:])
    if noun:
        assert found == f"step 'embed': {noun} differs"
        assert caplog.messages == []
    else:
        assert found is None
        assert all(
            message.startswith("step 'embed': changes within") for message in caplog.messages
        )
        assert len(caplog.messages) == 3


ACCEPTED = {
    "a set in the code": "def fn(a): return [x in {'a', 'b', 'c'} for x in a]",
    "a dict that is emptied": "C = {'a': 1}\ndef fn(a):\n del C['a']\n C.clear()",
    "a set that grows": "C = set()\ndef fn(a): C.update(a)",
    "counters": (
        "import collections\nC, D = collections.Counter(), collections.deque()\n"
        "def fn(a):\n for x in a: C[x] += 1; D.append(x)"
    ),
    "a list within a dict": "C = {'x': []}\ndef fn(a): C['x'].append(a)",
    "a model that is loaded late": (
        "model = None\ndef load():\n global model\n model = model or object()\n return model\n"
        "def fn(a): return [load()] * len(a)"
    ),
    "a cached helper": (
        "import functools\n@functools.cache\ndef f(x): return x\ndef fn(a): return f(a[0])"
    ),
    "a closure that counts": (
        "def make():\n n, seen = 0, []\n def fn(a):\n  nonlocal n\n  n += 1\n  seen.extend(a)\n"
        " return fn\nfn = make()"
    ),
    "a cache as a default": "def fn(a, cache={}):\n for x in a: cache[x] = 1",
    "a cache of another module": "import other\ndef fn(a): other.CACHE[a[0]] = 1; other.N = 2",
    "a cache that is imported": (
        "from other import CACHE, get\ndef fn(a): return [(get(x), CACHE.get(x)) for x in a]"
    ),
    "a cache imported inside": "def fn(a):\n from other import get\n return [*map(get, a)]",
    "an attribute that counts": (
        "class S:\n def __init__(self): self.n, self.seen, self.model = 0, {}, None\n"
        " def __call__(self, a): self.n += 1; self.seen[a[0]] = 1; self.load()\n"
        " def load(self): self.model = object()\nfn = S()"
    ),
    "an attribute of a class": (
        "class S:\n n, cache = 0, {}\n @classmethod\n"
        " def note(cls, x): cls.cache[x] = 1; S.n += 1\n"
        " def __call__(self, a): self.note(a[0])\nfn = S()"
    ),
    "an attribute from outside": ("class S:\n n = 0\nS1 = S()\ndef fn(a): S1.n += 1"),
    "a cached property": (
        "import functools\nclass S:\n @functools.cached_property\n def size(self): return 1\n"
        " def __call__(self, a): return self.size\nfn = S()"
    ),
    "a cache that inherits": (
        "class B:\n def __init__(self): self.seen = []\n def note(self, x): self.seen.append(x)\n"
        "class S(B):\n def __call__(self, a): self.note(a)\nfn = S()"
    ),
    "a dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass S:\n words: set\n"
        " more: list = dataclasses.field(default_factory=list)\n"
        "C = S({'a', 'b', 'c'})\ndef fn(a): return C, S(set())"
    ),
    "a pydantic model": (
        "import pydantic\nclass S(pydantic.BaseModel):\n words: set = {'a', 'b', 'c'}\nC = S()\n"
        "def fn(a): return C.model_dump(), S()"
    ),
    "templates of Jinja": (
        "import jinja2\nT, E = jinja2.Template('a {{ q }}'), jinja2.Environment()\n"
        "def fn(a): return T.render(q=a), E.from_string('a').render()"
    ),
    "the environment": "from os import environ\ndef fn(a): environ['X_OF_A_TEST'] = environ['PWD']",
    "what changes by itself": (
        "import itertools, logging, random, sqlite3, threading, numpy\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "C, R, N = itertools.count(), random.Random(0), numpy.random.default_rng(0)\n"
        "L, log, P = threading.Lock(), logging.getLogger('x'), ThreadPoolExecutor(2)\n"
        "D = sqlite3.connect(':memory:', check_same_thread=False)\n"
        "def fn(a):\n with L: log.info('a')\n next(C)\n"
        " return R.random(), N.random(), [*P.map(str, a)], D.execute('select 1').fetchall()"
    ),
    "a client": (
        "import urllib.request\nC = urllib.request.build_opener()\n"
        "def fn(a): C.addheaders.append(('a', 'b'))"
    ),
    "a password": "import uuid\nAPI_KEY = str(uuid.uuid4())\ndef fn(a): return API_KEY",
    "arrays": "import numpy as np\nW = np.arange(6.0).reshape(2, 3).T\ndef fn(a): return W.sum()",
    "functions": (
        "import functools, operator\nfn = functools.partial(map, operator.itemgetter(0))\n"
        "args = (lambda x: x, str.upper, 'a'.join, len, functools.reduce)"
    ),
    "a function that calls itself": "def fn(a): return fn(a[1:]) if a else a",
}
OTHER = "CACHE, N = {}, 0\ndef get(x):\n CACHE[x] = 1\n return x\n"
PRELUDE = f"""from __future__ import annotations
import importlib, json, runpy, sys
sys.path.append({str(Path(batched.__file__).parents[1])!r})
from types import SimpleNamespace
from batched.offline.identity.code import fingerprint
{inspect.getsource(step)}
{inspect.getsource(step_in)}
"""
PROGRAM = f"""
shown = {{}}
for number in range({len(ACCEPTED)}):
    try:
        module = importlib.import_module(f"steps{{number}}")
    except ImportError:
        continue
    before = fingerprint(step_in(module))
    module.fn(["a", "b"])
    shown[number] = before, fingerprint(step_in(module))
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the fingerprints of all `ACCEPTED` as two processes show them, before and after."""
    folder = tmp_path_factory.mktemp("accepted")
    (folder / "other.py").write_text(OTHER)
    for number, source in enumerate(ACCEPTED.values()):
        (folder / f"steps{number}.py").write_text(source)
    return [show(folder, PROGRAM, seed) for seed in "12"]


def show(folder: Path, program: str, seed: str) -> dict[str, Any]:
    """Return what a new process shows that runs a program in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        cwd=folder,
        env={"PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1", "PWD": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.parametrize("number", [str(at) for at in range(len(ACCEPTED))], ids=[*ACCEPTED])
def test_unchanged_code_is_accepted_in_another_process_and_after_its_run(
    number: str, accepted: list[dict[str, Any]]
) -> None:
    if number not in accepted[0]:
        pytest.skip("a library is not installed")
    shown = [each for process in accepted for each in process[number]]
    assert all(difference(one, other) is None for one in shown for other in shown)


SCRIPT = """
main = sys.modules["__main__"]
vars(main).update(runpy.run_path("steps.py", None, "__main__"))
print(json.dumps(fingerprint(step_in(main))))
"""
SOURCE = """
import enum, other
WORDS = {"a", "b", "c"}
lower = "an attribute has this name, too"
class Mode(enum.Enum):
    FAST = "fast"
class Model:
    def __init__(self, words): self.words = words
    def __call__(self, items):
        'Docs.'
        class Inner:
            "Inner docs."
            def __init__(self): self.one, self.two, self.three = 1, 2, 3
        return [clean(x) for x in items if x in self.words], Mode.FAST, other.CACHE
def clean(text): return text.lower()
fn = Model(WORDS)
"""


def test_a_script_is_the_same_as_a_module(load: Load, tmp_path: Path) -> None:
    shown = load({"other": OTHER, "steps": SOURCE})
    assert show(tmp_path, SCRIPT, "1") == shown


@pytest.mark.parametrize(
    "edit",
    [
        ("if x in self.words", "if x in (\n  self.words)  # known\n "),
        ('"Inner docs."', '"Other docs."'),
        ("        'Docs.'\n", ""),
        ('WORDS = {"a", "b", "c"}', "WORDS = set('cab')"),
        ("import enum, other", "import enum\nimport json\nimport other\nunused = 1"),
        ("an attribute", "a method"),
        ("fn = ", "name = 'another name'\nfn = "),
    ],
)
def test_an_edit_that_changes_nothing_is_not_noticed(edit: tuple[str, str], load: Load) -> None:
    assert edit[0] in SOURCE
    shown = [load({"other": OTHER, "steps": text}) for text in (SOURCE, SOURCE.replace(*edit))]
    assert difference(*shown) is None


def test_settings_of_the_library_s_decorators_do_not_count(load: Load) -> None:
    source = "import batched\n{}\ndef fn(items): return items"
    decorators = ("", "@batched.dynamically(batch_size=8)", "@batched.dynamically(batch_size=64)")
    plain, *decorated = (load({"steps": source.format(each)}) for each in decorators)
    assert decorated == [plain] * 2


def test_the_loaded_code_counts_and_not_the_saved_one(load: Load, tmp_path: Path) -> None:
    known = load({"steps": "def fn(items): return 1\n"})
    module = importlib.import_module("steps")
    (tmp_path / "steps.py").write_text("def fn(items): return 222\n")
    assert fingerprint(step_in(module)) == known
    importlib.reload(module)
    assert difference(known, fingerprint(step_in(module))) == "step 'embed': its code differs"


def test_code_without_a_file_counts() -> None:
    def shown(source: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "made"}
        exec(source, namespace)
        return fingerprint(step(fn=namespace["f"]))

    before = shown("C = {}\ndef f(x): C[x] = 1; return x in {'a', 'b'}")
    assert before == shown("\n\nC = {1: 2}\ndef f(x): C[x] = 1; return x in {'b', 'a'}")
    assert before != shown("C = {}\ndef f(x): C[x] = 1; return x in {'a', 'c'}")


def test_a_warning_names_each_part_in_which_changes_are_not_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator, view = (x for x in ""), memoryview(b"a")
    unnoticed: dict[str, Any] = {"args": (view, 1), "kwargs": {"rows": generator}}
    fingerprint(step(**unnoticed))
    assert caplog.messages == [
        (
            "step 'embed': changes within its argument 'rows', its argument 0 are not noticed; set "
            "version=, and change it whenever they change"
        )
    ]
    caplog.clear()
    fingerprint(step(**unnoticed, version=1))
    assert caplog.messages == []


def test_no_value_is_kept_and_equal_values_have_other_hashes_in_another_progress_file() -> None:
    secret = "sk-1234"
    settings: dict[str, Any] = {"args": (secret, {1: {secret}}), "kwargs": {"x": secret}}
    shown = fingerprint(step(**settings), "salt")
    assert json.loads(json.dumps(shown)) == shown
    assert secret not in json.dumps(shown)
    other = fingerprint(step(**settings), "another salt")
    assert not {*shown["parts"].values()} & {*other["parts"].values()}


def test_a_version_stands_for_code_and_arguments() -> None:
    one = fingerprint(step(version="v3", fn=len, preprocess=str))
    assert one == fingerprint(step(version="v3", fn=sum, args=(1,), kwargs={"key": 2}))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"name": "caption", "batch_size": 64, "workers": 2}, None),
        ({}, {"preprocess": str}, "its preprocess differs"),
        ({"where": len}, {"where": sum}, "its where differs"),
        ({"version": "v3"}, {"version": "v4"}, "its version was 'v3' and is 'v4'"),
        ({}, {"input": ("a", "b")}, "its input was ['text'] and is ['a', 'b']"),
    ],
)
def test_the_difference_is_named(
    before: dict[str, Any], after: dict[str, Any], message: str | None
) -> None:
    found = difference(fingerprint(step(**before)), fingerprint(step(**after)))
    assert found == (None if message is None else f"step '{after.get('name', 'embed')}': {message}")


def test_another_python_is_named_as_a_possible_reason() -> None:
    before = {**fingerprint(step(fn=lambda a: a)), "python": "3.11.7"}
    now = {**fingerprint(step(fn=lambda a: -a)), "python": "3.12.1"}
    assert difference(before, now) == (
        "step 'embed': its code differs (Python was 3.11.7 and is 3.12.1, which may be the reason)"
    )
