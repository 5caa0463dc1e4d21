"""README and the pages of docs/ do what they say: their Python blocks run, their commands and
settings are the real ones, and their links lead somewhere.
"""

from __future__ import annotations

import ast
import asyncio
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import batched
from batched._batcher import Options
from batched._collate.settings import FeatureSettings
from batched._core.policy import BatchPolicy

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md"))]
LINKED = [README, *sorted(ROOT.glob("docs/**/*.md"))]

MOST_WORDS = 900
"""Of README, all that stands between blanks: code, tables and links count."""

FIRST_LINES = 10
"""Most lines of README's first block, blank ones not counted."""

BOUND = 30.0
"""Seconds after which a wait counts as a hang."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody reads it."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run(block: str, page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that `block` defines, run as a module of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for package in ("sentence_transformers", "fastapi"):
        if package in block:
            pytest.importorskip(package)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, page.name, "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(
            page,
            block,
            id=f"{page.name} {number}",
            marks=[pytest.mark.model] if "transformers" in block else [],
        )
        for page in PAGES
        for number, block in enumerate(blocks(page, "python"), 1)
    ],
)
@pytest.mark.filterwarnings("default")  # of the model's libraries
def test_every_python_block_runs(page: Path, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(block, page, monkeypatch)


def test_no_python_block_is_overlooked() -> None:
    for page in PAGES:
        assert page.read_text().count("```py") == len(blocks(page, "python"))


def test_the_first_block_is_short_and_runs_anywhere() -> None:
    first = blocks(README, "python")[0]
    assert sum(map(bool, first.splitlines())) <= FIRST_LINES
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(first))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names | {"batched"}


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


def test_the_first_two_commands_are_the_demo_and_the_tests() -> None:
    demo, tests = blocks(README, "sh")[:2]
    assert demo.strip() == 'python -m pip install -e ".[demo]" && python -m batched demo'
    assert tests.strip() == 'python -m pip install -e ".[test]" && python -m pytest --cov -n auto'


def anchors(page: Path) -> set[str]:
    """The names by which GitHub finds the headings of `page`."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    }


def links(page: Path) -> list[str]:
    """Targets of links and pictures of `page` within this repository."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_links_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in links(README)}
    assert {str(page.relative_to(ROOT)) for page in PAGES[1:]} <= linked


def shown(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default)


def table(heading: str) -> dict[str, str]:
    """Names and defaults in the table under a heading of the page of settings."""
    section = (ROOT / "docs/settings.md").read_text().split(f"\n## {heading}\n")[1]
    return dict(
        re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", section.split("\n## ")[0], re.MULTILINE)
    )


def test_the_settings_table_is_true() -> None:
    given = table("All decorators")
    assert given.pop("name") == "the function's"
    own = {
        field.name: field.default
        for field in fields(Options)
        if field.name not in ("policy", "features", "name")
    }
    policy = {field.name: field.default for field in fields(BatchPolicy)}
    assert given == {name: shown(default) for name, default in {**policy, **own}.items()}


def test_the_table_of_the_settings_for_tensors_is_true() -> None:
    given = table("Arrays and tensors")
    assert given.pop("pad_token") == "0"
    assert given.pop("on_oom") == '"split"'
    defaults = {
        field.name: field.default for field in fields(FeatureSettings) if field.name != "pad_token"
    }
    assert given == {name: shown(default) for name, default in defaults.items()}


def test_the_tables_of_statistics_and_records_are_complete() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    for field in (*fields(batched.Stats), *fields(batched.BatchRecord)):
        assert f"`{field.name}`" in page


def test_the_table_of_errors_is_complete() -> None:
    page = (ROOT / "docs/calling.md").read_text()
    for name in batched.errors.__all__:
        assert f"`{name}`" in page


async def ask(app: Any, *messages: str) -> int:
    """The status of the answer to GET /shout, to a client that sends `messages` and waits."""
    coming = iter(messages)
    statuses = []

    async def receive() -> dict[str, Any]:
        for message in coming:
            return {"type": message}
        return await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/shout",
        "query_string": b"text=a",
        "headers": [],
    }
    await app(scope, receive, send)
    (status,) = statuses
    assert isinstance(status, int)
    return status


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    page = ROOT / "docs/servers.md"
    return run(blocks(page, "python")[0], page, monkeypatch)


@pytest.mark.parametrize("status", [404, 503])
def test_the_server_answers_errors_with_their_status(server: dict[str, Any], status: int) -> None:
    errors = {404: server["HTTPException"](404), 503: batched.QueueTimeout("late")}

    async def shout(_: str) -> str:
        raise errors[status]

    server["shout"] = shout
    assert asyncio.run(ask(server["app"], "http.request")) == status


def test_the_server_cancels_the_call_of_a_client_that_leaves(server: dict[str, Any]) -> None:
    calls = []

    async def shout(_: str) -> str:
        calls.append(asyncio.current_task())
        return await asyncio.Future()

    server["shout"] = shout

    async def leave() -> None:
        asked = ask(server["app"], "http.request", "http.disconnect")
        assert await asyncio.wait_for(asked, BOUND) == CLIENT_CLOSED_REQUEST
        (call,) = calls
        assert call is not None
        await asyncio.wait([call], timeout=BOUND)
        assert call.cancelled()

    asyncio.run(leave())
