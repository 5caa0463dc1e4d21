"""Machinery of the benchmarks that compare: traffic, figures, tables, and processes of peers."""

import argparse
import asyncio
import re
import sys
import threading
from pathlib import Path

import pytest

import contest
from contest import Unavailable, ask
from peers import OURS, PEERS, Peer, compared, without
from report import RESULTS, Figure, Result, conclude, table
from traffic import by_coroutines, by_threads, rate

pytestmark = pytest.mark.once

BENCHMARKS = Path(contest.__file__).parent
NO_TIME = {"fixed_ms": 0.0, "per_item_ms": 0.0}
SIZES = {"callers": 3, "calls": 4, "warm_up": 2, "batch_size": 32, **NO_TIME}


def closed_loop(module: str, **settings: object) -> contest.Question:
    """Return a question that threads ask of a peer."""
    question = {"question": "closed loop, threads", "title": "any", "module": module}
    return {**question, **SIZES, "settings": settings}


def test_each_item_is_called_once_by_threads_and_by_coroutines() -> None:
    called: list[int] = []
    together = threading.Barrier(4)  # all callers call at once

    def call_of_thread(item: int) -> None:
        together.wait(20)
        called.append(item)

    async def call(item: int) -> None:
        called.append(item)

    of_threads = by_threads(call_of_thread, 4, range(100))
    of_coroutines = asyncio.run(by_coroutines(call, 4, range(100)))
    assert sorted(called) == sorted([*range(100), *range(100)])
    assert len(of_threads) == len(of_coroutines) == 100
    assert of_threads == sorted(of_threads)


def test_the_rate_leaves_out_the_warm_up_and_the_last_call_of_each_caller() -> None:
    answers = [10.0, 10.0, 20.0, 20.0, 30.0, 30.0, 1000.0, 1000.0]
    assert rate(answers, callers=2, warm_up=1) == pytest.approx(4 / 20.0)


def test_ours_answers_in_a_process_of_its_own() -> None:
    threads = closed_loop("ours")
    coroutines = {**threads, "question": "closed loop, coroutines"}
    opened = {**closed_loop("ours", flush="eager"), "question": "open loop", "arrivals": [0.0] * 20}
    closed, awaited, answer = ask(OURS, [threads, coroutines, opened], 50)
    assert closed.keys() == awaited.keys() == {"share", "rate"}
    assert answer["p99"] >= answer["mean"] > 0


def test_a_missing_peer_is_reported_and_ours_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(peer: Peer) -> None:
        raise Unavailable("not installed: no such thing")

    monkeypatch.setattr(contest, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(contest, "_install", refuse)
    home = tmp_path / "absent" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)

    def questions(peer: Peer, settings: object) -> list[contest.Question]:
        return [closed_loop("bare")]

    absent = Peer("absent", "absent", "never", "absent")
    found = contest.contest(questions, 1, peers=[absent], ours=[OURS])
    assert found.missing == {"absent": "not installed: no such thing"}
    assert list(found.runs) == [("any", "ours", "share"), ("any", "ours", "rate")]


def test_an_environment_of_a_peer_never_sees_this_project() -> None:
    for peer in PEERS:
        paths = contest.environment(peer)["PYTHONPATH"].split(":")
        assert not any((Path(path) / "batched").exists() for path in paths)


FLOOR = Figure("floor", [1.0, 2.0, 1.0], "ms")
SLOW = Figure("slow | fast", [4.0, 2.0, 3.0], "ms", FLOOR, at_most=2.0)


def test_ratios_are_medians_of_the_rounds_and_decide_on_bounds() -> None:
    assert SLOW.ratio == 3.0
    assert not SLOW.kept
    assert Figure("", [2.0, 2.0, 2.0], "", FLOOR, at_most=2.0).kept
    assert Figure("", [3.0], "ms", FLOOR).ratio == 3.0  # some rounds are missing
    assert Figure("", [0.5], "", at_least=0.4).kept  # without a baseline
    assert not Figure("", [0.5], "", at_least=0.6).kept


def test_a_table_has_figures_baselines_and_bounds() -> None:
    share = Figure("share", [0.5], "of best", at_least=0.6)
    text = table(
        "A question?",
        Result([SLOW, share], missing={"other": "it is not there"}, notes=["A note."]),
    )
    assert "# A question?" in text
    assert "| slow / fast | 3 | ms | 2 to 4 | floor: 1 | 3 | at most 2 |" in text
    assert "| share | 0.5 | of best |  |  |  | at least 0.6 |" in text
    assert "| other | not measured |  | it is not there |" in text
    assert text.endswith("- A note.\n")


BOUND = re.compile(r"at (least|most) ([\d.]+)")


def missed(page: str) -> list[str]:
    """Return the rows of a saved table that miss their bounds: of the ratio, or of the figure."""
    found = []
    for line in page.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for kind, bound in BOUND.findall(cells[-1] if cells else ""):
            ratio = cells[-2] if len(cells) > 5 else ""  # not in a table of shares
            value = float((ratio or cells[0]).replace(",", ""))
            if value < float(bound) if kind == "least" else value > float(bound):
                found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_no_saved_table_misses_its_own_bounds(path: Path) -> None:
    assert not missed(path.read_text())


def test_a_missed_bound_of_a_saved_table_is_found() -> None:
    share = Figure("share", [0.5], "of best", at_least=0.6)
    both = Figure("both", [0.5], "of best", at_least=0.4, at_most=0.6)
    assert missed(table("A question?", Result([SLOW, share, both]))) == ["slow / fast", "share"]


GOOD, BAD = Figure("a", [1.0], "", at_most=2.0), Figure("a", [3.0], "", at_most=2.0)
ALSO_BAD = Figure("b", [3.0], "", at_most=2.0)


def measurements(*results: list[Figure], noisy: bool = True) -> int:
    """Return the number of measurements after which no bound is missed.

    Raises:
        SystemExit: a bound was missed.
    """
    left = [Result(figures) for figures in results]
    conclude(lambda: left.pop(0), argparse.Namespace(check=True, save=False), noisy=noisy)
    return len(results) - len(left)


def test_figures_that_miss_a_bound_are_measured_once_more() -> None:
    assert measurements([GOOD], [BAD]) == 1
    assert measurements([BAD], [GOOD]) == 2
    assert measurements([BAD, ALSO_BAD], [GOOD, Figure("b", [1.0], "")]) == 2
    assert measurements([BAD], [GOOD, ALSO_BAD]) == 2
    with pytest.raises(SystemExit):
        measurements([BAD], noisy=False)
    with pytest.raises(SystemExit):
        measurements([BAD, ALSO_BAD], [BAD, Figure("b", [1.0], "")])


def arguments(**given: bool) -> argparse.Namespace:
    return argparse.Namespace(**{"check": False, "quick": False} | given)


@pytest.mark.parametrize("servers", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_every_peer_is_compared_or_named_as_missing(quick: bool, servers: bool) -> None:
    given = arguments(quick=quick)
    peers = compared(given, servers=servers)
    named = [*[peer.name for peer in peers], *without(given, servers=servers)]
    assert sorted(named) == sorted(peer.name for peer in PEERS)
    assert not quick or all(len(peer.variants) == 1 for peer in peers)
    assert not compared(arguments(check=True), servers=True), "a check asks no peer"
    reasons = without(arguments(), threads=True)
    for peer in PEERS:
        assert peer.threads or not peer.coroutines or f"{peer.name}, threads" in reasons


def test_all_benchmarks_are_run_by_one_command() -> None:
    named = (BENCHMARKS / "__main__.py").read_text()
    runnable = [path for path in BENCHMARKS.glob("*.py") if "conclude(" in path.read_text()]
    assert len(runnable) > 5
    assert all(f'"{path.stem}"' in named for path in runnable if path.stem != "report")
