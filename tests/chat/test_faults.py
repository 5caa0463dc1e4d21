"""Calls of a chat client while a real server misbehaves."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, RootModel

from batched._chat import limits
from batched.chat import ChatClient
from batched.errors import EndpointError
from chat_server import Asked, Behave, ChatServer, Person, Reply, answer, refuse

pytestmark = pytest.mark.usefixtures("quick")

Item = TypeVar("Item")
SOON: dict[str, str] = {"retry_after_ms": "20"}


def first(count: int, *replies: Reply) -> Behave:
    """Give `replies`, in turn, to the first `count` requests, and answers to all later ones."""

    def behave(asked: Asked) -> Reply:
        return replies[asked.number % len(replies)] if asked.number < count else answer(asked)

    return behave


def message(**content: Any) -> Reply:
    return Reply(body={"choices": [{"message": content}]})


def no_credit(place: str) -> Reply:
    return Reply(status=429, body={"error": {"message": "no credit", place: "insufficient_quota"}})


@pytest.mark.parametrize(
    ("reply", "why", "again"),
    [
        (Reply("x", end="half"), "/completions): Connection error. (RemoteProtocolError", True),
        (Reply(body=b"<html>busy</html>"), "base_url?), or was cut off: Invalid JSON", True),
        (Reply(body={"error": {"message": "overloaded"}}), "with an error: overloaded", True),
        (Reply(body={"choices": None}), "its answer has no message", True),
        (Reply(None), "its answer has no text (content is None, finish_reason 'stop')", True),
        (Reply("", reason="length"), "no text (content is '', finish_reason 'length')", False),
        (Reply("half of it", reason="content_filter"), "its filter held the answer back", False),
        (message(content=None, refusal="I will not"), "the model refused: I will not", False),
        (Reply("half of it", reason="error"), "it broke the answer off", True),
        (refuse(404), "/v1/chat/completions): not now [request req_0]", False),
        (refuse(400), "chat: the service answered 400: not now [request req_0]", False),
        (no_credit("code"), "the service answered 429: no credit", False),
        (no_credit("type"), "the service answered 429: no credit", False),
    ],
)
def test_an_unusable_answer_is_an_error_with_the_id_of_the_request(
    server: ChatServer, reply: Reply, why: str, again: bool
) -> None:
    server.behave = first(2, reply)
    with pytest.raises(EndpointError) as raised:
        server.client(attempts=2)("one")
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(server.requests) == (2 if again else 1)
    if reply.end == "whole":
        assert raised.value.request_id == f"req_{1 if again else 0}"
        assert f"[request {raised.value.request_id}]" in str(raised.value)
        assert raised.value.status_code == (None if reply.status == 200 else reply.status)
        assert raised.value.is_service == (reply.status == 429)


@pytest.mark.parametrize(
    ("text", "reason", "why", "again"),
    [
        ('{"name": "Ann"}', "stop", "its JSON does not fit Person: age: Field required", True),
        ('{"name": "Ann", "a', "length", "its JSON was cut off at the most tokens", False),
        ('<think>Is {"name": "Bob", "age": 1} right?', "length", "its JSON was cut off", False),
        ('{"is": {"name": "Bob", "age": 1}, "name"}', "stop", "JSON does not fit Person", True),
    ],
)
def test_json_that_does_not_fit_its_schema_is_an_error(
    server: ChatServer, text: str, reason: str, why: str, again: bool
) -> None:
    server.behave = first(2, Reply(text, reason=reason))
    with pytest.raises(EndpointError) as raised:
        server.client(attempts=2, schema=Person)("one")
    assert why in str(raised.value)
    assert len(server.requests) == (2 if again else 1)


@pytest.mark.parametrize(
    "text",
    [
        '<think>Is {"name": 1} right? No.</think>\n{"name": "Ann", "age": 7}',
        'Sure [as asked], here: {"name": "Ann", "age": 7}. Anything {else}?',
        '{} and then\n\n```\n{\n"name": "Ann",\n"age": 7\n}\n```\nAnything else?',
    ],
)
def test_json_is_found_wherever_it_stands(server: ChatServer, text: str) -> None:
    server.behave = lambda asked: Reply(text)
    assert server.client(schema=Person)("who?") == Person(name="Ann", age=7)
    server.behave = lambda asked: message(content=[{"type": "text", "text": text}])
    assert server.client(schema=Person)("who?") == Person(name="Ann", age=7)
    assert len(server.requests) == 2


def test_a_text_in_json_may_have_line_breaks(server: ChatServer) -> None:
    server.behave = lambda asked: Reply('{"name": "Ann\nLee", "age": 7}')
    assert server.client(schema=Person)("who?") == Person(name="Ann\nLee", age=7)
    assert len(server.requests) == 1


class People(RootModel[list[Person]]):
    """A schema whose root is a list."""


class Page(BaseModel, Generic[Item]):
    items: list[Item]


def test_lists_and_generic_classes_are_schemas(server: ChatServer) -> None:
    people = [Person(name="Ann", age=7)]
    for text in ('[{"name": "Ann", "age": 7}]', '{"items": [{"name": "Ann", "age": 7}]}'):
        server.behave = lambda asked, text=text: Reply(text)  # type: ignore[misc]
        assert server.client(schema=People)("who?").root == people
    assert server.client(schema=Page[Person])("who?").items == people
    formats = [asked.body["response_format"] for asked in server.requests]
    assert {each["type"] for each in formats} == {"json_schema"}
    wanted = [each["json_schema"] for each in formats]
    assert {each["schema"]["type"] for each in wanted} == {"object"}
    assert {each["name"] for each in wanted} == {"People", "Page_Person_"}


def test_wrong_json_goes_back_to_the_model_once_with_its_error(server: ChatServer) -> None:
    wrong = '{"name": "Ann"}'
    server.behave = lambda asked: Reply(
        '{"name": "Ann", "age": 7}' if len(asked.body["messages"]) > 1 else wrong
    )
    assert server.client(schema=Person, attempts=2)("who?") == Person(name="Ann", age=7)
    question, answered, correction = server.requests[1].body["messages"]
    assert (question["content"], answered["content"]) == ("who?", wrong)
    assert "age: Field required" in correction["content"]
    server.behave = lambda asked: Reply(wrong)
    with pytest.raises(EndpointError, match=r"does not fit.*\(4 requests\)"):
        server.client(schema=Person, attempts=4)("who?")
    assert len(server.requests[-1].body["messages"]) == 3


@pytest.mark.parametrize(
    "reply",
    [refuse(409), refuse(500), Reply(end="reset")],
)
def test_a_fault_is_retried_up_to_the_number_of_attempts(server: ChatServer, reply: Reply) -> None:
    server.behave = first(5, reply)
    client = server.client(attempts=3)
    with pytest.raises(EndpointError, match=r"\(3 requests\)") as raised:
        client("one")
    assert raised.value.is_service == (reply.status != 409)  # which means this request
    assert client("two") == "re: two"
    assert len(server.requests) == 6


@pytest.mark.parametrize("named", [SOON, {}], ids=["with a time", "without a time"])
def test_a_refusal_costs_no_attempt(server: ChatServer, named: dict[str, str]) -> None:
    server.behave = first(4, refuse(429, **named), refuse(503, **named))
    client = server.client(attempts=1, prices=(1.0, 1.0))
    assert client("one") == "re: one"
    assert client.usage.retries == 4
    assert client.usage.cost == pytest.approx(15e-6), "a refusal is free"


def test_a_time_that_the_service_names_after_a_failure_is_a_pause(server: ChatServer) -> None:
    server.behave = first(1, refuse(500, retry_after_ms="300"))
    assert server.client()("one") == "re: one"
    assert server.requests[1].moment - server.requests[0].moment >= 0.3


def test_a_service_that_never_answered_fails_calls_after_their_attempts(server: ChatServer) -> None:
    server.down()
    client = server.client(attempts=3, max_workers=4)
    errors = list(client.map([f"prompt {number}" for number in range(20)], return_exceptions=True))
    assert all(isinstance(error, EndpointError) and error.is_service for error in errors)
    assert client.usage.requests <= 3 * 20
    assert sum("requests)" in str(error) for error in errors) <= client.usage.retries
    with pytest.raises(
        EndpointError, match=r"no answer came \(127.0.0.1.*: Connection error.*\(3 requests\)"
    ):
        client("late")
    server.up()
    assert client("after") == "re: after"


def test_a_client_says_once_why_calls_wait(
    server: ChatServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batched._chat.session.TELL", 0.05)
    server.behave = first(6, refuse(429, retry_after_ms="100"))
    with ChatClient(server.url.replace("//", "//ann:sesame@"), "a-model") as client:
        assert client("one") == "re: one"
    (told,) = [each for each in caplog.messages if "calls wait" in each]
    assert told.startswith("a-model: calls wait, because the service answered 429: not now; ")
    assert "sesame" not in told


def test_a_prompt_that_is_always_refused_holds_no_other(server: ChatServer) -> None:
    big = refuse(429, retry_after_ms="50")
    server.behave = lambda asked: big if asked.prompt == "big" else Reply("yes", after=0.005)
    client = server.client(max_workers=8, attempts=2)
    refused = client.submit("big")
    while not refused.done():
        assert client([f"prompt {number}" for number in range(40)]) == ["yes"] * 40
    error = refused.exception()
    assert isinstance(error, EndpointError)
    assert not error.is_service
    assert server.statuses[429] <= 10  # the first ones hold all calls


def test_a_pause_longer_than_max_wait_s_fails_calls_of_all_clients_at_once(
    server: ChatServer,
) -> None:
    server.behave = lambda asked: refuse(429, retry_after="3600")
    client, other = server.client(max_wait_s=60), server.client(max_wait_s=60)
    for each in (client, client, other):
        with pytest.raises(EndpointError, match=r"no request may be sent for 3\d\d\d s") as raised:
            each("one")
        assert raised.value.is_service
        assert "(max_wait_s=60); the service answered 429: not now" in str(raised.value)
        assert raised.value.status_code == 429
    assert len(server.requests) == 1
    assert client.usage.paused_s > 3000


def test_a_refused_call_does_not_wait_for_a_long_answer_that_had_begun(server: ChatServer) -> None:
    def behave(asked: Asked) -> Reply:
        if asked.prompt == "long":
            return Reply(end="hang")
        return answer(asked) if asked.before else refuse(429, **SOON)

    server.behave = behave
    client = server.client()
    long = client.submit("long")
    server.until(lambda: server.in_flight == 1)
    assert client.submit("short").result(20) == "re: short"
    assert long.cancel()


def test_a_call_that_waits_for_its_own_budget_holds_no_other_client(server: ChatServer) -> None:
    client = server.client(prices=(0.0, 1.0), max_cost=100e-6, max_tokens=60)
    server.behave = lambda asked: Reply(end="hang") if asked.prompt == "long" else answer(asked)
    calls = [client.submit("long")]
    server.until(lambda: server.in_flight == 1)
    calls.append(client.submit("next"))
    while len(client._session.service._waiting) < 1:
        threading.Event().wait(0.005)
    assert server.client().submit("other").result(20) == "re: other"
    assert all(call.cancel() for call in reversed(calls))  # the last one would go on


def test_a_call_given_up_while_it_waits_for_tokens_holds_no_other(server: ChatServer) -> None:
    client = server.client(tokens_per_minute=100, max_tokens=5)
    assert client("one") == "re: one"  # 15 tokens, and 9 as estimated
    large, small = client.submit("x" * 320), client.submit("small")  # 89 tokens, and 10
    while len(client._session.service._waiting) < 2:
        threading.Event().wait(0.005)
    assert large.cancel()
    assert small.result(20) == "re: small"


def test_the_time_limit_applies_to_the_whole_answer(server: ChatServer) -> None:
    server.behave = first(1, Reply("x", end="trickle"))
    client = server.client(timeout_s=1, attempts=1)
    with pytest.raises(EndpointError, match=r"came within 1 s \(timeout_s\)") as raised:
        client("one")
    assert raised.value.is_service
    assert client.with_options(attempts=2)("two") == "re: two"


def test_an_outage_opens_the_breaker_and_costs_no_call(server: ChatServer) -> None:
    client = server.client(max_workers=8)
    assert client("before") == "re: before"
    server.down()
    prompts = [f"prompt {number}" for number in range(40)]
    answers = [client.submit(prompt) for prompt in prompts]
    pause = threading.Event()
    while not client.usage.is_open:
        assert not pause.wait(0.005)
    server.up()
    assert [future.result(20) for future in answers] == [f"re: {prompt}" for prompt in prompts]
    assert not client.usage.is_open


def test_a_prompt_that_breaks_the_service_fails_with_an_open_breaker(server: ChatServer) -> None:
    server.behave = lambda asked: refuse(500)
    count = limits.MOST_FAILURES + 3
    with pytest.raises(EndpointError, match=rf"the service answered 500.*\({count} requests\)"):
        server.client(attempts=count)("one")


def test_a_lone_caller_waits_for_the_end_of_an_outage(server: ChatServer) -> None:
    client = server.client(attempts=limits.MOST_FAILURES)
    assert client("before") == "re: before"
    server.behave = first(3 * limits.MOST_FAILURES + 1, refuse(502), Reply(end="reset"))
    assert client("one") == "re: one"
    assert client.usage.retries == 3 * limits.MOST_FAILURES


def test_calls_wait_for_max_wait_s_in_an_outage(server: ChatServer) -> None:
    client = server.client(max_workers=8, max_wait_s=0.5)
    assert client("before") == "re: before"
    server.down()
    answers = [client.submit(f"prompt {number}") for number in range(12)]
    errors = [future.exception(20) for future in answers]
    assert all(isinstance(error, EndpointError) and error.is_service for error in errors)
    waited = [str(error) for error in errors if "and none was answered for" in str(error)]
    assert "(max_wait_s=0.5); no answer came (127.0.0.1:" in waited[0]
    server.up()
    assert client("after") == "re: after"
