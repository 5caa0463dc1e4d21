"""Uses that type checkers must accept, with their types, and lines that they must reject, each with
"# wrong" at its end. Checked by test_typing.py, never run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar, assert_type, overload

import numpy as np
import pydantic
from numpy.typing import NDArray

import batched
import batched.testing
from batched import Feature, Future, Stats
from batched.chat import ChatAnswer, ChatClient, Usage
from batched.embeddings import EmbeddingClient

Vector = tuple[float, ...]
Features = dict[str, NDArray[Any]]
Row = TypeVar("Row")


@batched.dynamically
def embed(texts: list[str], prompt: str = "") -> list[Vector]:
    return [(float(len(prompt + text)),) for text in texts]


@batched.dynamically
def encode(texts: list[str]) -> NDArray[np.float32]:
    raise NotImplementedError


@batched.dynamically
def with_keywords(texts: list[str], **options: int) -> list[int]:
    raise NotImplementedError


@batched.aio.dynamically
async def fetch(keys: list[int]) -> list[str]:
    raise NotImplementedError


@batched.aio.dynamically(batch_size=8)
def fetch_blocking(keys: list[int], *, base: int = 10) -> list[str]:
    raise NotImplementedError


class Model:
    @batched.dynamically
    def embed(self, texts: list[str], prompt: str = "") -> list[Vector]:
        return [(float(len(prompt + text)),) for text in texts]

    @batched.aio.dynamically(flush="eager")
    async def fetch(self, keys: list[int]) -> list[str]:
        return [str(key) for key in keys]

    @batched.dynamically
    @classmethod
    def of_class(cls, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    @batched.dynamically
    @staticmethod
    def inner(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


class FasterModel(Model):
    @batched.dynamically
    def embed(self, texts: list[str], prompt: str = "") -> list[Vector]:
        return [(0.0,) for _ in texts]


class Repository(Generic[Row]):
    @batched.dynamically
    def find(self, keys: list[int]) -> list[Row | None]:
        return [None for _ in keys]


def functions(repository: Repository[str]) -> None:
    assert_type(embed("x"), Vector)
    assert_type(embed(["x"], prompt="p"), list[Vector])
    assert_type(embed.map(["x"]), Generator[Vector, None, None])
    assert_type(
        embed.map(["x"], buffersize=3, timeout=1.0, return_exceptions=True),
        Generator[Vector | Exception, None, None],
    )
    assert_type(embed.submit("x"), Future[Vector])
    assert_type(embed.stats, Stats)
    assert_type(embed.options, Mapping[str, Any])
    assert_type(embed.with_options(**embed.options)("x"), Vector)
    assert_type(encode("x"), Any)
    assert_type(with_keywords("x", a=1), int)
    assert_type(repository.find(1), str | None)
    with embed as opened:
        assert_type(opened("x"), Vector)
    embed.reset_stats()
    embed.shutdown(wait=False, cancel_futures=True)


async def coroutines() -> None:
    assert_type(await asyncio.to_thread(embed, "x"), Vector)
    assert_type(await embed.acall("x"), Vector)
    assert_type(await embed.acall(["x"], prompt="p"), list[Vector])
    assert_type(await fetch(1), str)
    assert_type(await fetch([1]), list[str])
    assert_type(await fetch_blocking(1, base=3), str)
    assert_type(fetch.map([1]), AsyncGenerator[str, None])
    assert_type(await asyncio.wrap_future(fetch.submit(1)), str)
    assert_type(await fetch.submit(1), str)
    assert_type(await asyncio.gather(fetch(1), fetch(2)), tuple[str, str])
    async with fetch as opened:
        assert_type(await opened(1), str)
    await embed.aclose()


async def methods(model: Model) -> None:
    assert_type(model.embed("x"), Vector)
    assert_type(model.embed(["x"], prompt="p"), list[Vector])
    assert_type(await model.embed.acall("x"), Vector)
    assert_type(model.embed.with_options(batch_size=3)("x"), Vector)
    assert_type(await model.fetch(1), str)
    assert_type(Model.of_class("x"), int)
    assert_type(Model.inner("x"), int)
    Model.embed(model, "x")


def pools(texts: list[str], client: ChatClient[str], model: Model) -> None:
    with ThreadPoolExecutor() as callers:
        assert_type(callers.map(embed, texts), Iterator[Vector])
        assert_type(callers.map(model.embed, texts), Iterator[Vector])
        assert_type(callers.map(client, texts), Iterator[str])
        assert_type(callers.submit(embed, "x", prompt="p"), futures.Future[Vector])
        assert_type(callers.submit(embed, texts), futures.Future[list[Vector]])
    assert_type(list(map(embed, texts)), list[Vector])


class Embedder(Protocol):
    """What a class with a batched method is, and one with a plain method of one item."""

    def embed(self, text: str, /) -> Vector: ...


class Fetcher(Protocol):
    async def fetch(self, key: int, /) -> str: ...


class EmbedsBoth(Protocol):
    @overload
    def __call__(self, texts: list[str], /) -> list[Vector]: ...
    @overload
    def __call__(self, text: str, /) -> Vector: ...


def protocols(model: Model) -> tuple[Embedder, Fetcher, EmbedsBoth, EmbedsBoth]:
    return model, model, model.embed, embed


def of_features(features: Features, layer: int = 0) -> NDArray[np.float32]:
    return features["ids"].astype(np.float32) + layer


async def features_later(features: Features, *, layer: int = 0) -> Features:
    return features


def of_ids(ids: NDArray[np.int64], mask: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    return ids if mask is None else ids * mask


async def ids_later(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return ids


hidden = batched.inference.dynamically(of_features)
padded = batched.inference.dynamically(padding_side="left", unpad={"": {1: "ids"}})(of_features)
spread = batched.inference.dynamically(spread_kwargs=True, pad_to_multiple_of=8)(of_ids)
hidden_later = batched.aio.inference.dynamically(features_later)
hidden_blocking = batched.aio.inference.dynamically(unpad=False, name="hidden")(of_features)
spread_later = batched.aio.inference.dynamically(spread_kwargs=True)(ids_later)


class Encoder:
    @batched.inference.dynamically
    def hidden(self, features: Features, layer: int = 0) -> NDArray[np.float32]:
        return features["ids"].astype(np.float32) + layer

    @batched.aio.inference.dynamically(on_oom="raise")
    async def hidden_later(self, features: Features) -> Features:
        return features


async def features(ids: NDArray[np.int64], encoder: Encoder) -> None:
    assert_type(hidden({"ids": ids}, layer=3), NDArray[np.float32])
    assert_type(hidden(ids=ids), NDArray[np.float32])
    assert_type(hidden.submit(ids=ids).result(), NDArray[np.float32])
    assert_type(hidden.map([{"ids": ids}]), Generator[NDArray[np.float32], None, None])
    assert_type(await hidden.acall({"ids": ids}, layer=2), NDArray[np.float32])
    one_feature: Feature = [ids[0], ids[1]]
    given: batched.Features = {"ids": ids, "other": one_feature}
    assert_type(hidden.submit(given), Future[NDArray[np.float32]])
    assert_type(hidden.with_options(pad_to_multiple_of=8)({"ids": ids}), NDArray[np.float32])
    assert_type(padded({"ids": ids}), NDArray[np.float32])
    assert_type(spread(ids=ids, mask=ids), NDArray[np.int64])
    assert_type(await hidden_later({"ids": ids}, layer=3), Features)
    assert_type(await hidden_blocking({"ids": ids}, layer=3), NDArray[np.float32])
    assert_type(await spread_later(ids=[[1]]), NDArray[np.int64])
    assert_type(encoder.hidden({"ids": ids}, layer=1), NDArray[np.float32])
    assert_type(await encoder.hidden_later({"ids": ids}), Features)
    Encoder.hidden(encoder, {"ids": ids})


def annotated(
    plain: batched.Batched[str, Vector],
    awaits: batched.AsyncBatched[int, str],
    features: batched.BatchedInference[NDArray[np.float32]],
    awaits_features: batched.AsyncBatchedInference[Features],
) -> None:
    assert_type(plain("x", prompt="p"), Vector)
    assert_type(features({}), NDArray[np.float32])


annotated(embed, fetch, hidden, hidden_later)


@batched.continuously(batch_size=8)
def write(rows: batched.Rows[str, float, str], scale: float = 1.0) -> None:
    while rows:
        for row in rows.join():
            row.emit(row.item)
            row.finish(scale)
        rows.leave()


@batched.aio.continuously
async def solve(rows: batched.Rows[float, float]) -> None: ...


class Writer:
    @batched.continuously
    def write(self, rows: batched.Rows[str, int]) -> None: ...


async def in_steps() -> None:
    assert_type(write("text"), float)
    assert_type(write(["text"], scale=2.0), list[float])
    assert_type(write.stream("text"), batched.Stream[str, float])
    for piece in write.stream("text", scale=3.0):
        assert_type(piece, str)
    async for piece in write.stream("text"):
        assert_type(piece, str)
    assert_type(await solve(1.0), float)
    assert_type(Writer().write("text"), int)
    write.with_options(max_pieces=3)


def tokens_of(text: str) -> list[int]:
    return [len(text)]


def count(batch: list[list[int]], scale: float = 1.0) -> list[float]:
    return [sum(ids) * scale for ids in batch]


async def count_later(batch: list[list[int]]) -> list[int]:
    return [sum(ids) for ids in batch]


counted = batched.dynamically(prepare=tokens_of, batch_size=4)(count)
counted_later = batched.aio.dynamically(prepare=tokens_of)(count_later)
summed = batched.inference.dynamically(prepare=tokens_of, pad_token={"ids": 0})(of_features)
summed_later = batched.aio.inference.dynamically(prepare=tokens_of)(features_later)


@batched.aio.continuously(prepare=tokens_of)
async def written_later(rows: batched.Rows[list[int], float]) -> None: ...


class Preparing:
    def cut(self, text: str) -> list[str]:
        return text.split()

    @batched.dynamically(prepare=cut)
    def count(self, batch: list[list[str]]) -> list[int]:
        return [len(words) for words in batch]


async def prepared_calls(model: Preparing) -> None:
    assert_type(counted("text"), float)
    assert_type(counted(["one", "two"], scale=2.0), list[float])
    assert_type(await counted_later("text"), int)
    assert_type(summed("text"), NDArray[np.float32])
    assert_type(await summed_later("text"), Features)
    assert_type(await written_later("text"), float)
    assert_type(model.count("a text"), int)


def of_two(queries: list[str], passages: list[bytes], *, scale: float = 1.0) -> list[float]:
    return [scale for _ in queries]


def of_three(a: list[str], b: list[int], c: list[bytes]) -> list[float]:
    raise NotImplementedError


def of_four(a: list[str], b: list[int], c: list[bytes], d: list[float]) -> list[float]:
    raise NotImplementedError


score = batched.dynamically(unpack=True, batch_size=8)(of_two)
score_later = batched.aio.dynamically(unpack=True)(of_two)
three = batched.dynamically(unpack=True)(of_three)
four = batched.dynamically(unpack=True, prepare=tuple)(of_four)


class Scorer:
    @batched.dynamically(unpack=True)
    def score(self, queries: list[str], passages: list[int]) -> list[float]:
        raise NotImplementedError

    @batched.aio.dynamically(unpack=True)
    async def later(self, a: list[str], b: list[int], c: list[bytes]) -> list[float]:
        raise NotImplementedError


async def parts(scorer: Scorer) -> None:
    assert_type(score("q", b"p"), float)
    assert_type(score([("q", b"p")], scale=2.0), list[float])
    assert_type(score.submit(("q", b"p")), Future[float])
    assert_type(score.map([("q", b"p")]), Generator[float, None, None])
    assert_type(await score.acall([("q", b"p")]), list[float])
    assert_type(score.with_options(batch_size=3)("q", b"p"), float)
    assert_type(three("q", 3, b""), float)
    assert_type(four("q", 3, b"", 1.0), float)
    assert_type(await score_later("q", b"p", scale=2.0), float)
    assert_type(score_later.map([("q", b"p")]), AsyncGenerator[float, None])
    assert_type(scorer.score("q", 3), float)
    assert_type(await scorer.later("q", 3, b""), float)


eager = batched.dynamically(flush="eager")


@eager
def first(items: list[int], plus: int = 0) -> list[str]:
    raise NotImplementedError


@eager(batch_size=8, timeout_ms=None)
def second(items: list[float]) -> tuple[bytes, ...]:
    raise NotImplementedError


def reused() -> None:
    assert_type(first(1, plus=2), str)
    assert_type(second(1.0), bytes)


remote = batched.connect[str, Vector]("my_model:embed", max_queue_size=3)
remote_later = batched.aio.connect[str, int]("my_model:embed")
remote_model = batched.inference.connect[NDArray[np.float32]]("unix:/run/model.socket")
remote_model_later = batched.aio.inference.connect[int]("my_model:model.embed", prepare=len)
undeclared = batched.connect("my_model:embed")


async def connected_calls(features: Mapping[str, Feature]) -> None:
    assert_type(remote(["one", "two"], prompt="p"), list[Vector])
    assert_type(remote.with_options(on_full="raise")("text"), Vector)
    assert_type(remote.client_stats.waiting, int)
    assert_type(await remote_later("text"), int)
    assert_type(remote_model(features), NDArray[np.float32])
    assert_type(remote_model(ids=[[1, 2]]), NDArray[np.float32])
    assert_type(await remote_model_later(features), int)
    assert_type(undeclared(3), Any)


class Person(pydantic.BaseModel):
    name: str


async def chats(texts: list[str], chat: list[dict[str, str]]) -> None:
    client = ChatClient("http://localhost/v1", "model", max_workers=3, temperature=0.5)
    assert_type(client("x", temperature=0), str)
    assert_type(client(texts), list[str])
    assert_type(client(chat), str)
    assert_type(client([chat, chat]), list[str])
    assert_type(client.submit("x"), Future[str])
    assert_type(client.map(texts), Generator[str, None, None])
    assert_type(await client.acall(texts), list[str])
    assert_type(client.usage, Usage)
    people = ChatClient("http://localhost/v1", "model", schema=Person)
    assert_type(people("x"), Person)
    assert_type(people.with_options(temperature=0)(texts), list[Person])
    detailed: ChatClient[ChatAnswer[str]] = ChatClient("http://x/v1", "model", details=True)
    assert_type(detailed("x").result, str)
    assert_type(detailed(texts)[0].was_cut, bool)


def vectors(texts: list[str]) -> None:
    client = EmbeddingClient("http://localhost/v1", "model", max_inputs=3, count_tokens=len)
    assert_type(client("x"), "NDArray[np.float32]")
    assert_type(client(texts), "list[NDArray[np.float32]]")
    assert_type(client.map(texts), "Generator[NDArray[np.float32], None, None]")
    assert_type(client.with_options(max_tokens=9)("x"), "NDArray[np.float32]")
    assert_type(client.usage, Usage)


async def in_tests() -> None:
    with batched.testing.inline():
        assert_type(embed("text"), Vector)
    with batched.testing.hold(embed) as held:
        assert_type(held, batched.testing.Held)
        held.wait_for(3, timeout=1.0)
        await held.until(3)
        held.release()
    batched.testing.hold(Model().fetch)
    batched.testing.hold(write)


def modules() -> None:
    print(batched.asgi, batched.tracing)
    batched.metrics.prometheus()


async def rejected(model: Model, client: ChatClient[str]) -> None:
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
    embed.with_options(batchsize=3)  # wrong
    embed.options["batch_size"] = 3  # wrong
    await fetch("x")  # wrong
    model.embed(1)  # wrong
    counted(3)  # wrong
    remote(3)  # wrong
    score("q")  # wrong
    score("q", 3)  # wrong
    score(["q"], [b"p"])  # wrong
    score([("q", 3)])  # wrong
    score.submit("q", b"p")  # wrong
    await score_later("q", 3)  # wrong
    client(3)  # wrong
    with batched.testing.hold(model.embed) as held:
        held.wait_for("3")  # wrong
    batched.testing.hold(len)  # wrong
    batched.testing.hold(Model.embed)  # wrong


text: str = embed("x")  # wrong
future: Future[str] = embed.submit("x")  # wrong
no_feature: Feature = "x"  # wrong
print(batched.batch)  # wrong
batched.dynamically(batchsize=3)  # wrong
batched.dynamically(batch_size="3")  # wrong
batched.dynamically(flush="sometimes")  # wrong
batched.dynamically(pad_token={"ids": 1})  # wrong
batched.inference.dynamically(pad_token=3)  # wrong
batched.inference.dynamically(unpack=True)  # wrong
batched.connect("my_model:embed", batch_size=3)  # wrong
number: int = ChatClient("http://localhost/v1", "model")("x")  # wrong
ChatClient("http://localhost/v1", "model", max_workers="3")  # wrong
ChatClient("http://localhost/v1")  # wrong
EmbeddingClient("http://localhost/v1", "model", max_inputs="3")  # wrong


@batched.dynamically  # wrong
def takes_no_list(text: str) -> list[float]:
    raise NotImplementedError


@batched.dynamically  # wrong
async def coroutine(texts: list[str]) -> list[float]:
    raise NotImplementedError


@batched.dynamically(unpack=True)  # wrong
def of_one(queries: list[str]) -> list[float]:
    raise NotImplementedError
