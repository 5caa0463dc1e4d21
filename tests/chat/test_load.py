"""Thousands of prompts for a service that misbehaves, in real time."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batched.chat import ChatClient
from batched.errors import EndpointError
from chat_server import Asked, ChatServer, Reply, answer, refuse

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.timeout(500)]

PROMPTS = [f"prompt {number}" for number in range(5000)]
ANSWERS = {prompt: f"re: {prompt}" for prompt in PROMPTS}
RATE = 100
"""Requests per second that a limited service answers."""
PAUSE = 0.6
"""Pause that refusals name (s)."""


def ask_all(client: ChatClient[Any]) -> dict[str, Any]:
    """Return results, or errors: half of the prompts by threads, half by coroutines."""
    half = len(PROMPTS) // 2

    def ask(prompt: str) -> Any:
        try:
            return client(prompt)
        except EndpointError as error:
            return error

    async def ask_rest() -> list[Any]:
        return await asyncio.gather(
            *(client.acall(prompt) for prompt in PROMPTS[half:]), return_exceptions=True
        )

    with ThreadPoolExecutor(33) as callers:
        loop = callers.submit(asyncio.run, ask_rest())
        found = [*callers.map(ask, PROMPTS[:half]), *loop.result()]
    return dict(zip(PROMPTS, found, strict=True))


def test_each_of_five_thousand_prompts_has_its_own_answer_or_its_own_error(
    server: ChatServer,
) -> None:
    bad = set(PROMPTS[::200])
    pauses: list[float] = []
    faults = [
        *(refuse(500), refuse(502), Reply(end="reset"), Reply("x", end="half"), Reply(None)),
        *(Reply(body=b'{"choices": [{"me'), Reply(body={"choices": []}), Reply("")),
        *(Reply("x", end="hang"), Reply("x", end="trickle")),
    ]

    def behave(asked: Asked) -> Reply:
        if asked.prompt in bad:
            return refuse(400)
        chance = random.Random(f"{asked.prompt} {asked.before}").random()
        if asked.before > 2 or chance > 0.08:
            return answer(asked)
        if chance < 0.005:
            if not asked.before:  # a later one may be the prompt's own, and hold no other
                pauses.append(asked.moment)
            return refuse(429, retry_after_ms=str(int(PAUSE * 1000)))
        if chance < 0.012:
            return Reply(answer(asked).text, after=1)
        return faults[int(chance * 1e6) % len(faults)]

    server.behave = behave
    client = server.client(max_workers=30, timeout_s=3)
    found = ask_all(client)
    errors = {prompt: error for prompt, error in found.items() if isinstance(error, Exception)}
    assert set(errors) == bad
    for error in errors.values():
        assert isinstance(error, EndpointError)
        assert "the service answered 400: not now [request req_" in str(error)
    assert {**ANSWERS, **errors} == found
    assert server.most_in_flight <= 30
    for start in pauses:
        early = [each for each in server.moments if start < each < start + PAUSE]
        assert len(early) <= 2 * 30  # on their way, or sent before the refusal was read


def test_memory_does_not_grow_with_the_number_of_prompts(server: ChatServer) -> None:
    faults = {7: refuse(500), 9: Reply(None), 11: refuse(429, retry_after_ms="10")}
    server.behave = lambda asked: faults.get(asked.number % 50) or answer(asked)
    client = server.client(max_workers=30)
    used = []
    for _ in range(5):
        assert len([*client.map(PROMPTS[:1000], return_exceptions=True)]) == 1000
        server.requests.clear()
        gc.collect()
        used.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert used[-1] - used[0] < 3e6


def limited() -> Callable[[Asked], Reply]:
    """Return the behaviour of a service that answers `2 * RATE` requests in any two seconds."""
    answered: deque[float] = deque()

    def behave(asked: Asked) -> Reply:
        while answered and answered[0] <= asked.moment - 2:
            answered.popleft()
        if len(answered) >= 2 * RATE:
            pause = answered[0] + 2 - asked.moment
            return refuse(429, retry_after_ms=str(1 + int(1000 * pause)))
        answered.append(asked.moment)
        return Reply(f"re: {asked.prompt}", after=0.1)

    return behave


def test_an_outage_of_half_a_minute_costs_no_prompt_and_little_more_than_its_time(
    server: ChatServer,
) -> None:
    outage = 30
    server.behave = limited()
    client = server.client(max_workers=30)
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as runner:
        running = runner.submit(ask_all, client)
        server.until(lambda: len(server.answered) >= 1000)
        server.down()
        connections = server.connections
        time.sleep(outage)
        server.up()
        found = running.result()
    seconds = time.perf_counter() - start
    shortest = len(PROMPTS) / RATE
    assert connections <= 60
    assert found == ANSWERS
    assert seconds <= shortest / 0.9 + outage + 16 + 4  # the longest pause; the rise
