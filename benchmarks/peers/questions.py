"""Answers to questions, in the interpreter of a peer.

Run: python -m peers.questions

Questions are a JSON list on stdin, each with the `module` of its peer. The last printed line is a
JSON list with an object for each question: its figures, or an `error`.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from types import ModuleType
from typing import Any

from peers.model import load
from traffic import Sleep, arriving, async_spans, awaited, by_coroutines, by_threads, rate, spans

DIRECT = 10
"""Batches that run directly before and after each closed loop, to measure their time."""

Question = dict[str, Any]
Answer = dict[str, Any]


def _items(question: Question) -> range:
    """Return items for a warm-up of some calls of each caller, counted calls, and one final
    call.
    """
    return range(question["callers"] * (question["warm_up"] + question["calls"] + 1))


def _closed(question: Question, direct: list[float], answers: list[float]) -> Answer:
    """Return the throughput, and its share of full batches of all callers."""
    found = rate(answers, question["callers"], question["warm_up"])
    best = min(question["callers"], question["batch_size"]) / statistics.fmean(direct)
    return {"share": found / best, "rate": found}


def closed_threads(peer: ModuleType, question: Question) -> Answer:
    function = Sleep(question["fixed_ms"], question["per_item_ms"]).blocking
    full = partial(function, [0] * min(question["callers"], question["batch_size"]))
    before = list(spans(full, DIRECT))
    with peer.for_threads(function, question["batch_size"], **question["settings"]) as call:
        answers = by_threads(call, question["callers"], _items(question))
    return _closed(question, [*before, *spans(full, DIRECT)], answers)


async def closed_coroutines(peer: ModuleType, question: Question) -> Answer:
    function = Sleep(question["fixed_ms"], question["per_item_ms"]).awaiting
    full = partial(function, [0] * min(question["callers"], question["batch_size"]))
    before = await async_spans(full, DIRECT)
    async with peer.for_coroutines(
        function, question["batch_size"], **question["settings"]
    ) as call:
        answers = await by_coroutines(call, question["callers"], _items(question))
    return _closed(question, [*before, *await async_spans(full, DIRECT)], answers)


async def open_coroutines(peer: ModuleType, question: Question) -> Answer:
    """Return latencies in milliseconds, without the first `warm_up` calls. The unit of arrivals is
    the time per item of full batches.
    """
    function = Sleep(question["fixed_ms"], question["per_item_ms"]).awaiting
    full = partial(function, [0] * question["batch_size"])
    per_item = statistics.fmean(await async_spans(full, DIRECT)) / question["batch_size"]
    async with peer.for_coroutines(
        function, question["batch_size"], **question["settings"]
    ) as call:
        found = await arriving(call, [moment * per_item for moment in question["arrivals"]])
    counted = sorted(found[question["warm_up"] :])
    return {"mean": 1e3 * statistics.fmean(counted), "p99": 1e3 * counted[int(0.99 * len(counted))]}


def _embedded(sentences: list[str], direct: list[float], answers: list[float]) -> Answer:
    found = len(sentences) / answers[-1]
    return {
        "share": found * statistics.fmean(direct) / len(sentences),
        "rate": found,
        "direct": len(sentences) / statistics.fmean(direct),
    }


def embeddings_threads(peer: ModuleType, question: Question) -> Answer:
    encode, sentences = load(), question["sentences"]
    direct = partial(encode, sorted(sentences, key=len))
    encode(sentences[: question["batch_size"]])
    before = list(spans(direct, 1))
    with peer.for_threads(encode, question["batch_size"], **question["settings"]) as call:
        answers = by_threads(call, question["callers"], sentences)
    return _embedded(sentences, [*before, *spans(direct, 1)], answers)


async def embeddings_coroutines(peer: ModuleType, question: Question) -> Answer:
    encode, sentences = load(), question["sentences"]
    direct = partial(awaited(encode), sorted(sentences, key=len))
    encode(sentences[: question["batch_size"]])
    before = await async_spans(direct, 1)
    async with peer.for_coroutines(encode, question["batch_size"], **question["settings"]) as call:
        answers = await by_coroutines(call, question["callers"], sentences)
    return _embedded(sentences, [*before, *await async_spans(direct, 1)], answers)


def one_by_one(_peer: ModuleType, question: Question) -> Answer:
    encode, sentences = load(), question["sentences"]
    direct = partial(encode, sorted(sentences, key=len))
    encode(sentences[: question["batch_size"]])
    before = list(spans(direct, 1))
    alone = itertools.accumulate(
        next(spans(partial(encode, [sentence]), 1)) for sentence in sentences
    )
    return _embedded(sentences, before, list(alone))


ANSWERS: dict[str, Callable[[ModuleType, Question], Answer]] = {
    "closed loop, threads": closed_threads,
    "embeddings, threads": embeddings_threads,
    "embeddings, one by one": one_by_one,
}
AWAITED: dict[str, Callable[[ModuleType, Question], Awaitable[Answer]]] = {
    "closed loop, coroutines": closed_coroutines,
    "open loop": open_coroutines,
    "embeddings, coroutines": embeddings_coroutines,
}


async def answered(peer: ModuleType, question: Question) -> Answer:
    """Return the answer to a question for an event loop; an error is an answer, too."""
    try:
        return await AWAITED[question["question"]](peer, question)
    except Exception as error:  # of any type: it is a stranger's
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def answer(question: Question) -> Answer:
    """Return the answer to any question."""
    peer = module_of(question)
    if question["question"] in AWAITED:
        return asyncio.run(answered(peer, question))
    try:
        return ANSWERS[question["question"]](peer, question)
    except Exception as error:  # as above
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def module_of(question: Question) -> ModuleType:
    return importlib.import_module(f"peers.{question['module']}")


def answer_each(asked: list[Question]) -> list[Answer]:
    return [answer(question) for question in asked]


def main() -> None:
    asked = json.load(sys.stdin)
    answer_all = getattr(module_of(asked[0]), "answer_all", answer_each)
    print("\n" + json.dumps(answer_all(asked)), flush=True)


if __name__ == "__main__":
    main()
