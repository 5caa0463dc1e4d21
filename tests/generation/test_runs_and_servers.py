"""A generator in an offline run, and behind a web server."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("pyarrow")
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

from batched import offline
from batched.errors import RunMismatch
from batched.generation import TextGenerator
from language_models import VOCABULARY, batches_of, full_batches, model, tokenizer
from pages import ROOT, blocks
from server.serving import served

pytestmark = pytest.mark.model

CLIENTS, LEAVING = 8, 3
TOKENS = 30


def test_a_run_generates_the_texts_of_calls_and_a_bad_prompt_costs_its_row(tmp_path: Path) -> None:
    dest = tmp_path / "texts.parquet"
    prompts: list[Any] = [[5 + number] * (1 + number % 7) for number in range(40)]
    prompts[11] = [VOCABULARY]
    rows = [{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)]
    settings: dict[str, Any] = {"input": "prompt", "output": "text", "key": "id", "watch": False}
    generator = TextGenerator(model(), tokenizer(), max_new_tokens=8)
    report = offline.run(generator, rows, dest, **settings)
    assert (report.ok, report.errors) == (39, {"ValueError": 1})
    with generator:
        texts = generator(prompts[:11] + prompts[12:])
    assert pq.read_table(dest)["text"].to_pylist() == texts
    for same in (generator, generator.with_options(batch_size=2)):
        assert offline.run(same, rows, dest, **settings).skipped == 39
    with pytest.raises(RunMismatch, match="its 'settings' differs"):
        offline.run(generator.with_options(max_new_tokens=4), rows, dest, **settings)


def test_a_saved_model_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "new")
    tokenizer(chat=True).save_pretrained(tmp_path / "new")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    where: dict[str, Any] = {"device": "cpu", "model_kwargs": {"subfolder": "new"}}
    with (
        TextGenerator.from_pretrained(str(tmp_path), max_new_tokens=5, **where) as generator,
        TextGenerator(before, tokenizer(chat=True), max_new_tokens=5) as other,
    ):
        chat = [{"role": "user", "content": "the dog"}]
        assert generator(chat) == other(chat)
        assert str(tmp_path) in generator.meaning


def test_a_wrong_setting_is_refused_before_a_model_is_loaded() -> None:
    for wrong, hint in (("device_map", "arguments of the model go"), ("top_q", "did you mean")):
        with pytest.raises(TypeError, match=f"has no setting '{wrong}'; {hint}"):
            TextGenerator.from_pretrained("no-such-folder", **{wrong: 1})  # type: ignore[call-overload]


def test_fields_of_its_own_in_the_generation_config_of_a_model_are_no_settings() -> None:
    strange = copy.deepcopy(model())
    strange.generation_config.user_token_id = 195
    with TextGenerator(strange, tokenizer(), max_new_tokens=2) as generator:
        assert generator("the dog")


def test_a_placed_model_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = copy.deepcopy(model())
    placed.hf_device_map = {"": "cpu"}
    tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: placed)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    with TextGenerator.from_pretrained(str(tmp_path), model_kwargs={"device_map": "auto"}):
        assert placed.device == torch.device("cpu")


def test_clients_that_leave_a_server_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fastapi", "httpx", "uvicorn"):
        pytest.importorskip(package)
    generator = full_batches(CLIENTS, min_new_tokens=TOKENS)
    monkeypatch.setattr(TextGenerator, "from_pretrained", lambda _: generator)
    names: dict[str, Any] = {"__name__": "example"}
    page = (ROOT / "docs/generation.md").read_text()
    exec(next(code for _, code in blocks(page, "python") if "FastAPI" in code), names)
    left = threading.Event()
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

    async def main() -> list[str]:
        async with served(names["app"]) as http:
            clients = [asyncio.create_task(client(http, number)) for number in range(CLIENTS)]
            await asyncio.wait(clients[:LEAVING])
            # the server notices the end of a connection before it answers another request
            while generator.stats.cancelled < LEAVING:
                await http.get("/openapi.json")
            left.set()
            assert (await http.get("/write", params={"prompt": ""})).status_code == 400
            return await asyncio.gather(*clients)

    with batches_of(lambda step, _: step != 10 or left.wait(30)) as sizes, generator:
        texts = asyncio.run(main())
    # the first piece comes from the prompt, so that a client may leave before the first step
    assert sizes[10:] == [CLIENTS - LEAVING] * (TOKENS - 11)
    with TextGenerator(model(), tokenizer(), min_new_tokens=TOKENS) as alone:
        for number in range(LEAVING, CLIENTS):
            assert texts[number] == alone(prompts[number], max_new_tokens=TOKENS)
