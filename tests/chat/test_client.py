"""Calls of a chat client, answered by a real server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from batched._chat.items import Item, Request
from batched._chat.runtime import clients_loop
from batched._services.prompts import Prompt
from batched.chat import ChatAnswer, ChatClient
from batched.errors import EndpointError
from chat_server import Asked, ChatServer, Person, Reply, answer, refuse
from stage import python


def test_a_list_of_messages_is_one_prompt_and_any_other_list_is_several(server: ChatServer) -> None:
    client = server.client()
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}]
    assert client(chat) == "re: two"
    both: list[Prompt] = ["one", chat]
    assert client(both) == ["re: one", "re: two"]
    assert client([]) == []
    assert client.submit(chat).result(10) == "re: two"
    assert list(client.map(both)) == ["re: one", "re: two"]


def test_parameters_of_a_call_override_parameters_of_the_client(server: ChatServer) -> None:
    client = server.client(temperature=0.5, seed=1, system="be brief")
    client("one", temperature=0, extra_body={"top_k": 3})
    client([{"role": "developer", "content": "be kind"}, {"role": "user", "content": "two"}])
    first, second = (request.body for request in server.requests)
    sent = [first[name] for name in ("model", "temperature", "seed", "top_k")]
    assert sent == ["a-model", 0, 1, 3]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["role"] for message in second["messages"]] == ["developer", "user"]


def test_the_key_is_a_setting_or_a_function_or_comes_from_the_environment(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.client()("one")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    server.client()("one")
    server.client(api_key="sk-own\n")("one")  # read from a file
    keys = iter(["first", "second"])
    client = server.client(api_key=lambda: next(keys))
    assert client(["one"]) + client(["two"]) == ["re: one", "re: two"]
    sent = [request.headers["authorization"].split()[1] for request in server.requests]
    assert sent == ["none", "sk-environment", "sk-own", "first", "second"]


def test_secrets_are_not_shown(server: ChatServer) -> None:
    address = server.url.replace("//", "//ann:sesame@")
    client = ChatClient(address, "m", api_key="sk-1", extra_headers={"x-key": "sk-2"})
    shown = f"{client!r} {client.options} {client.meaning}"
    assert not any(secret in shown for secret in ("sesame", "sk-1", "sk-2"))
    assert client.options["base_url"].startswith("http://***@127.0.0.1")


def test_details_tell_whether_an_answer_was_cut_off(server: ChatServer, caplog: Any) -> None:
    server.behave = lambda asked: Reply("half of", reason="length" if asked.number else "stop")
    client = server.client(details=True)
    assert client("one") == ChatAnswer("half of", False, 10, 5, "req_0")
    assert client("two").was_cut
    assert server.client()(["three", "four"]) == ["half of", "half of"]
    assert [each[:31] for each in caplog.messages] == ["chat: an answer was cut off at "]


def test_clients_of_one_service_share_its_limits(server: ChatServer) -> None:
    client = server.client(max_workers=4, tokens_per_minute=1_000_000)
    embedder = server.embedder(max_workers=4, max_inputs=1)
    with client.with_options(system="be brief") as brief, server.client(max_workers=4) as other:
        clients: list[Any] = [client, brief, other, embedder]
        for each in clients:
            each("first")
        server.hold()
        answers = [each.submit(f"prompt {n}") for each in clients for n in range(8)]
        server.until(lambda: server.in_flight == 4)
        server.release()
        assert len([future.result(10) for future in answers]) == 32
        assert server.most_in_flight == 4
        assert [each.usage.limit for each in clients] == [4] * 4
        assert [each.usage.requests for each in clients] == [9] * 4


def test_a_client_keeps_to_its_own_workers_and_binds_no_other(server: ChatServer) -> None:
    large = server.client(max_workers=5)
    small = large.with_options(max_workers=2)
    server.hold()
    answers = [client.submit(str(number)) for client in (small, large) for number in range(4)]
    server.until(lambda: server.in_flight == 5)
    server.release()
    assert len([answer.result(10) for answer in answers]) == 8
    assert (small.usage.limit, large.usage.limit) == (5, 5)
    with small.with_options(max_workers=7, api_key="sk-other") as other:
        assert other.usage.limit == 7
    dropped = large.with_options(max_workers=9)
    assert dropped.usage.limit == 9
    del dropped
    gc.collect()
    assert server.client(max_workers=3).usage.limit == 5


def hang_first(asked: Asked) -> Reply:
    return Reply(end="hang") if asked.number == 0 else answer(asked)


def test_a_cancelled_future_ends_its_request_and_frees_its_place(server: ChatServer) -> None:
    server.behave = hang_first
    client = server.client(max_workers=1)
    given_up, next_one = client.submit("given up"), client.submit("next")
    server.until(lambda: server.in_flight == 1)
    assert given_up.cancel()
    assert next_one.result(10) == "re: next"
    server.until(lambda: server.in_flight == 0)
    assert client.usage.retries == 0


def test_a_cancelled_task_ends_its_request_and_frees_its_place(server: ChatServer) -> None:
    server.behave = hang_first
    client = server.client(max_workers=1)

    async def cancel() -> Any:
        task = asyncio.ensure_future(client.acall(["given up", "not sent"]))
        await asyncio.to_thread(server.until, lambda: server.in_flight == 1)
        task.cancel()
        return await client.acall("next")

    assert asyncio.run(cancel()) == "re: next"
    assert [asked.prompt for asked in server.requests] == ["given up", "next"]
    server.until(lambda: server.in_flight == 0)


def test_a_list_that_fails_ends_its_other_requests(server: ChatServer) -> None:
    server.behave = lambda asked: refuse(400) if asked.prompt == "bad" else Reply(end="hang")
    client = server.client()
    with pytest.raises(EndpointError, match="answered 400"):
        client(["one", "bad", "two"])
    server.until(lambda: server.in_flight == 0)
    assert client.usage.retries == 0


@pytest.mark.filterwarnings("ignore:waiting for chat blocks the event loop")
def test_the_thread_of_all_clients_waits_for_none_of_them(server: ChatServer) -> None:
    server.behave = lambda asked: Reply('{"text": "yes"}')
    judge, told = server.client(), threading.Event()

    class Judged(BaseModel):
        text: str

        @field_validator("text")
        @classmethod
        def judged(cls, text: str) -> str:
            return str(judge(text))

    def observe(_: object) -> None:
        with pytest.raises(RuntimeError, match="would wait for itself"):
            judge("one")
        told.set()

    with pytest.raises(RuntimeError, match="by a validator or by on_batch"):
        server.client(schema=Judged)("one")
    server.client(on_batch=observe)("one")
    assert told.wait(10)


def test_a_callback_of_a_future_may_call_the_client(server: ChatServer) -> None:
    client = server.client(max_workers=1)
    found: list[str] = []
    done = threading.Event()

    def call_again(future: Any) -> None:
        found.extend([future.result(), client("two")])
        done.set()

    client.submit("one").add_done_callback(call_again)
    assert done.wait(10)
    assert found == ["re: one", "re: two"]


def test_no_request_is_sent_that_may_exceed_max_cost(server: ChatServer) -> None:
    # 10 and 5 tokens an answer, as the server counts: 15 millionths
    client = server.client(prices=(1.0, 1.0), max_cost=40e-6, max_workers=1, max_tokens=5)
    with pytest.raises(EndpointError, match="may exceed max_cost=4e-05, of which 3e-05") as raised:
        client([f"{number:24}" for number in range(4)])  # 10 tokens, as the client estimates
    assert not raised.value.is_service
    assert len(server.requests) == 2


def test_the_longest_answer_is_expected_of_the_next_request(server: ChatServer) -> None:
    usage: dict[str, int | None] = {"prompt_tokens": 10, "completion_tokens": 900}
    server.behave = lambda asked: Reply("x", usage=usage)
    client = server.client(prices=(0.0, 1.0), max_cost=1e-3, max_workers=1)
    assert client("one") == "x"
    with pytest.raises(EndpointError, match="may exceed max_cost"):
        client("two")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        Reply("x", usage={"prompt_tokens": None, "completion_tokens": None}),
        Reply("x", usage={"prompt_tokens": 0, "completion_tokens": None}),
        Reply("x", end="half"),
        Reply("x", end="hang"),
    ],
)
def test_a_request_whose_cost_is_not_told_counts_with_its_estimate(
    server: ChatServer, quick: None, reply: Reply
) -> None:
    server.client()("first")
    costs = {"prices": (0.0, 1000.0), "max_cost": 0.105, "max_tokens": 20}
    client = server.client(**costs, attempts=1, timeout_s=1)
    server.behave = lambda asked: reply
    found = list(client.map([f"prompt {number}" for number in range(20)], return_exceptions=True))
    assert len(server.requests) == 1 + 5
    assert client.usage.cost == pytest.approx(0.1)
    assert any("may exceed max_cost=0.105" in str(each) for each in found)


def test_the_request_for_a_correction_costs_what_it_has_to_repeat(server: ChatServer) -> None:
    wrong = {"message": {"content": '{"name": "' + "Ann" * 200 + '"}'}}
    server.behave = lambda asked: Reply(body={"choices": [wrong]})  # without usage
    client = server.client(schema=Person, prices=(1.0, 1.0), max_cost=100e-6, max_tokens=20)
    with pytest.raises(EndpointError, match=r"may exceed max_cost=0\.0001, of which 2\.5e-05"):
        client("who?")
    assert len(server.requests) == 1


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (" \n", {}, "chat got an empty prompt"),
    ([], {}, "chat got an empty chat; it needs at least one message"),
    ([{"role": "boss", "content": "x"}], {}, "message 0 has the role 'boss'; roles are system"),
    ([{"role": "user", "content": "x"}, "y"], {}, "message 1 of a chat must be a dict"),
    ({"role": "user", "content": "x"}, {}, "takes a text or a list of messages, got {'role'"),
    ("x", {"temprature": 1}, "no parameter 'temprature'; did you mean 'temperature'?"),
    ("x", {"zzz": 1}, "'zzz'; parameters of this service alone go into extra_body={...}"),
    ("x", {"timeout_s": 1}, "timeout_s cannot be set; it is set for the client, by client.with_"),
    ("x", {"tools": []}, "chat: tools cannot be set; a client calls no tools"),
]


def test_a_wrong_call_gets_one_sentence_and_is_not_sent(server: ChatServer) -> None:
    client = server.client()
    for prompt, parameters, message in WRONG:
        with pytest.raises((TypeError, ValueError)) as raised:
            client.submit(prompt, **parameters)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
    assert client("one") == "re: one"
    assert len(server.requests) == 1


WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"base_url": "localhost"}, "base_url: String should begin with http:// or https://"),
    ({"api_key": 1}, "api_key.constrained-str: Input should be a valid string"),
    ({"requests_per_minute": 1.5}, "requests_per_minute: Input should be a valid integer"),
    ({"timeout_s": 30_000}, "timeout_s: Input should be less than or equal to 3600, got 30000"),
    ({"max_wait_s": float("inf")}, "max_wait_s: Input should be a finite number, got inf"),
    ({"prices": (1, -1)}, "prices.1: Input should be greater than or equal to 0, got -1"),
    ({"max_cost": 1.0}, "m: max_cost needs the prices of tokens"),
    ({"max_retries": 3}, "no parameter 'max_retries'; did you mean 'attempts'?"),
    ({"schema": Person, "response_format": {}}, "response_format cannot be set; it is made of"),
]


def test_a_wrong_setting_is_refused_by_the_constructor() -> None:
    known: dict[str, Any] = {"base_url": "http://localhost:1/v1", "model": "m"}
    for settings, message in WRONG_SETTINGS:
        with pytest.raises((TypeError, ValueError)) as raised:
            ChatClient(**{**known, **settings})
        assert message in str(raised.value)


def test_usage_counts_requests_tokens_and_their_price(server: ChatServer) -> None:
    client = server.client(prices=(1.0, 4.0))
    client(["one", "two"])
    usage = client.usage
    assert (usage.requests, usage.retries) == (2, 0)
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 10)
    assert usage.cost == pytest.approx((20 + 4 * 10) / 1e6)
    assert (usage.limit, usage.paused_s, usage.is_open) == (4, 0.0, False)
    assert server.client().usage.cost is None


def test_other_options_and_a_pickle_make_another_client(server: ChatServer) -> None:
    client = server.client(temperature=0.5, api_key="sk-secret")
    with client.with_options(temperature=1.0, max_workers=2, name="other") as other:
        assert other("one") == "re: one"
    assert server.requests[0].body["temperature"] == 1.0
    assert (other.options["max_workers"], client.options["max_workers"]) == (2, 4)
    assert client.with_options(**client.options).meaning == client.meaning
    with pickle.loads(pickle.dumps(client)) as copy:
        assert copy("two") == "re: two"
        assert copy.options == client.options
    assert (other.__name__, ChatClient(server.url, "a-model").__name__) == ("other", "a-model")


def test_schema_system_message_and_details_are_part_of_the_meaning(server: ChatServer) -> None:
    settings: list[dict[str, Any]] = [{}, {"schema": Person}, {"system": "x"}, {"details": True}]
    assert len({server.client(**each).meaning for each in settings}) == 4


def test_shutdown_finishes_accepted_calls(server: ChatServer) -> None:
    client = server.client(max_workers=2)
    server.hold()
    answers = [client.submit(f"prompt {number}") for number in range(5)]
    server.until(lambda: server.in_flight == 2)
    client.shutdown(wait=False)
    assert not any(future.done() for future in answers)
    server.release()
    assert [future.result(10) for future in answers][4] == "re: prompt 4"


def test_a_dropped_client_answers_what_it_accepted(server: ChatServer) -> None:
    answer = ChatClient(server.url, "m").submit("one")
    gc.collect()
    assert answer.result(10) == "re: one"


def test_ended_calls_leave_no_objects(server: ChatServer, quick: None) -> None:
    gc.collect()
    gc.freeze()  # so that it looks at no object of before
    client = server.client()
    server.behave = lambda asked: Reply("yes" if asked.number % 3 else None)
    for _ in client.map([f"prompt {number}" for number in range(30)], return_exceptions=True):
        pass
    client.shutdown()
    # the loop's present turn, in which the last task ends
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), clients_loop()).result(10)
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) in (Item, Request)]
    assert not left


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_parent_and_child_both_work_after_a_fork(server: ChatServer) -> None:
    client = server.client()
    assert client("before") == "re: before"
    server.hold()
    waiting = client.submit("meanwhile")
    server.until(lambda: server.in_flight == 1)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            answer = client("child")
            gc.collect()
            os._exit(0 if answer == "re: child" else 1)
        os._exit(2)
    server.until(lambda: server.in_flight == 2)
    server.release()
    assert os.waitpid(child, 0)[1] == 0
    assert waiting.result(10) == "re: meanwhile"
    assert client("after") == "re: after"


def test_a_program_that_closes_nothing_gets_all_answers(server: ChatServer) -> None:
    program = f"""
        from batched.chat import ChatClient
        client = ChatClient({server.url!r}, "m", max_workers=2)
        client("first")
        for number in range(6):
            answer = client.submit(f"prompt {{number}}")
            answer.add_done_callback(lambda future: print(future.result() + "\\n", end=""))
        """
    done = python(program, "-W", "ignore")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split("\n")[:-1]) == [f"re: prompt {number}" for number in range(6)]


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.timeout(500)
def test_each_of_five_thousand_prompts_has_its_own_answer_or_its_own_error(
    server: ChatServer,
) -> None:
    prompts = [f"prompt {number}" for number in range(5000)]
    bad, half = {*prompts[::200]}, len(prompts) // 2
    faults = [
        *(refuse(429, retry_after_ms="600"), refuse(500), refuse(502)),
        *(Reply(end="reset"), Reply("x", end="half"), Reply(None)),
        *(Reply(body=b'{"choices": [{"me'), Reply(body={"choices": []}), Reply("")),
        *(Reply("x", end="hang"), Reply("x", end="trickle")),
    ]

    def behave(asked: Asked) -> Reply:
        if asked.prompt in bad:
            return refuse(400)
        chance = random.Random(f"{asked.prompt} {asked.before}").random()
        if asked.before > 2 or chance > 0.08:
            return answer(asked)
        if chance < 0.007:
            return Reply(answer(asked).text, after=1)
        return faults[int(chance * 1e6) % len(faults)]

    server.behave = behave
    client = server.client(max_workers=30, timeout_s=3)

    def ask(prompt: str) -> Any:
        try:
            return client(prompt)
        except EndpointError as error:
            return error

    async def ask_rest() -> list[Any]:
        return await asyncio.gather(
            *(client.acall(prompt) for prompt in prompts[half:]), return_exceptions=True
        )

    with ThreadPoolExecutor(33) as callers:
        loop = callers.submit(asyncio.run, ask_rest())
        outcomes = [*callers.map(ask, prompts[:half]), *loop.result()]
    found = dict(zip(prompts, outcomes, strict=True))
    errors = {prompt: error for prompt, error in found.items() if isinstance(error, Exception)}
    assert set(errors) == bad
    for error in errors.values():
        assert isinstance(error, EndpointError)
        assert "the service answered 400: not now [request req_" in str(error)
    assert found == {prompt: errors.get(prompt, f"re: {prompt}") for prompt in prompts}
    assert server.most_in_flight <= 30
