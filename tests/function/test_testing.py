"""batched.testing: calls at once, and batches that form as a test says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batched
import batched.testing
from batched.testing import hold, inline

BOUND = 30.0
"""Seconds after which a wait counts as a hang."""


def threads_of(name: str) -> list[str]:
    """Return the threads of a batched function."""
    return [each.name for each in threading.enumerate() if each.name.startswith(f"batched-{name}")]


def test_inline_calls_run_in_the_thread_of_the_caller_each_as_its_own_batch() -> None:
    ran: list[tuple[int, list[int]]] = []

    @batched.dynamically(name="inlined", flush="window", timeout_ms=60_000)
    def fn(items: list[int]) -> list[Any]:
        ran.append((threading.get_ident(), items))
        return [ValueError("odd") if item % 2 else 10 * item for item in items]

    with inline():
        assert fn(2) == 20
        assert fn([4, 6]) == [40, 60]
        assert fn.submit(8).result() == 80
        assert list(fn.map([2, 4])) == [20, 40]
        with pytest.raises(ValueError, match="odd"):
            fn(1)
        assert not threads_of("inlined")
    here = threading.get_ident()
    assert ran[:3] == [(here, [2]), (here, [4, 6]), (here, [8])]
    assert {thread for thread, _ in ran} == {here}
    assert fn.stats.calls == 6
    fn.shutdown()


def test_inline_holds_in_coroutines_of_both_kinds() -> None:
    @batched.dynamically
    def plain(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    @batched.aio.dynamically(flush="window", timeout_ms=60_000)
    async def coroutine(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [3 * item for item in items]

    async def main() -> None:
        with inline():
            assert await plain.acall(1) == 2
            assert await asyncio.gather(*map(coroutine, range(3))) == [0, 3, 6]
        assert coroutine.stats.batch_sizes == {1: 3}
        await coroutine.aclose()

    asyncio.run(main())


def test_inline_keeps_padding_methods_prepare_isolation_and_dedupe() -> None:
    np = pytest.importorskip("numpy")

    class Model:
        @batched.dynamically(prepare=lambda text: text.strip(), isolate_errors=True, dedupe=True)
        def shout(self, items: list[str]) -> list[str]:
            if "bad" in items:
                raise KeyError("bad")
            return [item.upper() for item in items]

    @batched.inference.dynamically(pad_token={"ids": 0})
    def count(features: dict[str, Any]) -> Any:
        return (features["ids"] != 0).sum(1)

    model = Model()
    with inline():
        assert model.shout([" a", "b ", " a"]) == ["A", "B", "A"]
        with pytest.raises(KeyError):
            model.shout(["a", "bad"])
        assert count({"ids": [np.array([1, 2]), np.array([3])]}).tolist() == [2, 1]


def test_inline_nests_and_ends() -> None:
    @batched.dynamically(name="ending")
    def fn(items: list[int]) -> list[int]:
        return items

    with inline(), inline():
        fn(1)
    with inline():
        fn(1)
    assert not threads_of("ending")
    fn(1)
    assert threads_of("ending")
    fn.shutdown()


def test_a_closed_function_stays_closed_within_inline() -> None:
    @batched.dynamically
    def fn(items: list[int]) -> list[int]:
        return items

    fn.shutdown()
    with inline(), pytest.raises(batched.BatcherClosed):
        fn(1)


def test_held_calls_of_threads_share_a_batch() -> None:
    batches: list[list[str]] = []

    @batched.dynamically
    def fn(items: list[str]) -> list[str]:
        batches.append(sorted(items))
        return [item.upper() for item in items]

    with hold(fn) as held:
        answers: list[Any] = []
        callers = [threading.Thread(target=lambda x=x: answers.append(fn(x))) for x in "abc"]
        for caller in callers:
            caller.start()
        held.wait_for(3, BOUND)
        held.release()
        for caller in callers:
            caller.join(BOUND)
        alone = fn.submit("d")
        assert not alone.done()
    assert alone.result(BOUND) == "D"
    assert sorted(answers) == ["A", "B", "C"]
    assert batches == [["a", "b", "c"], ["d"]]
    assert fn("e") == "E"
    fn.shutdown()


def test_held_calls_of_coroutines_share_a_batch() -> None:
    batches: list[list[int]] = []

    @batched.aio.dynamically
    async def fn(items: list[int]) -> list[int]:
        batches.append(items)
        return [-item for item in items]

    async def main() -> None:
        with hold(fn) as held:
            tasks = [asyncio.create_task(fn(number)) for number in range(3)]
            await held.until(3, BOUND)
            held.release()
            assert await asyncio.gather(*tasks) == [0, -1, -2]
        await fn.aclose()

    asyncio.run(main())
    assert batches == [[0, 1, 2]]


def test_too_few_calls_are_a_timeout_error_that_counts_them() -> None:
    @batched.dynamically(name="few")
    def fn(items: list[int]) -> list[int]:
        return items

    with hold(fn) as held:
        future = fn.submit(1)
        with pytest.raises(TimeoutError, match="1 of 2 items wait in the queue of few after 0.01"):
            held.wait_for(2, 0.01)
    assert future.result(BOUND) == 1
    fn.shutdown()


@pytest.mark.parametrize("other", [len, None, "fn"])
def test_only_batched_functions_are_held(other: Any) -> None:
    with pytest.raises(TypeError, match="hold takes a batched function of this process"):
        hold(other).__enter__()


def test_the_fixture_runs_calls_at_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['batched.testing']")
    (tmp_path / "test_it.py").write_text(
        """
import threading
import batched

@batched.dynamically(name="of_fixture")
def fn(items):
    return [threading.get_ident() for _ in items]

def test_it(batched_inline):
    assert fn(1) == threading.get_ident()
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr


# ---------------------------------------------------------------- notebooks


def test_functions_and_statistics_are_tables_in_notebooks() -> None:
    @batched.dynamically(name="<fn>", batch_size=64)
    def fn(items: list[int]) -> list[int]:
        return items

    with fn:
        fn([1, 2, 3])
    table: Callable[[], str] = fn._repr_html_
    assert "<caption>&lt;fn&gt;, batch_size 64</caption>" in table()
    assert "3 in 1 batches of 3.0 on average" in table()
    assert fn.stats._repr_html_().startswith("<table><caption>Stats</caption>")
    assert "rejected" not in fn.stats._repr_html_()


def test_map_shows_a_progress_bar_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")

    @batched.dynamically(name="shown")
    def fn(items: list[int]) -> list[int]:
        return items

    with fn:
        assert list(fn.map(range(40), progress=True)) == list(range(40))
    shown = capsys.readouterr().err
    assert "shown" in shown
    assert "40/40" in shown


def test_a_function_that_is_replaced_in_the_main_module_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import __main__

    def redefine() -> Any:
        def of_cell(items: list[int]) -> list[int]:
            return items

        of_cell.__module__ = "__main__"
        of_cell.__qualname__ = of_cell.__name__ = "of_cell"
        fn = batched.dynamically(of_cell)
        monkeypatch.setattr(__main__, "of_cell", fn, raising=False)
        return fn

    kept = [redefine()]  # as the outputs of a notebook keep them
    for _ in range(4):
        assert kept[-1](1) == 1
        kept.append(redefine())
    for _ in range(3000):
        if len(threads_of("of_cell")) <= 1:
            break
        threading.Event().wait(0.01)
    assert len(threads_of("of_cell")) <= 1
    assert kept[0](2) == 2  # a replaced function still works
    for fn in kept:
        fn.shutdown()
