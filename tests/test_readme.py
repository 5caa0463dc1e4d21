"""README and the pages of docs/ are true: Python blocks run, settings exist, links have targets."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import batched
from batched._collate.features.settings import FeatureSettings
from batched._core.policy import BatchPolicy
from batched._function.settings import Options
from chat_server import Asked, Reply, answer, chat_server
from pages import ROOT, blocks
from stage import python

pytestmark = pytest.mark.once

README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md"))]
LINKED = [README, *sorted(ROOT.glob("docs/**/*.md"))]

SCRIPTS = ("offline.md", "tutorial.md")
"""Pages whose blocks continue each other; `offline/test_pages.py` and `test_tutorial.py` run them.
"""

PROCESS_WIDE = ("observability.md",)
"""Pages whose blocks change the whole process: each runs in one of its own."""

MOST_WORDS = 350
"""Most words of README; code, tables and links count."""

FIRST_LINES = 14
"""Most lines of README's first block, blank lines not counted."""


CHAT_SERVICE = "http://localhost:8000/v1"
"""Address of a chat service on the pages."""


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def answer_as_asked(asked: Asked) -> Reply:
    wants_json = "response_format" in asked.body
    return Reply('{"product": "kettle", "stars": 1}') if wants_json else answer(asked)


def marks(block: str) -> list[pytest.MarkDecorator]:
    if "import ray" in block or "offline.Ray" in block:
        return [pytest.mark.slow, pytest.mark.timeout(300)]  # a cluster starts
    if "transformers" in block or "TextGen" in block:
        return [pytest.mark.model]
    return []


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.name} {number}", marks=marks(block))
        for page in PAGES
        if page.name not in SCRIPTS
        for number, (_, block) in enumerate(blocks(page.read_text(), "python"), 1)
    ],
)
@pytest.mark.filterwarnings("default")  # of the model's libraries
def test_every_python_block_runs(
    page: Path,
    block: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Run each block as a module, in a folder with some reviews and `my_model`."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reviews.csv").write_text("id,text\na,good\nb,not so good\n")
    if "offline" in block:
        pytest.importorskip("pyarrow")
    if "import ray" in block or "offline.Ray" in block:
        request.getfixturevalue("local_ray")
    if "TextGenerator" in block:
        use_small_model(monkeypatch)
    for package in ("sentence_transformers", "fastapi", "starlette", "apache_beam"):
        if package in block:
            pytest.importorskip(package)
    with contextlib.ExitStack() as ends:
        if CHAT_SERVICE in block:
            pytest.importorskip("openai")
            server = ends.enter_context(chat_server(answer_as_asked))
            block = block.replace(CHAT_SERVICE, server.url)
        if page.name in PROCESS_WIDE:
            ended = python(block, "-W", "default")
            assert ended.returncode == 0, ended.stderr
            return
        exec(compile(block, page.name, "exec", dont_inherit=True), {"__name__": "readme"})


def use_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace each loaded model by a small one with random weights."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from batched.generation import TextGenerator
    from language_models import model, tokenizer

    def load(_: str, **settings: Any) -> Any:
        return TextGenerator(model(), tokenizer(chat=True), **settings)

    monkeypatch.setattr(TextGenerator, "from_pretrained", load)


def test_no_python_block_is_overlooked() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.count("```py") == len(blocks(text, "python"))


def test_readme_is_short_and_its_first_block_runs_anywhere() -> None:
    text = README.read_text()
    assert len(text.split()) <= MOST_WORDS
    (_, first), *_ = blocks(text, "python")
    assert sum(map(bool, first.splitlines())) <= FIRST_LINES
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", first, re.MULTILINE))
    assert imported <= sys.stdlib_module_names | {"batched"}


def test_the_first_two_commands_are_the_demo_and_the_tests() -> None:
    (_, demo), (_, tests), *_ = blocks(README.read_text(), "sh")
    assert demo.strip() == 'python -m pip install -e ".[demo]" && python -m batched demo'
    assert tests.strip() == 'python -m pip install -e ".[test]" && python -m pytest -n auto'


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of `page`, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    }


def links(page: Path) -> list[str]:
    """Return the targets of links and pictures of `page` within this repository."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if "://" not in target]


def test_links_have_targets_and_lead_from_readme_to_every_page() -> None:
    targets: dict[Path, set[Path]] = {}
    for page in LINKED:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}"
            targets.setdefault(page, set()).add(target)
    reached, more = set[Path](), {README}
    while more:
        reached |= more
        more = {to for page in more for to in targets.get(page, ())} & {*LINKED} - reached
    assert set(LINKED) <= reached


def defaults(settings: Any, *left_out: str) -> dict[str, str]:
    """Return the defaults of the fields of a class, as the page shows them."""
    found = {field.name: field.default for field in fields(settings) if field.name not in left_out}
    return {
        name: f'"{default}"' if isinstance(default, str) else str(default)
        for name, default in found.items()
    }


def table(heading: str) -> dict[str, str]:
    """Return names and defaults of the table under a heading of the page of settings."""
    section = (ROOT / "docs/settings.md").read_text().split(f"\n## {heading}\n")[1]
    return dict(
        re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", section.split("\n## ")[0], re.MULTILINE)
    )


def test_the_tables_of_settings_are_true() -> None:
    given = table("All decorators")
    assert given.pop("name") == "the function's"
    own = defaults(Options, "policy", "features", "steps", "name")
    assert given == defaults(BatchPolicy) | own
    of_tensors = table("Arrays and tensors")
    assert of_tensors.pop("pad_token") == "{}"
    assert of_tensors.pop("on_oom") == '"split"'
    assert of_tensors == defaults(FeatureSettings, "pad_token")


def test_the_tables_of_statistics_and_records_are_complete() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    for field in (*fields(batched.Stats), *fields(batched.BatchRecord)):
        assert f"`{field.name}`" in page


def test_the_tables_of_errors_are_complete() -> None:
    tables = (ROOT / "docs/reference/errors.md").read_text()
    for name in batched.errors.__all__:
        assert f"\n| `{name}` |" in tables or name == "BatchedError"
