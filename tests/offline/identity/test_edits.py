"""Edits of user code between two processes: some must be noticed, and some must not."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import batched.offline.identity
from batched.offline.identity.code import difference, fingerprint

PROGRAM = """
import json, sys
from types import SimpleNamespace
sys.path.append({library!r})  # identity alone, which other Pythons can import without extras
from identity.code import fingerprint

def show(steps):
    print(json.dumps(fingerprint(SimpleNamespace(
        fn=steps.fn, name=getattr(steps, "name", "embed"), version=None,
        args=getattr(steps, "args", ()), kwargs=getattr(steps, "kwargs", {{}}), input=["text"],
        output=["vector"], preprocess=None, postprocess=None, route=None))))
"""
RUN = "import steps\nshow(steps)\n"


def fingerprints(
    folder: Path,
    files: Mapping[str, str],
    program: str = RUN,
    python: str = sys.executable,
    seed: str = "0",
) -> list[dict[str, Any]]:
    """Return the fingerprints that a new process shows of modules with these sources."""
    folder.mkdir(exist_ok=True)
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source)
    done = subprocess.run(
        [python, "-c", PROGRAM.format(library=str(LIBRARY)) + program],
        cwd=folder,
        env={"PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


LIBRARY = Path(batched.offline.identity.__file__).parents[1]


@dataclasses.dataclass
class Edit:
    """One word of a module that is edited."""

    source: str
    """Source of the module `steps`; {} stands for the word."""
    before: str
    after: str
    message: str
    """The difference, after the name of the step."""
    module: str | None = None
    """Source of another module, `settings`; the word is there instead."""


NOTICED = {
    "a module constant": Edit(
        "DEVICE = '{}'\ndef fn(items): return [(x, DEVICE) for x in items]",
        *("cpu", "cuda", "the global DEVICE was 'cpu' and is 'cuda'"),
    ),
    "a helper in the same module": Edit(
        "def fn(items): return [*map(clean, items)]\ndef clean(text): return text.{}()",
        *("upper", "lower", "its helper clean() differs"),
    ),
    "a constant of a helper's helper": Edit(
        "N = {}\ndef fn(x): return f(x)\ndef f(x): return (lambda: g(x))()\ndef g(x): return N",
        *("1", "2", "the global N was 1 and is 2"),
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
    "a bound method": Edit(
        (
            "class Model:\n"
            " def __init__(self, words): self.words = words\n"
            " def embed(self, items): return [x in self.words for x in items]\n"
            "fn = Model({}).embed"
        ),
        *("['a']", "['b']", "the attribute words of Model differs"),
    ),
    "a partial": Edit(
        "import functools\ndef f(items, by): return items * by\nfn = functools.partial(f, by={})",
        *("2", "3", "its code differs"),
    ),
    "an argument object": Edit(
        (
            "class Config:\n def __init__(self, **settings): self.__dict__ = settings\n"
            "def fn(items, config): return items\nargs = Config(layers=[1, {}]),"
        ),
        *("2", "3", "the attribute layers of Config differs"),
    ),
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
    "a base class elsewhere": Edit(
        (
            "import settings\nclass Model(settings.Base):\n"
            " def __call__(self, items): return self.clean(items)\nfn = Model"
        ),
        *("upper", "lower", "its base class Base differs"),
        module="class Base:\n def clean(self, items): return [x.{}() for x in items]",
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
    "an Enum argument": Edit(
        (
            "import enum\nclass Mode(enum.Enum):\n FAST = 1\n SLOW = 2\n"
            "def fn(items, mode): return items\nkwargs = dict(mode=Mode.{})"
        ),
        *("FAST", "SLOW", "its argument 'mode' differs"),
    ),
    "the value of an Enum member": Edit(
        (
            "import enum\nclass Mode(enum.Enum):\n FAST = {}\n"
            "def fn(items): return [(x, Mode.FAST) for x in items]"
        ),
        *("1", "2", "the attribute FAST of Mode differs"),
    ),
    "a function of a package in a class": Edit(
        (
            "import json\nclass Model:\n parse = staticmethod(json.{})\n"
            " def __call__(self, items): return [*map(self.parse, items)]\nfn = Model"
        ),
        *("loads", "dumps", "its code differs"),
    ),
    "the class of a global": Edit(
        (
            "class Model:\n def embed(self, x): return x.{}()\nmodel = Model()\n"
            "def fn(items): return [*map(model.embed, items)]"
        ),
        *("upper", "lower", "the global model differs"),
    ),
    "a default argument": Edit(
        "SIZE = {}\ndef fn(items, size=SIZE): return items[:size]",
        *("1", "2", "the variable size of fn() differs"),
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
    "a global that becomes a function": Edit(
        "{}\ndef fn(items): return CLEAN",
        *("CLEAN = 1", "def CLEAN(): pass", "the global CLEAN was 1 and is code"),
    ),
}


@pytest.mark.parametrize("name", NOTICED)
def test_an_edit_of_the_meaning_is_noticed_and_named(name: str, tmp_path: Path) -> None:
    edit = NOTICED[name]
    shown = []
    for word in (edit.before, edit.after):
        files = {"steps": edit.source, "settings": (edit.module or "").format(word)}
        if not edit.module:
            files["steps"] = edit.source.format(word)
        shown += fingerprints(tmp_path, files)
    assert difference(shown[0], shown[0]) is None
    assert difference(*shown) == f"step 'embed': {edit.message}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("[1.0, 2.0]", "[1.0, 3.0]"), "its argument 0 differs"),
        (("[1.0], dtype=torch.float16", "[1.0], dtype=torch.bfloat16"), "its argument 0 differs"),
        (("1.0", "[1.0]"), "its argument 0 differs"),
    ],
)
def test_edits_of_tensors_are_noticed(arguments: tuple[str, str], message: str) -> None:
    torch = pytest.importorskip("torch")
    scope = {"torch": torch}
    tensors = [eval(f"torch.tensor({each})", scope) for each in arguments for _ in range(2)]
    shown = [fingerprint(step(args=(each,))) for each in tensors]
    assert difference(*shown[:2]) is None
    assert difference(*shown[1:3]) == f"step 'embed': {message}"


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


def step(**settings: Any) -> SimpleNamespace:
    plain = {"fn": len, "name": "embed", "version": None, "args": (), "kwargs": {}}
    columns = {"input": ("text",), "output": ("vector",)}
    return SimpleNamespace(
        **{**plain, **columns, "preprocess": None, "postprocess": None, "route": None, **settings}
    )


STEPS = '''\
import enum
import functools
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
    CACHE[text] = text.strip()
    return CACHE[text][:LIMIT]

known = None

def load():
    global known
    known = known or ["a", "b"]

def make(model, seen):
    @functools.lru_cache
    def embed(items, *, limit=2, **more):
        """Embed."""
        load()
        seen.append(len(items) + len(known))
        from settings import EXTRA
        return [f"{x!r:>{limit}} {EXTRA = }" for x in map(clean, items) if model([x])]
    return embed

model = Model()
fn = make(model, [])
args = (model, {"a", "b", "c"}, functools.partial(clean, text={"a": 1}), lambda x: x)
'''
SETTINGS = """\
EXTRA = "x"
class Base:
    kinds = {"a": 1}
    def clean(self, text): return text
"""
FILES = {"steps": STEPS, "settings": SETTINGS}


def edited(old: str, new: str) -> dict[str, str]:
    assert old in STEPS
    return {**FILES, "steps": STEPS.replace(old, new)}


CLEAN = STEPS[STEPS.index("def clean") : STEPS.index("def make")]
UNCHANGED: dict[str, Mapping[str, Any]] = {
    "formatting": {
        "files": edited("x in map(clean, items)", "x in map(\n  clean,\n  (items),\n )")
    },
    "comments": {"files": edited("    seen: int = 0\n", "    seen: int = 0  # rows\n\n # more\n")},
    "docstrings": {"files": edited('"""Embed."""', "'''Embed all items.'''")},
    "the order of functions": {
        "files": edited(CLEAN, "")
        | {"steps": STEPS.replace(CLEAN, "").replace("model = Model()", CLEAN + "model = Model()")}
    },
    "another process": {"seed": "1"},
    "a renamed step": {"files": {**FILES, "steps": STEPS + "name = 'other'\n"}},
    "an unused global": {"files": edited("unused = 1", "unused = 2")},
    "a filled cache": {"program": "import steps\nsteps.fn(('a', 'b'))\nshow(steps)\n"},
    "a reloaded module": {
        "program": "import importlib, settings, steps\nimportlib.reload(steps)\nshow(steps)\n"
    },
    "a module that is imported before": {"program": "import settings\n" + RUN},
    "a script": {
        "program": "import runpy\nfrom types import SimpleNamespace\n"
        "sys.modules['__main__'].__dict__.update(found := runpy.run_path('steps.py', None, "
        "'__main__'))\nshow(SimpleNamespace(**found))\n"
    },
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [shown] = fingerprints(tmp_path_factory.mktemp("before"), FILES)
    return shown


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_edit_that_changes_nothing_is_not_noticed(
    name: str, before: dict[str, Any], tmp_path: Path
) -> None:
    [shown] = fingerprints(tmp_path, **{"files": FILES, **UNCHANGED[name]})
    assert difference(before, shown) is None
    assert difference(shown, before) is None


def other_pythons() -> Iterator[str]:
    """Find Pythons of other versions, on the path or of pyenv."""
    for minor in range(11, 16):
        found = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        if path := found[0] if found else shutil.which(f"python3.{minor}"):
            yield str(path)


@pytest.mark.parametrize("python", [*other_pythons()])
def test_another_python_is_not_noticed(python: str, before: dict[str, Any], tmp_path: Path) -> None:
    [shown] = fingerprints(tmp_path, FILES, python=python)
    assert shown == before


RELOAD = """
import importlib, pathlib, steps
old = "import settings\\n"
show(steps) if {first} else None
path = pathlib.Path("steps.py")
path.write_text(path.read_text().replace("1", "222"))
show(steps)
importlib.reload(steps)
show(steps)
"""


def test_the_loaded_code_counts_and_not_the_saved_one(tmp_path: Path) -> None:
    source = "def fn(items): return 1\n"
    known, loaded, reloaded = fingerprints(tmp_path, {"steps": source}, RELOAD.format(first=True))
    assert loaded == known
    assert difference(loaded, reloaded) == "step 'embed': its code differs"
    loaded, reloaded = fingerprints(tmp_path, {"steps": source}, RELOAD.format(first=False))
    assert difference(loaded, reloaded) == "step 'embed': its code differs"


def test_a_function_that_moved_in_its_saved_file_is_not_noticed(tmp_path: Path) -> None:
    program = (
        "import pathlib, steps\n"
        "path = pathlib.Path('steps.py')\n"
        "path.write_text('# moved\\n' * 9 + path.read_text())\n"
        "show(steps)\n"
    )
    files = {"steps": "fn = (lambda x: x + 1), (lambda x: x + 2)\nfn = fn[1]\n"}
    [first] = fingerprints(tmp_path, files)
    [moved] = fingerprints(tmp_path, files, program)
    assert first == moved


def test_short_globals_are_shown_unless_they_may_be_secret(tmp_path: Path) -> None:
    source = "API_KEY = {!r}\nTEXT = {!r}\ndef fn(items): return API_KEY, TEXT\n"
    shown = [
        fingerprints(tmp_path, {"steps": source.format(*values)})[0]
        for values in (("sk-1", "a" * 99), ("sk-2", "a" * 99), ("sk-2", "b" * 99))
    ]
    assert "sk-" not in json.dumps(shown)
    assert difference(*shown[:2]) == "step 'embed': the global API_KEY differs"
    assert difference(*shown[1:]) == "step 'embed': the global TEXT differs"
