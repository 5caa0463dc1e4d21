"""Five thousand prompts for a service that misbehaves, in real time."""

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
from batched.errors import ChatError
from chat_server import Asked, ChatServer, Reply, answer, most_within, refuse

Make = Callable[..., ChatClient[Any]]

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.timeout(500)]

PROMPTS = 5000
PAUSE = 0.3
"""Pause that the service asks for (s)."""
ON_THEIR_WAY = 0.1
"""Time after a refusal in which requests may still come that were sent before (s)."""


def ask_all(client: ChatClient[Any], prompts: list[str]) -> dict[str, Any]:
    """Results, or errors, of half of the prompts by threads and of the others by coroutines."""
    half = len(prompts) // 2

    def one(prompt: str) -> Any:
        try:
            return client(prompt)
        except ChatError as error:
            return error

    async def others() -> list[Any]:
        return await asyncio.gather(
            *(client.acall(prompt) for prompt in prompts[half:]), return_exceptions=True
        )

    with ThreadPoolExecutor(33) as callers:
        loop = callers.submit(asyncio.run, others())
        found = [*callers.map(one, prompts[:half]), *loop.result()]
    return dict(zip(prompts, found, strict=True))


def resident() -> int:
    """Memory of this process (bytes)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_each_of_five_thousand_prompts_has_its_own_answer_or_its_own_error(
    server: ChatServer, client_of: Make
) -> None:
    prompts = [f"prompt {number}" for number in range(PROMPTS)]
    bad = set(prompts[::200])
    pauses: list[float] = []

    def behave(asked: Asked) -> Reply:
        if asked.prompt in bad:
            return refuse(400)
        chance = random.Random(f"{asked.prompt} {asked.before}").random()
        if asked.before > 2 or chance > 0.08:
            return answer(asked)
        if chance < 0.005:
            pauses.append(asked.moment)
            return refuse(429, retry_after_ms=str(int(PAUSE * 1000)))
        replies = [
            *(refuse(500), refuse(502), Reply(end="reset"), Reply("x", end="half"), Reply(None)),
            *(Reply(body=b'{"choices": [{"me'), Reply(body={"choices": []}), Reply("")),
            *(
                Reply("x", end="hang"),
                Reply("x", end="trickle"),
                Reply(answer(asked).text, after=1),
            ),
        ]
        return replies[int(chance * 1e6) % len(replies)]

    server.behave = behave
    client = client_of(server, max_workers=30, timeout_s=3)
    found = ask_all(client, prompts)
    errors = {prompt: error for prompt, error in found.items() if isinstance(error, Exception)}
    assert set(errors) == bad
    for error in errors.values():
        assert isinstance(error, ChatError)
        assert "the service answered 400: not now [request req_" in str(error)
    assert all(found[prompt] == f"re: {prompt}" for prompt in set(prompts) - bad)
    assert server.most_in_flight <= 30
    for start in pauses:
        assert not [
            moment for moment in server.moments if start + ON_THEIR_WAY < moment < start + PAUSE
        ]
    print(f"{client.usage}; {len(pauses)} pauses")


def test_memory_does_not_grow_with_the_number_of_prompts(
    server: ChatServer, client_of: Make
) -> None:
    faults = {7: refuse(500), 9: Reply(None), 11: refuse(429, retry_after_ms="10")}
    server.behave = lambda asked: faults.get(asked.number % 50) or answer(asked)
    client = client_of(server, max_workers=30)
    prompts = [f"prompt {number}" for number in range(1000)]
    used = []
    for _ in range(5):
        assert len([*client.map(prompts, return_exceptions=True)]) == 1000
        server.moments.clear()
        gc.collect()
        used.append(resident())
    print(f"{(used[-1] - used[0]) / 1e6:.1f} MB more")
    assert used[-1] - used[0] < 3e6


class Limited:
    """A service that answers twice `rate` requests in any two seconds."""

    def __init__(self, rate: int) -> None:
        self._most = 2 * rate
        self._answered: deque[float] = deque()

    def __call__(self, asked: Asked) -> Reply:
        while self._answered and self._answered[0] <= asked.moment - 2:
            self._answered.popleft()
        if len(self._answered) >= self._most:
            pause = self._answered[0] + 2 - asked.moment
            return refuse(429, retry_after_ms=str(1 + int(1000 * pause)))
        self._answered.append(asked.moment)
        return Reply(f"re: {asked.prompt}", after=0.1)


def test_nine_tenths_of_what_a_service_allows_are_used_by_five_thousand_prompts(
    server: ChatServer, client_of: Make
) -> None:
    rate = 100
    server.behave = Limited(rate)
    client = client_of(server, max_workers=30)
    prompts = [f"prompt {number}" for number in range(PROMPTS)]
    start = time.perf_counter()
    found = ask_all(client, prompts)
    share = PROMPTS / (time.perf_counter() - start) / rate
    print(f"{share:.3f} of {rate} a second; {client.usage}")
    assert found == {prompt: f"re: {prompt}" for prompt in prompts}
    assert share >= 0.9


def test_an_outage_of_half_a_minute_costs_no_prompt_and_little_more_than_its_time(
    server: ChatServer, client_of: Make
) -> None:
    rate, outage = 100, 30
    server.behave = Limited(rate)
    client = client_of(server, max_workers=30)
    prompts = [f"prompt {number}" for number in range(PROMPTS)]
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as runner:
        running = runner.submit(ask_all, client, prompts)
        server.until(lambda: len(server.answered) >= 1000)
        server.down()
        connections = server.connections
        time.sleep(outage)
        server.up()
        found = running.result()
    seconds = time.perf_counter() - start
    print(f"{seconds:.1f} s for {PROMPTS / rate} s and an outage of {outage} s; {client.usage}")
    assert connections <= 60
    assert found == {prompt: f"re: {prompt}" for prompt in prompts}
    assert seconds <= PROMPTS / rate / 0.9 + outage + 16 + 4  # the longest pause; the rise


def test_budgets_are_kept_in_every_minute(server: ChatServer, client_of: Make) -> None:
    budget = 1200
    client = client_of(server, max_workers=30, requests_per_minute=budget)
    start = time.perf_counter()
    client([f"prompt {number}" for number in range(3 * budget)])
    share = 3 / ((time.perf_counter() - start) / 60)
    print(f"{share:.3f} of the budget, at most {most_within(60, server.moments)} in a minute")
    assert most_within(60, server.moments) <= budget
    assert share >= 0.9
