"""README and the pages of docs/ are true: Python blocks run, settings exist, links have targets."""

from __future__ import annotations

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

SCRIPTS = ("offline.md", "tutorial.md")
"""Pages whose blocks continue each other; `offline/test_pages.py` and `test_tutorial.py` run them.
"""

PROCESS_WIDE = ("observability.md",)
"""Pages whose blocks change the whole process: each runs in one of its own."""

CHAT_SERVICE = "http://localhost:8000/v1"
"""Address of a chat service on the pages."""

NEEDS = {"offline": "pyarrow", "TextGenerator": "transformers", CHAT_SERVICE: "openai"}
NEEDS |= {each: each for each in ("sentence_transformers", "fastapi", "starlette", "apache_beam")}
"""Texts of blocks, and the packages that these blocks need."""


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
    for text, package in NEEDS.items():
        if text in block:
            pytest.importorskip(package)
    if "import ray" in block or "offline.Ray" in block:
        request.getfixturevalue("local_ray")
    if "TextGenerator" in block:
        use_small_model(monkeypatch)
    with chat_server(answer_as_asked) as server:
        block = block.replace(CHAT_SERVICE, server.url)
        if page.name in PROCESS_WIDE:
            ended = python(block, "-W", "default")
            assert ended.returncode == 0, ended.stderr
            return
        exec(compile(block, page.name, "exec", dont_inherit=True), {"__name__": "readme"})


def use_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace each loaded model by a small one with random weights."""
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
    assert len(text.split()) <= 350  # code, tables and links count
    (_, first), *_ = blocks(text, "python")
    assert sum(map(bool, first.splitlines())) <= 14
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", first, re.MULTILINE))
    assert imported <= sys.stdlib_module_names | {"batched"}


def test_links_have_targets() -> None:
    """The build of the site checks headings, too, and that a contents list has each page."""
    for page in [README, *ROOT.glob("docs/**/*.md")]:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#:]+)[#)]", prose):
            assert (page.parent / target).exists(), f"{page}: {target}"


def defaults(settings: Any, *left_out: str) -> dict[str, str]:
    return {
        field.name: repr(field.default).replace("'", '"')
        for field in fields(settings)
        if field.name not in left_out
    }


def table(heading: str) -> dict[str, str]:
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
