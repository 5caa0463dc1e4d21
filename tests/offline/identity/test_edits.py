"""Edits of user code between two runs: some must be noticed, and some must not."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("pyarrow")

import batched
import batched.offline.identity
from batched.offline.identity.code import difference, fingerprint
from batched.offline.identity.syntax import find_tree
from steps_of_users import Load, load, step, step_in

__all__ = ["load"]


class Edit(NamedTuple):
    """One word of a module that is edited."""

    source: str
    """Source of the module `steps`; {} stands for the word."""
    before: str
    after: str
    message: str = "its code differs"
    """The difference, after the name of the step."""
    module: str | None = None
    """Source of another module, `settings`; the word is there instead."""


CLASS = "class Model:\n def __call__(self, items): return items\n"
NOTICED = {
    "an operator": Edit("def fn(a): return {}", "a", "-a"),
    "a coroutine": Edit("{}def fn(a): return a", "", "async "),
    "a bool": Edit("def fn(a): return {}", "1", "True"),
    "a pattern": Edit("def fn(a):\n match a:\n  case {}: return 1", "None", "False"),
    "a lambda": Edit("fn = lambda a: {}", "a", "not a"),
    "a lambda on the same line": Edit("fn = [lambda a: 1, lambda a: 2][{}]", "0", "1"),
    "a list in a closure": Edit(
        (
            "def make(words):\n"
            " def embed(items):\n"
            "  found = []\n"
            "  for x in items: found.append(x in words)\n"
            "  return found\n"
            " return embed\n"
            "fn = make(['a', '{}'])"
        ),
        *("b", "c", "the variable words of make.<locals>.embed() differs"),
    ),
    "a default argument": Edit(
        "SIZE = {}\ndef fn(items, *, size=SIZE): return items[:size]",
        *("1", "2", "the variable size of fn() differs"),
    ),
    "a module constant": Edit(
        "DEVICE = '{}'\ndef fn(items): return [(x, DEVICE) for x in items]",
        *("cpu", "cuda", "the global DEVICE was 'cpu' and is 'cuda'"),
    ),
    "a constant of a helper's helper": Edit(
        "N = {}\ndef fn(x): return f(x)\ndef f(x): return (lambda: g(x))()\ndef g(x): return N",
        *("1", "2", "the global N was 1 and is 2"),
    ),
    "a constant imported inside": Edit(
        "def fn(items):\n from settings import LIMIT\n return items[:LIMIT]",
        *("10", "20", "the module settings differs"),
        module="LIMIT = {}",
    ),
    "a constant of an imported module": Edit(
        "import settings\ndef fn(items): return items[:settings.LIMIT]",
        *("10", "20", "the global settings.LIMIT was 10 and is 20"),
        module="LIMIT = {}",
    ),
    "a global that becomes a function": Edit(
        "{}\ndef fn(items): return CLEAN",
        *("CLEAN = 1", "def CLEAN(): pass", "the global CLEAN was 1 and is code"),
    ),
    "a helper in the same module": Edit(
        "def fn(items): return [*map(clean, items)]\ndef clean(text): return text.{}()",
        *("upper", "lower", "its helper clean() differs"),
    ),
    "a decorator's setting": Edit(
        (
            "import functools\n"
            "def repeat(times):\n"
            " def decorate(func):\n"
            "  @functools.wraps(func)\n"
            "  def wrapper(items): return func(items) * times\n"
            "  return wrapper\n"
            " return decorate\n"
            "@repeat({})\n"
            "def fn(items): return items"
        ),
        *("2", "3", "the variable times of fn() differs"),
    ),
    "a partial": Edit(
        "import functools\ndef f(items, by): return items * by\nfn = functools.partial(f, by={})",
        *("2", "3"),
    ),
    "a method of a builtin": Edit("fn = str.{}", "upper", "lower"),
    "a method": Edit("class fn:\n def __call__(self, a): return {}", "a", "-a"),
    "a property": Edit("class fn:\n {}\n def f(self): pass", "pass", "@property"),
    "a base class elsewhere": Edit(
        (
            "import settings\nclass Model(settings.Base):\n"
            " def __call__(self, items): return self.clean(items)\nfn = Model"
        ),
        *("upper", "lower", "its base class Base differs"),
        module="class Base:\n def clean(self, items): return [x.{}() for x in items]",
    ),
    "a function of a package in a class": Edit(
        (
            "import json\nclass Model:\n parse = staticmethod(json.{})\n"
            " def __call__(self, items): return [*map(self.parse, items)]\nfn = Model"
        ),
        *("loads", "dumps"),
    ),
    "an instance": Edit(
        (
            "class Scale:\n"
            " def __init__(self, by): self.by, self.calls = by, 0\n"
            " def __call__(self, items): self.calls += 1; return [x * self.by for x in items]\n"
            "fn = Scale({})"
        ),
        *("2", "3", "the attribute by of Scale differs"),
    ),
    "an instance with slots": Edit(
        "class Scale:\n __slots__ = 'by'\n"
        " def __init__(self, by): self.by = by\n def __call__(self, items): return items\n"
        "fn = Scale({})",
        *("2", "3"),
    ),
    "a bound method": Edit(
        (
            "class Model:\n"
            " def __init__(self, words): self.words = words\n"
            " def embed(self, items): return [x in self.words for x in items]\n"
            "fn = Model({}).embed"
        ),
        *("['a']", "['b']", "the attribute words of Model differs"),
    ),
    "the value of an Enum member": Edit(
        (
            "import enum\nclass Mode(enum.Enum):\n FAST = {}\n"
            "def fn(items): return [(x, Mode.FAST) for x in items]"
        ),
        *("1", "2", "the attribute FAST of Mode differs"),
    ),
    "the class of a global": Edit(
        (
            "class Model:\n def embed(self, x): return x.{}()\nmodel = Model()\n"
            "def fn(items): return [*map(model.embed, items)]"
        ),
        *("upper", "lower", "the global model differs"),
    ),
}


@pytest.mark.parametrize("name", NOTICED)
def test_an_edit_of_the_meaning_is_noticed_and_named(name: str, load: Load) -> None:
    edit = NOTICED[name]
    shown = []
    for word, place in ((edit.before, ""), (edit.before, "\n# moved\n"), (edit.after, "")):
        source = edit.source if edit.module else edit.source.format(word)
        module = (edit.module or "").format(word)
        shown.append(load({"settings": module, "steps": place + source}))
    assert difference(*shown[:2]) is None
    assert difference(*shown[1:]) == f"step 'embed': {edit.message}"


def test_the_weights_of_a_model_in_a_global_count() -> None:
    torch = pytest.importorskip("torch")
    scope: dict[str, Any] = {"__name__": "steps", "model": torch.nn.Linear(2, 2)}
    exec("def fn(items): return model(items)", scope)
    before = fingerprint(step(fn=scope["fn"]))
    assert difference(before, fingerprint(step(fn=scope["fn"]))) is None
    scope["model"].bias.data += 1
    assert difference(before, fingerprint(step(fn=scope["fn"]))) == (
        "step 'embed': its helper model() differs"
    )


def test_settings_of_the_library_s_decorators_and_caches_do_not_count(load: Load) -> None:
    source = "import batched, functools\n{}\ndef fn(items): return items"
    plain, *decorated = (
        load({"steps": source.format(decorator)})
        for decorator in (
            "",
            "@batched.dynamically(batch_size=8)",
            "@batched.dynamically(batch_size=64)",
            "@functools.lru_cache",
        )
    )
    assert decorated == [plain] * 3


STEPS = '''\
import enum
import functools
import re
import threading
from dataclasses import dataclass
import settings

LIMIT = 3
unused = 1
CACHE = {}
COUNT = 0

class Mode(enum.Enum):
    FAST = "é"

@dataclass
class Model(settings.Base):
    words: frozenset = frozenset({"a", "b", "c"})
    mode: Mode = Mode.FAST
    seen: int = 0

    @functools.cached_property
    def size(self):
        return len(self.words)

    def __call__(self, items):
        self.seen += len(items)
        return [self.clean(x) for x in items if self.size and x in self.words]

def clean(text):
    global COUNT
    COUNT += 1
    CACHE[text] = re.sub(" ", "", text)
    return CACHE[text][:LIMIT]

known = None

def start():
    global known
    known = known or ["a", "b"]

def make(model, seen):
    calls = 0
    @functools.lru_cache
    def embed(items, *, limit=2, more={}):
        """Embed."""
        nonlocal calls
        calls += 1
        more[calls] = start()
        seen.append(len(items) + len(known))
        match items:
            case [1, *_, None] | {"a": True}: return -1
        return [f"{x!r:>{limit}} {calls = }" for x in map(clean, items) if model([x])]
    return embed

model = Model()
fn = make(model, [])
args = (model, {"a", "b", "c"}, functools.partial(clean, text={"a": 1}), lambda x: x, 0.1)
args += (object(), threading.Lock(), re.compile("a"), Mode.FAST, Mode, len, [Model()], settings)
'''
SETTINGS = """\
class Base:
    kinds = {"a": 1}
    def clean(self, text): return text
"""
FILES = {"steps": STEPS, "settings": SETTINGS}
CLEAN = STEPS[STEPS.index("def clean") : STEPS.index("def make")]


def edited(old: str, new: str) -> dict[str, str]:
    assert old in STEPS
    return {"steps": STEPS.replace(old, new)}


UNCHANGED: dict[str, Mapping[str, str]] = {
    "formatting": edited("x in map(clean, items)", "x in map(\n  clean,\n  (items),\n )"),
    "comments": edited("    seen: int = 0\n", "    seen: int = 0  # rows\n\n # more\n"),
    "docstrings": edited('"""Embed."""', "'''Embed all items.'''"),
    "the order of functions": {
        "steps": STEPS.replace(CLEAN, "").replace("model = Model()", CLEAN + "model = Model()")
    },
    "a renamed step": {"steps": STEPS + "name = 'other'\n"},
    "an unused global": edited("unused = 1", "unused = 2"),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_edit_that_changes_nothing_is_not_noticed(name: str, load: Load) -> None:
    before, after = load(FILES), load({**FILES, **UNCHANGED[name]})
    assert difference(before, after) is None
    assert difference(after, before) is None


def test_state_that_the_code_changes_does_not_count(load: Load) -> None:
    before = load(FILES)
    module: Any = importlib.import_module("steps")
    module.fn(("a", "b"))
    assert (module.COUNT, module.model.seen, module.known) == (2, 2, ["a", "b"])
    assert fingerprint(step_in(module)) == before


PROGRAM = f"""
import json, sys
sys.path.append({str(Path(batched.offline.identity.__file__).parents[1])!r})
from types import SimpleNamespace
from identity.code import fingerprint  # alone, which other Pythons can import without extras
{inspect.getsource(step)}
{inspect.getsource(step_in)}
"""
SHOW = "print(json.dumps(fingerprint(step_in(steps))))\n"


def in_a_process(folder: Path, program: str, python: str = sys.executable) -> dict[str, Any]:
    """Return the fingerprint that a new process shows of the modules in a folder."""
    done = subprocess.run(
        [python, "-c", "from __future__ import annotations" + PROGRAM + program + SHOW],
        cwd=folder,
        env={"PYTHONHASHSEED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def other_pythons() -> Iterator[str]:
    """Find Pythons of other versions, on the path or of pyenv."""
    for minor in range(11, 16):
        found = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        if path := found[0] if found else shutil.which(f"python3.{minor}"):
            yield str(path)


SCRIPT = """
import runpy
sys.modules['__main__'].__dict__.update(runpy.run_path('steps.py', None, '__main__'))
steps = sys.modules['__main__']
"""


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()])
def test_another_process_or_python_is_not_noticed(python: str, load: Load, tmp_path: Path) -> None:
    shown = json.loads(json.dumps(load(FILES)))
    assert in_a_process(tmp_path, "import steps\n", python) == shown


def test_a_script_is_the_same_as_a_module(load: Load, tmp_path: Path) -> None:
    shown = load(FILES)
    assert difference(shown, in_a_process(tmp_path, SCRIPT)) is None


def test_the_loaded_code_counts_and_not_the_saved_one(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    known = load({"steps": "def fn(items): return 1\n"})
    module = importlib.import_module("steps")
    file.write_text("def fn(items): return 222\n")
    assert fingerprint(step_in(module)) == known
    importlib.reload(module)
    reloaded = fingerprint(step_in(module))
    assert difference(known, reloaded) == "step 'embed': its code differs"
    for saved in ("def fn(items): return 3\n", "{% if it %}"):  # other code, or no Python
        find_tree.cache_clear()  # as in a process that never saw the loaded code in the file
        file.write_text(saved)
        shown = fingerprint(step_in(module))
        assert difference(reloaded, shown) == "step 'embed': its code differs"


def test_a_function_that_moved_in_its_saved_file_is_not_noticed(load: Load, tmp_path: Path) -> None:
    source = "fn = [lambda x: x + 1, lambda x: x + 2][1]\n"
    first = load({"steps": source})
    (tmp_path / "steps.py").write_text("# moved\n" * 9 + source)
    find_tree.cache_clear()
    assert fingerprint(step_in(importlib.import_module("steps"))) == first


def test_a_function_without_source_counts_by_its_bytecode() -> None:
    def shown(source: str) -> Any:
        namespace: dict[str, Any] = {"__name__": "made", "functools": functools}
        exec(source, namespace)
        return fingerprint(step(fn=namespace["f"]))["parts"]

    constants = "def f(x, y=[]): return x in {'a', 'b', 'c'}, lambda: x"
    assert shown(constants) == shown("\n\n" + constants)
    for source, before, after in (
        ("def f(x): return x + {}", "1", "2"),
        ("def f(x): return x.{}", "a", "b"),
        ("def f(x, y={}): return x", "1", "2"),
        ("class f:\n def g(self): return {}", "1", "2"),
    ):
        assert shown(source.format(before)) != shown(source.format(after))


def test_short_globals_are_shown_unless_they_may_be_secret(load: Load) -> None:
    source = "API_KEY = {!r}\nTEXT = {!r}\ndef fn(items): return API_KEY, TEXT\n"
    shown = [
        load({"steps": source.format(*values)})
        for values in (("sk-1", "a" * 99), ("sk-2", "a" * 99), ("sk-2", "b" * 99))
    ]
    assert "sk-" not in json.dumps(shown)
    assert difference(*shown[:2]) == "step 'embed': the global API_KEY differs"
    assert difference(*shown[1:]) == "step 'embed': the global TEXT differs"
