"""Calls of a chat client while a real server misbehaves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel, RootModel

from batched._chat import limits
from batched.chat import ChatClient
from batched.errors import EndpointError
from chat_server import Asked, Behave, ChatServer, Person, Reply, answer, most_within, refuse

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


# ---------------------------------------------------------------- unusable answers


@pytest.mark.parametrize(
    ("reply", "why", "again"),
    [
        (Reply("x", end="half"), "no answer came: Connection error. (RemoteProtocolError", True),
        (Reply(body=b"<html>busy</html>"), "wrong form, or was cut off: Invalid JSON: exp", True),
        (Reply(body=b"[" * 100_000), "its answer has the wrong form", True),
        (Reply(body=[1]), "its answer has the wrong form", True),
        (Reply(body={"error": {"message": "overloaded"}}), "with an error: overloaded", True),
        (Reply(body={"error": "overloaded"}), "with an error: overloaded", True),
        (Reply(body={"choices": None}), "its answer has no message", True),
        (Reply(None), "its answer has no text (content is None, finish_reason 'stop')", True),
        (Reply(" \n"), "its answer has no text", True),
        (message(content=["x"]), "its answer has no text", True),
        (Reply("", reason="length"), "no text (content is '', finish_reason 'length')", False),
        (Reply("half of it", reason="content_filter"), "its filter held the answer back", False),
        (message(content=None, refusal="I will not"), "the model refused: I will not", False),
        (Reply("half of it", reason="error"), "it broke the answer off", True),
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
        assert not raised.value.is_service


@pytest.mark.parametrize(
    ("text", "reason", "why", "again"),
    [
        ('{"name": "Ann"}', "stop", "its JSON does not fit Person: age: Field required", True),
        ('{"name": "Ann", "a', "stop", "its JSON does not fit Person: Invalid JSON", True),
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
        '```json\r\n{"name": "Ann", "age": 7}\r\n```',
        '```{"name": "Ann", "age": 7}```',
        '{} and then\n\n```\n{\n"name": "Ann",\n"age": 7\n}\n```\nAnything else?',
    ],
)
def test_json_is_found_wherever_it_stands(server: ChatServer, text: str) -> None:
    server.behave = lambda asked: Reply(text)
    assert server.client(schema=Person)("who?") == Person(name="Ann", age=7)
    server.behave = lambda asked: message(content=[{"type": "text", "text": text}])
    assert server.client(schema=Person)("who?") == Person(name="Ann", age=7)
    assert len(server.requests) == 2


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
    wanted = [asked.body["response_format"]["json_schema"] for asked in server.requests]
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


def test_an_unusable_answer_is_requested_again(server: ChatServer) -> None:
    server.behave = first(3, Reply(None), Reply(body=b"{"), Reply(body={}))
    client = server.client(attempts=4)
    assert client("one") == "re: one"
    assert (client.usage.requests, client.usage.retries) == (4, 3)
    assert client.usage.completion_tokens == 10  # of the last answer and an unusable one


# ---------------------------------------------------------------- errors of the service


@pytest.mark.parametrize("status", [400, 401])
def test_an_error_of_the_request_is_raised_at_once(server: ChatServer, status: int) -> None:
    server.behave = lambda asked: refuse(status) if asked.prompt == "bad" else answer(asked)
    client = server.client(prices=(1.0, 1.0))
    with pytest.raises(EndpointError) as raised:
        client("bad")
    assert str(raised.value) == f"chat: the service answered {status}: not now [request req_0]"
    assert raised.value.status_code == status
    assert not raised.value.is_service
    assert client("good") == "re: good"
    assert len(server.requests) == 2
    assert client.usage.cost == pytest.approx(15e-6), "a refusal is free"


@pytest.mark.parametrize(
    "reply",
    [refuse(408), refuse(500), refuse(529), Reply(end="reset"), Reply("x", end="half")],
    ids=lambda reply: f"{reply.status} {reply.end}",
)
def test_a_fault_of_the_service_is_retried_up_to_the_number_of_attempts(
    server: ChatServer, reply: Reply
) -> None:
    server.behave = first(5, reply)
    client = server.client(attempts=3)
    with pytest.raises(EndpointError, match=r"\(3 requests\)") as raised:
        client("one")
    assert raised.value.is_service
    assert client("two") == "re: two"
    assert len(server.requests) == 6


@pytest.mark.parametrize("named", [SOON, {}], ids=["with a time", "without a time"])
def test_a_refusal_costs_no_attempt(server: ChatServer, named: dict[str, str]) -> None:
    server.behave = first(4, refuse(429, **named), refuse(503, **named))
    client = server.client(attempts=1)
    assert client("one") == "re: one"
    assert client.usage.retries == 4


USED_UP = {
    "x_ratelimit_remaining_requests": "0",
    "x_ratelimit_reset_requests": "300ms",
    "x_ratelimit_remaining_tokens": "7",
    "x_ratelimit_reset_tokens": "1h2m",
}


@pytest.mark.parametrize(
    "reply",
    [refuse(429, **USED_UP), refuse(500, retry_after_ms="300")],
    ids=["reset of a limit", "after a failure"],
)
def test_a_time_that_the_service_names_is_a_pause(server: ChatServer, reply: Reply) -> None:
    server.behave = first(1, reply)
    assert server.client()("one") == "re: one"
    assert server.moments[1] - server.moments[0] >= 0.3


def test_a_refusal_for_lack_of_credit_is_raised_at_once(server: ChatServer) -> None:
    for place in ("code", "type"):
        spent = {"error": {"message": "no credit", place: "insufficient_quota"}}
        server.behave = lambda asked, spent=spent: Reply(status=429, body=spent)  # type: ignore[misc]
        with pytest.raises(EndpointError, match="no credit") as raised:
            server.client()("one")
        assert raised.value.is_service
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [409, 425])
def test_a_request_that_collides_or_comes_too_early_is_sent_again(
    server: ChatServer, status: int
) -> None:
    server.behave = first(1, refuse(status))
    assert server.client()("one") == "re: one"


def test_a_dead_service_that_never_answered_fails_calls_after_their_attempts(
    server: ChatServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.down()
    client = server.client(attempts=3, max_workers=4)
    errors = list(client.map([f"prompt {number}" for number in range(20)], return_exceptions=True))
    assert all(isinstance(error, EndpointError) and error.is_service for error in errors)
    assert client.usage.requests <= 3 * 20
    assert sum("requests)" in str(error) for error in errors) <= client.usage.retries
    with pytest.raises(EndpointError, match=r"no answer came: Connection error.*\(3 requests\)"):
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
        asks = pytest.raises(EndpointError, match=r"no request may be sent for 3\d\d\d s")
        with asks as raised:
            each("one")
        assert raised.value.is_service
        assert "(max_wait_s=60); the service answered 429: not now" in str(raised.value)
        assert raised.value.status_code == 429
    assert len(server.requests) == 1
    assert client.usage.paused_s > 3000


def test_an_answer_within_a_long_pause_does_not_hide_the_pause(server: ChatServer) -> None:
    big = refuse(429, retry_after="3600")
    server.behave = lambda asked: big if asked.prompt == "big" else Reply("yes", after=0.1)
    client = server.client(max_wait_s=60)
    answered, refused = client.submit("small"), client.submit("big")
    assert answered.result(20) == "yes"
    for call in (refused, client.submit("late")):
        assert "no request may be sent for 3" in str(call.exception(20))


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


def test_a_call_that_is_given_up_while_it_waits_for_tokens_holds_no_other(
    server: ChatServer,
) -> None:
    client = server.client(tokens_per_minute=100, max_tokens=5)
    assert client("one") == "re: one"
    large, small = client.submit("x" * 340), client.submit("small")  # 94 tokens, and 10
    while len(client._session.service._waiting) < 2:
        threading.Event().wait(0.005)
    assert large.cancel()
    assert small.result(20) == "re: small"


def test_a_call_that_is_always_refused_fails_while_other_calls_are_answered(
    server: ChatServer,
) -> None:
    server.behave = lambda asked: refuse(429, **SOON) if asked.prompt == "large" else answer(asked)
    client = server.client(max_wait_s=0.3)
    with ThreadPoolExecutor(1) as callers:
        failed = callers.submit(client, "large")
        while not failed.done():
            client("small")
        with pytest.raises(EndpointError, match="the service answered 429"):
            failed.result()


@pytest.mark.parametrize("end", ["hang", "trickle"])
def test_the_time_limit_applies_to_the_whole_answer(server: ChatServer, end: Any) -> None:
    server.behave = first(1, Reply("x", end=end))
    client = server.client(timeout_s=1, attempts=1)
    late = pytest.raises(EndpointError, match=r"no whole answer came within 1 s \(timeout_s\)")
    with late as raised:
        client("one")
    assert raised.value.is_service
    assert client.with_options(attempts=2)("two") == "re: two"


# ---------------------------------------------------------------- all callers together


def test_a_pause_for_one_call_is_a_pause_for_all_calls(server: ChatServer) -> None:
    client = server.client(max_workers=8)
    pause = 0.5
    refused: list[float] = []

    def behave(asked: Asked) -> Reply:
        if asked.number == 40:
            refused.append(asked.moment)
            return refuse(429, retry_after_ms=str(int(1000 * pause)))
        return answer(asked)

    server.behave = behave
    prompts = [f"prompt {number}" for number in range(120)]
    assert client(prompts) == [f"re: {prompt}" for prompt in prompts]
    # without the pause, all 79 later requests would come
    (start,) = refused
    assert len([moment for moment in server.moments if start < moment < start + pause]) <= 2 * 8


def test_a_client_learns_how_much_a_service_bears(server: ChatServer) -> None:
    def behave(asked: Asked) -> Reply:
        few = server.in_flight <= 3
        return Reply("yes", after=0.01) if few else refuse(429, retry_after_ms="10")

    server.behave = behave
    client = server.client(max_workers=16)
    assert client([f"prompt {number}" for number in range(60)]) == ["yes"] * 60
    assert server.statuses[429] < 40


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


def test_a_prompt_that_breaks_the_service_fails_although_the_breaker_is_open(
    server: ChatServer,
) -> None:
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
    assert "(max_wait_s=0.5); no answer came: Connection error." in waited[0]
    server.up()
    assert client("after") == "re: after"


@pytest.mark.parametrize(
    ("budget", "most"), [({"requests_per_minute": 30}, 30), ({"tokens_per_minute": 1000}, 20)]
)
def test_budgets_hold_with_wrong_estimates(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, budget: dict[str, int], most: int
) -> None:
    monkeypatch.setattr(limits, "WINDOW", 2.0)  # 0.5 s, and 1.5 s for delays on the way
    server.behave = lambda asked: Reply("yes", usage={"prompt_tokens": 20, "completion_tokens": 30})
    client = server.client(max_workers=16, max_tokens=40, **budget)
    client([f"prompt {number:60}" for number in range(most + 1)])
    assert len(server.requests) == most + 1
    assert most_within(0.5, server.moments) <= most
