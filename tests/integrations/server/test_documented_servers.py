"""The server of docs/servers.md under uvicorn, as a user types it."""

from __future__ import annotations

import asyncio
import collections
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from server.serving import BOUND, Server, running

for package in ("fastapi", "httpx", "uvicorn"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.once, pytest.mark.timeout(240)]

QUEUE = 1000
"""The `max_queue_size` of the page."""
CLIENTS = 20
State = collections.Counter[str]


class Client:
    def __init__(self, server: Server, http: Any) -> None:
        self.http = http
        self._server = server

    async def hold(self) -> None:
        output = self._server.output
        before = sum(line == "held\n" for line in output.so_far())
        self._server.process.send_signal(signal.SIGUSR1)
        await asyncio.to_thread(output.hear, "held", before + 1)

    def release(self) -> None:
        self._server.process.send_signal(signal.SIGUSR2)

    def ask(self, count: int) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(self.http.get(f"/shout/text{n}")) for n in range(count)]

    async def state(self, path: str = "/-/state") -> State:
        # no connection idles, which the server might close at any moment
        return State((await self.http.get(path, headers={"Connection": "close"})).json())

    async def until(self, condition: Callable[[State], bool]) -> State:
        """Return the state of the server once `condition` holds for it."""
        for _ in range(int(BOUND / 0.005)):
            state = await self.state()
            if condition(state):
                return state
            await asyncio.sleep(0.005)
        raise AssertionError(f"it did not happen in time: {state}")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    async def warmed_up(client: Client) -> None:
        assert (await client.state())["total_processed"] == 1

    with running("server.documented:app") as server:
        using(server, warmed_up)
        yield server


def using(server: Server, main: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with server.client() as http:
            await main(Client(server, http))

    asyncio.run(run())


async def answers(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    _, pending = await asyncio.wait(tasks, timeout=BOUND)
    assert not pending
    return [task.result() for task in tasks]


def check(found: list[Any]) -> None:
    assert [answer.status_code for answer in found] == [200] * len(found)
    assert all(f"TEXT{n}" in answer.text for n, answer in enumerate(found))


def test_a_full_queue_is_a_503_with_retry_after_and_one_line_in_the_log(server: Server) -> None:
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
        check(await answers(client.ask(1)))

    before = len(server.complaints)
    using(server, main)
    (notice,) = server.complaints[before:]  # of all refusals, the first
    assert notice.startswith("shout: a call was refused: shout has no room for a call of 1: ")
    assert notice.endswith(f" items wait, of at most {QUEUE} (max_queue_size)\n")


def test_clients_that_leave_are_not_computed(server: Server) -> None:
    async def main(client: Client) -> None:
        await client.hold()
        before = await client.state()
        leaving, staying = client.ask(CLIENTS), client.ask(CLIENTS)
        await client.until(lambda state: state["calls"] == before["calls"] + 2 * CLIENTS)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving, timeout=BOUND)
        await client.until(lambda state: state["cancelled"] == before["cancelled"] + CLIENTS)
        client.release()
        check(await answers(staying))
        after = await client.until(lambda state: state["in_flight"] == 0)
        held = before["in_flight"]
        assert after["total_processed"] == before["total_processed"] + held + CLIENTS

    said = len(server.complaints)
    using(server, main)
    assert len(server.complaints) == said


def test_sigterm_answers_accepted_calls_and_ends_the_process() -> None:
    async def main(client: Client) -> None:
        await client.hold()
        before = await client.state()
        tasks = client.ask(CLIENTS)
        await client.until(lambda state: state["calls"] == before["calls"] + CLIENTS)
        ending.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(ending.log.hear, "Waiting for connections to close")
        assert not any(task.done() for task in tasks)
        client.release()
        check(await answers(tasks))

    with running("server.documented:app") as ending:
        using(ending, main)
        assert ending.last_words()[-1] == "closed\n"
    assert ending.process.returncode == -signal.SIGTERM, "uvicorn raises it again in the end"
