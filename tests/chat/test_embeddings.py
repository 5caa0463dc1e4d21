"""Calls of an embedding client, answered by a real server that may misbehave."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batched._chat.runtime import clients_loop
from batched.embeddings import EmbeddingClient
from batched.errors import EndpointError
from chat_server import Asked, Behave, ChatServer, Reply, answer, refuse, vector_of

pytestmark = pytest.mark.usefixtures("quick")


def texts_of(count: int, length: int = 10) -> list[str]:
    return [f"{number:{length}}" for number in range(count)]


def is_vector(found: Any, text: str) -> bool:
    return bool(found.dtype == np.float32 and found.tolist() == vector_of(text))


def spoiled(bad: str, reply: Reply) -> Behave:
    """Give `reply` to each request with the text `bad`."""
    return lambda asked: reply if bad in asked.texts else answer(asked)


def ask_together(client: EmbeddingClient, texts: list[str]) -> list[Any]:
    """Return the outcomes of texts that all wait before the second request is sent."""
    service = client._session.service
    service.limits.held_until = math.inf
    futures = [client.submit(text) for text in texts]
    service.limits.held_until = -math.inf
    clients_loop().call_soon_threadsafe(service._admit)
    return [future.exception(30) or future.result() for future in futures]


def test_each_way_of_calling_returns_vectors_in_order(server: ChatServer) -> None:
    client = server.embedder()
    texts = ["b", "aa", "c"]
    assert is_vector(client("one"), "one")
    assert [each.tolist() for each in client(texts)] == [vector_of(text) for text in texts]
    assert client([]) == []
    assert is_vector(client.submit("two").result(10), "two")
    assert [each.tolist() for each in client.map(texts)] == [vector_of(text) for text in texts]

    async def ask() -> Any:
        return await asyncio.gather(*(client.acall(text) for text in texts))

    assert [each.tolist() for each in asyncio.run(ask())] == [vector_of(text) for text in texts]


def test_vectors_are_found_by_their_index(server: ChatServer) -> None:
    def behave(asked: Asked) -> Reply:
        entries = [
            {"index": place, "embedding": vector_of(text)} for place, text in enumerate(asked.texts)
        ]
        return Reply(body={"data": entries[::-1]})

    server.behave = behave
    texts = texts_of(5)
    found = server.embedder()(texts)
    assert all(is_vector(*pair) for pair in zip(found, texts, strict=True))
    found[0][0] = 1.0  # the vector is the caller's own


def test_parameters_are_sent_and_tokens_are_counted(server: ChatServer) -> None:
    client = server.embedder(dimensions=2, price=2.0)
    client(["one", "three"])
    body = server.requests[0].body
    assert (body["model"], body["dimensions"]) == ("a-model", 2)
    assert client.usage.prompt_tokens == 8
    assert client.usage.cost == pytest.approx(16e-6)
    assert client.meaning != client.with_options(dimensions=3).meaning


def test_a_wrong_call_or_setting_is_refused_in_one_sentence(server: ChatServer) -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("", {}, "embedder got an empty text"),
        (["one"], {}, "embedder takes a text, got ['one']"),
        ("x" * 101, {}, "embedder got a text of 101 tokens, of at most 100 (max_tokens)"),
        ("x", {"dimensions": 3}, "dimensions cannot be set for a call, only for the client"),
    ]
    client = server.embedder(max_tokens=100)
    for text, parameters, message in wrong:
        with pytest.raises((TypeError, ValueError)) as raised:
            client.submit(text, **parameters)
        assert message in str(raised.value)
    assert not server.requests
    with pytest.raises(TypeError, match="input cannot be set; it is made of the texts"):
        server.embedder(input="x")


def test_tokens_are_estimated_from_characters_without_a_function(server: ChatServer) -> None:
    client = server.embedder(count_tokens=None, max_tokens=30)
    client(["x" * 80] * 3)  # 21 tokens each
    assert [len(asked.texts) for asked in server.requests] == [1, 1, 1]


@pytest.mark.parametrize(
    ("bad", "reply"),
    [({21}, refuse(400)), ({21}, Reply(body={"error": "bad"})), ({3, 4}, refuse(400))],
    ids=["refused", "answered with an error", "two"],
)
def test_a_bad_text_is_found_by_halves_and_costs_that_text_alone(
    server: ChatServer, bad: set[int], reply: Reply
) -> None:
    texts = texts_of(32)
    spoils = {texts[place] for place in bad}
    server.behave = lambda asked: answer(asked) if spoils.isdisjoint(asked.texts) else reply
    found = ask_together(server.embedder(attempts=1, max_workers=1), texts)
    for place, text in enumerate(texts):
        if place in bad:
            assert isinstance(found[place], EndpointError)
            assert not found[place].is_service
        else:
            assert is_vector(found[place], text)
    assert len(server.requests) <= 2 + 2 * 5 * len(bad)  # each half that fails is halved again


def test_a_text_that_cannot_be_encoded_fails_alone(server: ChatServer) -> None:
    texts = ["one", "half a pair: \ud800", "two"]
    one, error, two = ask_together(server.embedder(max_workers=1), texts)
    assert is_vector(one, "one")
    assert is_vector(two, "two")
    assert isinstance(error, UnicodeEncodeError)


def test_an_error_of_the_client_is_not_searched_for_in_the_texts(server: ChatServer) -> None:
    server.behave = lambda asked: refuse(401)
    errors = ask_together(server.embedder(max_workers=1), texts_of(32))
    assert all("answered 401" in str(error) for error in errors)
    assert len(server.requests) <= 2


@pytest.mark.parametrize(
    ("reply", "settings", "why"),
    [
        (Reply(end="hang"), {"timeout_s": 1, "attempts": 1}, "came within 1 s (timeout_s)"),
        (refuse(429, retry_after_ms="20"), {"max_wait_s": 3.0}, "the service answered 429"),
    ],
    ids=["never answered", "always refused"],
)
def test_a_text_that_gets_no_answer_fails_alone(
    server: ChatServer, reply: Reply, settings: dict[str, Any], why: str
) -> None:
    texts = texts_of(8)
    server.behave = spoiled(texts[5], reply)
    found = ask_together(server.embedder(max_workers=1, **settings), texts)
    assert why in str(found.pop(5))
    assert all(map(is_vector, found, texts[:5] + texts[6:]))


def test_halves_of_a_refused_request_have_their_turn_among_other_calls(server: ChatServer) -> None:
    bad, replies, ended = "bad", iter([refuse(429, retry_after_ms="20")]), threading.Event()
    server.behave = lambda asked: (
        next(replies, refuse(400)) if bad in asked.texts else answer(asked)
    )
    client = server.embedder(max_workers=2)

    def go_on(name: str) -> None:
        number = 0
        while not ended.is_set():
            client(f"{name} {number}")
            number += 1

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(go_on, name) for name in "abcd"]
        try:
            *found, error = ask_together(client, [*texts_of(7), bad])
        finally:
            ended.set()
    assert not any(other.result() for other in others)
    assert all(map(is_vector, found, texts_of(7)))
    assert "answered 400" in str(error)


@pytest.mark.parametrize(
    "reply",
    [
        refuse(500),
        *(Reply(body={"data": data}) for data in (None, [], [[1.0]], [{"embedding": [1.0]}] * 2)),
        Reply(body={"data": [{"embedding": []}]}),
        Reply(body={"data": [{"embedding": [1.0, None]}]}),
    ],
    ids=repr,
)
def test_a_fault_is_retried_with_the_same_texts(server: ChatServer, reply: Reply) -> None:
    server.behave = lambda asked: reply if asked.number < 2 else answer(asked)
    client = server.embedder(attempts=3)
    assert is_vector(client("one"), "one")
    assert len(server.requests) == 3
    assert client.usage.retries == 2


def test_a_vector_of_another_length_than_the_first_is_an_error(server: ChatServer) -> None:
    client = server.embedder(attempts=2)
    client("one")
    server.behave = lambda asked: Reply(body={"data": [{"embedding": [1.0]}]})
    with pytest.raises(EndpointError, match="of the lengths {1, 2}"):
        client("two")


def test_a_client_learns_how_many_texts_a_service_takes(server: ChatServer) -> None:
    server.behave = lambda asked: refuse(413) if len(asked.texts) > 4 else answer(asked)
    client = server.embedder(max_workers=1, max_inputs=8)
    texts = texts_of(64)
    assert all(map(is_vector, client.map(texts), texts))
    assert server.statuses[413] <= 3


def test_one_text_that_is_too_large_makes_no_later_request_smaller(server: ChatServer) -> None:
    texts = texts_of(32)
    server.behave = spoiled(texts[21], refuse(413))
    client = server.embedder(max_workers=1)
    assert isinstance(ask_together(client, texts)[21], EndpointError)
    before = len(server.requests)
    ask_together(client, texts_of(32, 11))
    assert len(server.requests) <= before + 2


def test_a_client_is_a_step_of_an_offline_run(server: ChatServer, tmp_path: Path) -> None:
    offline = pytest.importorskip("batched.offline")
    texts = texts_of(100)
    server.behave = spoiled(texts[40], refuse(400))
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    step = offline.Step(server.embedder(max_inputs=16), input="text", output="vector")
    dest = tmp_path / "vectors.parquet"
    report = offline.Pipeline(step).run(rows, dest, key="id", watch=False)
    assert (report.ok, [letter["key"] for letter in report.dead_letters()]) == (99, [40])
    import pyarrow.parquet

    found = pyarrow.parquet.read_table(dest)["vector"].to_pylist()
    assert found == [vector_of(text) for text in texts if text != texts[40]]


@pytest.mark.parametrize(
    ("count", "callers", "max_inputs", "rate"),
    [
        (400, 20, 8, 3000),
        pytest.param(5000, 200, 16, 1800, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
def test_each_of_many_callers_gets_its_own_vectors_or_errors(
    server: ChatServer, count: int, callers: int, max_inputs: int, rate: int
) -> None:
    chance = random.Random(count)
    texts = [f"{number} " + "x" * chance.randint(0, 90) for number in range(count)]
    bad, silent = texts[count // 3], texts[2 * count // 3]
    max_tokens = 60 * max_inputs
    faults = {10: refuse(429, retry_after_ms="100"), 20: Reply(end="reset"), 30: refuse(429)}

    def behave(asked: Asked) -> Reply:
        if bad in asked.texts:
            return refuse(400)
        if silent in asked.texts:
            return Reply(end="hang")
        return faults.get(asked.number) or Reply(after=0.05)

    server.behave = behave
    client = server.embedder(
        max_workers=8,
        max_inputs=max_inputs,
        max_tokens=max_tokens,
        requests_per_minute=rate,
        timeout_s=2,
        attempts=2,
    )
    shares = [texts[place::callers] for place in range(callers)]

    def in_thread(share: list[str]) -> list[Any]:
        return list(client.map(share, return_exceptions=True))

    async def on_loop(share: list[str]) -> list[Any]:
        return await asyncio.gather(*map(client.acall, share), return_exceptions=True)

    async def on_loops(shares: list[list[str]]) -> list[list[Any]]:
        return await asyncio.gather(*map(on_loop, shares))

    with ThreadPoolExecutor(callers) as pool:
        loop = pool.submit(asyncio.run, on_loops(shares[callers // 2 :]))
        found = [*pool.map(in_thread, shares[: callers // 2]), *loop.result()]
    outcomes = dict(zip(chain(*shares), chain(*found), strict=True))
    errors = {text: str(each) for text, each in outcomes.items() if isinstance(each, Exception)}
    assert set(errors) == {bad, silent}
    assert all(is_vector(each, text) for text, each in outcomes.items() if text not in errors)
    assert "answered 400" in errors[bad]
    assert "timeout_s" in errors[silent]
    sizes = [(len(asked.texts), sum(map(len, asked.texts))) for asked in server.requests]
    assert max(size for size, _ in sizes) <= max_inputs
    assert max(tokens for _, tokens in sizes) <= max_tokens
    assert server.most_in_flight <= 8
    lasted = server.requests[-1].moment - server.requests[0].moment
    assert lasted >= (len(sizes) - 1) * 60 / rate - 2  # the first request may be read late
    least, lengths = 0, sorted(map(len, texts))
    while lengths:  # the longest one, and the next ones to it
        del lengths[-min(max_inputs, max_tokens // lengths[-1]) :]
        least += 1
    # faults, two searches, and the first requests of 8 workers are too many for a small run
    searches = 2 * (2 + math.ceil(math.log2(max_inputs)))
    further = len(faults) + searches + 8 if count < 5000 else 0
    assert len(sizes) <= 1.15 * least + further


def test_calls_that_are_given_up_among_faults_lose_no_other_text(server: ChatServer) -> None:
    chance = random.Random(1)
    texts = texts_of(400)
    bad = {text for text in texts if chance.random() < 0.02}
    faults = [refuse(429, retry_after_ms="20"), refuse(500), Reply("x", end="half")]

    def behave(asked: Asked) -> Reply:
        if bad & {*asked.texts}:
            return refuse(400)
        faulty = random.Random(asked.number).random() < 0.2
        return faults[asked.number % len(faults)] if faulty else Reply(after=0.01)

    server.behave = behave
    client = server.embedder(max_inputs=8, attempts=20)
    futures = {text: client.submit(text) for text in texts}
    given_up = {text for text in chance.sample(texts, 200) if futures[text].cancel()}
    for text, future in futures.items():
        if text in given_up:
            assert future.cancelled()
        elif text in bad:
            assert isinstance(future.exception(30), EndpointError)
        else:
            assert is_vector(future.result(30), text)
    client.shutdown()
    service = client._session.service
    assert not service.limits.in_flight
    assert not service._waiting
