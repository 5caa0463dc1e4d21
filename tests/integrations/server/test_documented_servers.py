"""Servers under uvicorn, as a user types them: that of docs/servers.md, and two others."""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from server.serving import Server, all_done, running, until

for package in ("fastapi", "httpx", "uvicorn"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.once, pytest.mark.timeout(240)]

EXAMPLES = ("page", "starlette_app", "plain_app")
"""The example of the page, and modules of `server`."""
QUEUE = 1000
"""The `max_queue_size` of each example."""
CLIENTS = 20
State = collections.Counter[str]


class Client:
    """Client of one server, on an event loop."""

    def __init__(self, server: Server, http: Any, workers: int) -> None:
        self.http = http
        self._output = server.output
        self._workers = workers

    def signal(self, number: signal.Signals) -> None:
        for match in self._output.hear(r"pid (\d+)", self._workers):
            os.kill(int(match[1]), number)

    async def hold(self) -> None:
        """Keep the function busy until `release`."""
        before = sum(line == "held\n" for line in self._output.so_far())
        self.signal(signal.SIGUSR1)
        await asyncio.to_thread(self._output.hear, "held", before + self._workers)

    def release(self) -> None:
        self.signal(signal.SIGUSR2)

    def ask(self, count: int) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(self.http.get(f"/shout/text{n}")) for n in range(count)]

    async def state(self, path: str = "/-/state") -> State:
        """Return the sum of the states of all workers."""
        states: dict[int, dict[str, int]] = {}
        while len(states) < self._workers:
            # a new connection, which any worker may accept
            answer = (await self.http.get(path, headers={"Connection": "close"})).json()
            states[answer.pop("pid")] = answer
        return sum(map(State, states.values()), State())

    async def until(self, condition: Callable[[State], bool]) -> State:
        """Return the state of the server once `condition` holds for it."""
        return await until(self.state, condition)


@pytest.fixture(scope="module", params=EXAMPLES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    async def warmed_up(client: Client) -> None:
        assert (await client.state())["total_processed"] == 1

    with running("server.documented:app", EXAMPLE=request.param) as server:
        using(server, warmed_up)
        yield server


@pytest.fixture
def complaints(server: Server) -> Callable[[], list[str]]:
    """Return a function that returns the complaints since the test began."""
    before = len(server.complaints)
    return lambda: server.complaints[before:]


def using(
    server: Server, main: Callable[[Client], Coroutine[Any, Any, None]], workers: int = 1
) -> None:
    async def run() -> None:
        async with server.client() as http:
            await main(Client(server, http, workers))

    asyncio.run(run())


async def answers(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    await all_done(tasks)
    return [task.result() for task in tasks]


async def leave(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await all_done(tasks)


def test_an_example_serves_and_a_404_is_a_404(server: Server, complaints: Any) -> None:
    async def main(client: Client) -> None:
        found, missing = await client.http.get("/shout/text"), await client.http.get("/nothing")
        assert (found.status_code, missing.status_code) == (200, 404)
        assert "TEXT" in found.text

    using(server, main)
    assert complaints() == []


def test_a_full_queue_is_a_503_with_retry_after_and_one_line_in_the_log(
    server: Server, complaints: Any
) -> None:
    async def main(client: Client) -> None:
        await client.hold()
        await client.state("/-/fill")
        await client.until(lambda state: state["queue_size"] == QUEUE)
        for answer in await answers(client.ask(CLIENTS)):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1  # by the batches so far
            assert answer.json() == {"detail": "The server is busy; try again later."}
        client.release()
        await client.until(lambda state: state["queue_size"] == state["in_flight"] == 0)
        assert [answer.status_code for answer in await answers(client.ask(1))] == [200]

    using(server, main)
    (notice,) = complaints()  # of all refusals, the first
    assert notice.startswith("shout: a call was refused: shout has no room for a call of 1: ")
    assert notice.endswith(f" items wait, of at most {QUEUE} (max_queue_size)\n")


def check(found: list[Any]) -> None:
    """Check that each client has its own answer."""
    assert [answer.status_code for answer in found] == [200] * CLIENTS
    assert all(f"TEXT{n}" in answer.text for n, answer in enumerate(found))


def has_calls(count: int, state: State) -> bool:
    return state["calls"] == count


async def some_leave(client: Client) -> None:
    await client.hold()
    before = await client.state()
    leaving, staying = client.ask(CLIENTS), client.ask(CLIENTS)
    await client.until(functools.partial(has_calls, before["calls"] + 2 * CLIENTS))
    await leave(leaving)
    await client.until(lambda state: state["cancelled"] == before["cancelled"] + CLIENTS)
    client.release()
    check(await answers(staying))
    after = await client.until(lambda state: state["in_flight"] == 0)
    held = before["in_flight"]
    assert after["total_processed"] == before["total_processed"] + held + CLIENTS


def test_clients_that_leave_are_not_computed(server: Server, complaints: Any) -> None:
    using(server, some_leave)
    assert complaints() == []


def test_sigterm_answers_accepted_calls_and_ends_the_process() -> None:
    async def main(client: Client) -> None:
        await client.hold()
        before = await client.state()
        tasks = client.ask(CLIENTS)
        await client.until(functools.partial(has_calls, before["calls"] + CLIENTS))
        ending.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(ending.log.hear, "Waiting for connections to close")
        assert not any(task.done() for task in tasks)
        client.release()
        check(await answers(tasks))

    with running("server.documented:app", EXAMPLE="page") as ending:
        using(ending, main)
        assert ending.last_words()[-1] == "closed\n"
    assert ending.process.returncode == -signal.SIGTERM, "uvicorn raises it again in the end"


@pytest.mark.slow
def test_clients_of_two_workers_that_leave_are_not_computed() -> None:
    with running("server.documented:app", "--workers", "2", EXAMPLE="page") as server:
        server.log.hear("startup complete", 2)
        using(server, some_leave, workers=2)
        server.process.send_signal(signal.SIGTERM)
        assert server.last_words().count("closed\n") == 2
    assert server.complaints == []
