"""`prepare`: the callers' half of the work, in their threads or in threads of the batcher."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import batched
from stage import BOUND, Gate, python, refuse_thread


def words(text: str) -> list[str]:
    if not text:
        raise ValueError("an empty text")
    return text.split()


@batched.dynamically(prepare=words, length=len)
def counts(batch: list[list[str]], plus: int = 0) -> list[int]:
    return [len(words) + plus for words in batch]


class Counter:
    """At module level, so that it pickles."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def cut(self, text: str) -> list[str]:
        return text.split(self.letter)

    @batched.dynamically(prepare=cut)
    def parts(self, batch: list[list[str]]) -> list[int]:
        return [len(parts) for parts in batch]


async def awaited(fn: Any, item: Any) -> Any:
    return await fn.submit(item)


def in_loop(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the answer of a coroutine function on a loop of its own."""
    return asyncio.run(asyncio.wait_for(function(*args, **kwargs), BOUND))


@pytest.fixture
def held() -> Any:
    """Return a preparation that waits until it is let through, and a function with it."""
    gate, ran = Gate(), list[int]()

    @batched.dynamically(prepare=lambda item: -gate([item])[0], prepare_threads=1)
    def fn(items: list[int]) -> list[int]:
        ran.extend(items)
        return items

    yield gate, fn, ran
    gate.opened.set()
    fn.shutdown()


def test_a_function_gets_prepared_items_and_its_other_arguments() -> None:
    untyped: Any = counts
    assert counts("a b", plus=1) == 3
    assert untyped(batch="a b") == 2
    assert counts(["a b", "c", "d e f"]) == [2, 1, 3]
    assert counts([]) == []
    assert list(counts.map(["a b", "c"])) == [2, 1]
    assert counts.submit("a b").result(BOUND) == 2
    assert in_loop(counts.acall, ["a b", "c"]) == [2, 1]
    assert in_loop(awaited, counts, "a b") == 2
    assert untyped.with_options(prepare=lambda text: [*text])("abc") == 3
    assert counts.with_options(**counts.options)("a b") == 2


def test_coroutine_functions_get_prepared_items_on_trio() -> None:
    @batched.aio.dynamically(prepare=words)
    async def counts(batch: list[list[str]]) -> list[int]:
        return [len(words) for words in batch]

    async def main() -> None:
        assert await counts("a b") == 2
        assert await counts(["a b", "c"]) == [2, 1]
        assert [count async for count in counts.map(["a b", "c"])] == [2, 1]
        assert await counts.submit("a b") == 2
        with pytest.raises(ValueError, match="an empty text"):
            await counts("")

    trio.run(main)


def test_features_are_prepared_from_any_argument() -> None:
    def codes(rows: list[str]) -> dict[str, Any]:
        return {"ids": [np.frombuffer(row.encode(), np.uint8) for row in rows]}

    sums: Any = batched.inference.dynamically(prepare=codes)(
        lambda features: features["ids"].sum(1)
    )
    assert sums(["a", "bc"]).tolist() == [97, 197]


def test_a_method_prepares_by_its_instance_and_a_function_has_none() -> None:
    assert (Counter(",").parts("a,b"), Counter(".").parts(["a,b", "a.b.c"])) == (2, [1, 3])
    assert pickle.loads(pickle.dumps(Counter(",").parts))("a,b,c") == 3

    def itself(self: str, more: str = "") -> str:
        return self + more

    for prepare, expected in ((str.strip, "a"), (itself, " a ")):
        fn: Any = batched.dynamically(prepare=prepare)(lambda items: items)
        assert fn(" a ") == expected


def test_a_thread_prepares_its_own_item_and_a_loop_is_never_blocked() -> None:
    threads: list[threading.Thread] = []

    def prepare(item: int) -> int:
        threads.append(threading.current_thread())
        return item

    fn: Any = batched.dynamically(prepare=prepare)(lambda items: items)

    fn(1)
    fn.submit(2).result(BOUND)
    assert threads == [threading.current_thread()] * 2
    in_loop(fn.acall, 3)
    in_loop(awaited, fn, 4)
    fn([5, 6])
    list(fn.map([7]))
    assert len(threads) == 7
    assert threading.current_thread() not in threads[2:]


def test_calls_of_a_loop_are_prepared_in_their_order_and_in_the_context_of_their_caller() -> None:
    number = contextvars.ContextVar("number", default=-1)
    seen: list[int] = []

    def prepare(item: int) -> int:
        seen.append(item)
        return number.get()

    fn: Any = batched.dynamically(prepare=prepare, prepare_threads=1)(lambda items: items)

    async def call(item: int) -> Any:
        number.set(item)
        return await fn.acall(item)

    async def main() -> list[Any]:
        return list(await asyncio.gather(*map(call, range(40))))

    assert in_loop(main) == seen == list(range(40))


def test_where_no_thread_can_be_started_items_are_prepared_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @batched.aio.dynamically(prepare=words)
    async def fn(batch: list[list[str]]) -> list[int]:
        return [len(words) for words in batch]

    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    assert in_loop(fn, "two words") == 2


def test_an_error_reaches_its_caller_alone() -> None:
    async def main() -> list[Any]:
        calls = map(counts.acall, ["a", "", "b c"])
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, error, last = in_loop(main)
    assert (first, last, repr(error)) == (1, 2, "ValueError('an empty text')")
    for call in (
        lambda: counts(""),
        lambda: counts(["a", ""]),
        lambda: counts.submit(""),
        lambda: list(counts.map(["a", ""])),
        lambda: in_loop(counts.acall, ["", "a"]),
    ):
        with pytest.raises(ValueError, match="an empty text"):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        in_loop(counts.acall, "a", unknown=1)
    assert counts("still there") == 2
    nothing: Any = batched.dynamically(prepare=lambda text: None)(lambda items: items)
    with pytest.raises(TypeError, match=r"prepare returned None for 'a'; it must return the item"):
        nothing("a")


@pytest.mark.parametrize("moment", ["before", "in"])
@pytest.mark.parametrize("way", ["task", "future"])
def test_a_cancelled_call_is_never_computed(moment: str, way: str, held: Any) -> None:
    gate, fn, ran = held

    async def main() -> None:
        first = asyncio.ensure_future(fn.acall(1)) if moment == "before" else None
        call: Any = asyncio.ensure_future(fn.acall(2)) if way == "task" else fn.submit(2)
        await asyncio.sleep(0)
        await asyncio.to_thread(gate.entered.wait, BOUND)
        assert call.cancel()
        with pytest.raises((asyncio.CancelledError, CancelledError)):
            await call
        gate.opened.set()
        if first is not None:
            assert await first == -1
        assert await fn.acall([3]) == [-3]
        await fn.aclose()

    in_loop(main)
    assert -2 not in ran


def test_a_shutdown_refuses_calls_that_are_still_prepared(held: Any) -> None:
    gate, fn, ran = held

    async def main() -> None:
        task, future = asyncio.ensure_future(fn.acall(1)), fn.submit(2)
        await asyncio.to_thread(gate.entered.wait, BOUND)
        await fn.aclose()
        gate.opened.set()
        for call in (task, future):
            with pytest.raises(batched.BatcherClosed, match="was shut down"):
                await call

    in_loop(main)
    assert ran == []


@pytest.mark.parametrize("prepare", [3, awaited, lambda: 1, lambda item, more: item])
def test_a_wrong_preparation_is_told_at_decoration(prepare: Any) -> None:
    with pytest.raises(TypeError, match="prepare must be a plain function of one argument"):
        batched.dynamically(prepare=prepare)
    with pytest.raises(ValueError, match="prepare_threads must be at least 1, got 0"):
        batched.dynamically(prepare_threads=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    done = python(
        """
        import asyncio, os, warnings
        import batched
        warnings.simplefilter("ignore")  # of forks beside threads
        @batched.dynamically(prepare=str)
        def fn(items):
            return items
        assert asyncio.run(fn.acall(1)) == "1"
        child = os.fork()
        answer = asyncio.run(fn.acall(2)), fn([3, 4])
        if not child:
            os._exit(answer != ("2", ["3", "4"]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_offline_the_preparation_is_the_preprocess_unless_that_is_given(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from batched import offline

    rows = [{"text": "a,b"}, {"text": ","}, {"text": "a b c"}]
    given: Any
    for given, expected in (({}, [2, 2, 1]), ({"preprocess": words}, [1, 1, 3])):
        dest = tmp_path / f"{len(given)}.jsonl"
        step = {"input": "text", "output": "count", "watch": False, **given}
        offline.run(Counter(",").parts, rows, dest, **step)
        lines = dest.read_text().splitlines()
        assert [json.loads(line)["count"] for line in lines] == expected
