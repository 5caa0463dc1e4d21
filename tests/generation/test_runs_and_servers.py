"""A generator in an offline run, on the command line, and behind a web server."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("pyarrow")
import pyarrow.parquet as pq
from transformers import AutoModelForCausalLM

from batched import cli, offline
from batched.errors import RunMismatch
from batched.generation import TextGenerator
from language_models import VOCABULARY, model, tokenizer

pytestmark = pytest.mark.model

PAGE = Path(__file__).parents[2] / "docs/generation.md"
SERVER = next(
    block
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    if "FastAPI" in block
)
CLIENTS, LEAVING = 16, 5
TOKENS = 60


def rows() -> list[dict[str, Any]]:
    prompts: list[Any] = [[5 + number] * (1 + number % 7) for number in range(40)]
    prompts[11] = [VOCABULARY]
    return [{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)]


def test_a_run_generates_what_calls_do_and_a_bad_prompt_costs_its_row(tmp_path: Path) -> None:
    dest = tmp_path / "texts.parquet"
    generator = TextGenerator(model(), tokenizer(), max_new_tokens=8)
    settings: dict[str, Any] = {"input": "prompt", "output": "text", "key": "id", "watch": False}
    report = offline.run(generator, rows(), dest, **settings)
    assert (report.ok, report.failed) == (39, 1)
    found = pq.read_table(dest).to_pylist()
    with generator:
        alone = [generator(row["prompt"]) for row in rows() if row["id"] != 11]
    assert [row["text"] for row in found] == alone
    assert report.errors == {"ValueError": 1}
    assert offline.run(generator, rows(), dest, **settings).skipped == 39
    other = generator.with_options(batch_size=2)
    assert offline.run(other, rows(), dest, **settings).skipped == 39
    with pytest.raises(RunMismatch):
        offline.run(generator.with_options(max_new_tokens=4), rows(), dest, **settings)


MODULE = """
from batched.generation import TextGenerator
from language_models import model, tokenizer

generator = TextGenerator(model(), tokenizer(), max_new_tokens=4)
"""


def test_the_command_takes_a_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_generator.py").write_text(MODULE)
    (tmp_path / "prompts.csv").write_text("id,prompt\na,the dog\nb,the fox\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    columns = ["--input", "prompt", "--output", "text", "--key", "id", "--quiet"]
    assert cli.main(["run", "my_generator:generator", "prompts.csv", "out.parquet", *columns]) == 0
    sys.modules.pop("my_generator")
    with TextGenerator(model(), tokenizer(), max_new_tokens=4) as generator:
        assert pq.read_table("out.parquet")["text"].to_pylist() == generator(["the dog", "the fox"])


def test_a_model_that_was_saved_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    tokenizer(chat=True).save_pretrained(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    with (
        TextGenerator.from_pretrained(str(tmp_path), device="cpu", max_new_tokens=5) as generator,
        TextGenerator(before, tokenizer(chat=True), max_new_tokens=5) as other,
    ):
        chat = [{"role": "user", "content": "the dog"}]
        assert generator(chat) == other(chat)
        assert str(tmp_path) in generator.meaning


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of a server in another thread."""
    uvicorn: Any = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    started = threading.Event()
    startup = server.startup

    async def start(**settings: Any) -> None:
        await startup(**settings)
        started.set()

    server.startup = start
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def test_of_16_clients_5_leave_and_the_others_get_their_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fastapi")
    httpx: Any = pytest.importorskip("httpx")
    generator = TextGenerator(
        model(),
        tokenizer(),
        batch_size=CLIENTS,
        flush="window",
        timeout_ms=60_000,
        min_new_tokens=TOKENS,
    )
    monkeypatch.setattr(TextGenerator, "from_pretrained", lambda _: generator)
    names: dict[str, Any] = {"__name__": "example"}
    exec(SERVER, names)
    sizes: list[int] = []
    left = threading.Event()

    def look(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        sizes.append(len(inputs["input_ids"]))
        if len(sizes) == 10:
            assert left.wait(30)

    prompts = ["the quick brown fox jumps"[: 2 + number] for number in range(CLIENTS)]

    async def client(http: Any, number: int) -> str:
        parameters = {"prompt": prompts[number], "tokens": TOKENS}
        text = ""
        async with http.stream("GET", "/write", params=parameters, timeout=60) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if number < LEAVING:
                    break
        return text

    async def main(address: str) -> list[str]:
        async with httpx.AsyncClient(base_url=address) as http:
            clients = [asyncio.create_task(client(http, number)) for number in range(CLIENTS)]
            await asyncio.wait(clients[:LEAVING])
            # the server has noticed once it answers another request
            while sum(prompt.cancelled for prompt in read) < LEAVING:
                await http.get("/openapi.json")
            left.set()
            return await asyncio.gather(*clients)

    read: list[Any] = []
    prepare = generator._reader.prepare

    def note(given: Any, settings: Any) -> Any:
        prompt = prepare(given, settings)
        if prompt not in read:
            read.append(prompt)
        return prompt

    monkeypatch.setattr(generator._reader, "prepare", note)
    handle = model().register_forward_pre_hook(look, with_kwargs=True)
    try:
        with served(names["app"]) as address:
            texts = asyncio.run(main(address))
    finally:
        handle.remove()
        generator.shutdown()
    assert sizes[0] == CLIENTS
    assert sizes[10:] == [CLIENTS - LEAVING] * (TOKENS - 10)
    with TextGenerator(model(), tokenizer(), min_new_tokens=TOKENS) as alone:
        for number in range(LEAVING, CLIENTS):
            assert texts[number] == alone(prompts[number], max_new_tokens=TOKENS)
