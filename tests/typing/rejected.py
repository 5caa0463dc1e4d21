"""Lines that type checkers must reject, each with `# wrong` at its end.

Checked by test_typing.py, never run.
"""

from __future__ import annotations

from typing import Any

import batched
import batched.testing
from batched.chat import ChatClient
from batched.embeddings import EmbeddingClient


@batched.dynamically
def embed(texts: list[str], prompt: str = "") -> list[float]:
    return [float(len(prompt + text)) for text in texts]


@batched.aio.dynamically
async def fetch(keys: list[int]) -> list[str]:
    return [str(key) for key in keys]


class Model:
    @batched.dynamically
    def embed(self, texts: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]


@batched.inference.dynamically
def hidden(features: dict[str, Any], layer: int = 0) -> int:
    return layer


async def calls(model: Model) -> None:
    hidden(1)  # wrong
    hidden([{}])  # wrong
    hidden({}, layer="3")  # wrong
    hidden(ids=3)  # wrong
    hidden.with_options(padding_side="top")  # wrong
    embed(1)  # wrong
    embed("x", prompt=3)  # wrong
    embed("x", unknown="y")  # wrong
    embed.submit(1)  # wrong
    embed.map(["x"], buffersize="3")  # wrong
    await fetch("x")  # wrong
    model.embed(1)  # wrong
    embed.with_options(batchsize=3)  # wrong
    embed.options["batch_size"] = 3  # wrong
    one_feature: batched.Feature = "x"  # wrong
    future: batched.Future[str] = embed.submit("x")  # wrong
    print(one_feature, future)
    text: str = embed("x")  # wrong
    print(text)


print(batched.batch)  # wrong
batched.dynamically(batchsize=3)  # wrong
batched.dynamically(prefetch=1)  # wrong
batched.inference.dynamically(unpack=True)  # wrong
batched.dynamically(batch_size="3")  # wrong
batched.dynamically(flush="sometimes")  # wrong
batched.dynamically(pad_token={"ids": 1})  # wrong
batched.inference.dynamically(pad_token=3)  # wrong


@batched.dynamically  # wrong
def takes_no_list(text: str) -> list[float]:
    return [float(len(text))]


@batched.dynamically  # wrong
async def coroutine(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def chats() -> None:
    client = ChatClient("http://localhost/v1", "model")
    client(3)  # wrong
    number: int = client("x")  # wrong
    print(number)
    ChatClient("http://localhost/v1", "model", max_workers="3")  # wrong
    ChatClient("http://localhost/v1")  # wrong
    EmbeddingClient("http://localhost/v1", "model", max_inputs="3")  # wrong


def words_of(text: str) -> list[str]:
    return text.split()


@batched.dynamically(prepare=words_of)
def counted(batch: list[list[str]]) -> list[int]:
    return [len(words) for words in batch]


def prepared_calls() -> None:
    counted(["two", "words"])
    counted(3)  # wrong


remote = batched.connect[str, int]("my_model:embed")


def connected_calls() -> None:
    remote(["two", "words"])
    remote(3)  # wrong
    batched.connect("my_model:embed", batch_size=3)  # wrong


def in_tests(model: Model) -> None:
    with batched.testing.hold(model.embed) as held:
        held.wait_for("3")  # wrong
    batched.testing.hold(len)  # wrong
    batched.testing.hold(Model.embed)  # wrong


@batched.dynamically(unpack=True)
def score(queries: list[str], passages: list[bytes], *, scale: float = 1.0) -> list[float]:
    return [scale for _ in queries]


@batched.aio.dynamically(unpack=True)
async def score_later(queries: list[str], passages: list[bytes]) -> list[float]:
    raise NotImplementedError


@batched.dynamically(unpack=True)  # wrong
def of_one(queries: list[str]) -> list[float]:
    raise NotImplementedError


async def parts() -> None:
    score("q")  # wrong
    score("q", 3)  # wrong
    score(["q"], [b"p"])  # wrong
    score([("q", 3)])  # wrong
    score.submit("q", b"p")  # wrong
    await score_later("q", 3)  # wrong
