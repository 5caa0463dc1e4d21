"""The machinery of the benchmarks that compare: traffic is counted rightly, tables say what is
missing, peers stay out of the way.
"""

import argparse
import asyncio
import itertools
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import contest
from contest import Found, Unavailable, ask
from peers import BARE, OURS, PEERS, Peer, bare, compared, without
from report import Figure, Result, conclude, table
from traffic import Sleep, arriving, by_coroutines, by_threads, rate

pytestmark = pytest.mark.once

BENCHMARKS = Path(contest.__file__).parent
NO_TIME = {"fixed_ms": 0.0, "per_item_ms": 0.0}
EAGER = {"flush": "eager"}
CLOSED = {
    "module": "bare",
    "callers": 3,
    "calls": 4,
    "warm_up": 2,
    "batch_size": 32,
    "settings": {},
    **NO_TIME,
}


def test_each_item_is_called_once_by_threads_and_by_coroutines() -> None:
    called: list[int] = []

    async def called_by_coroutine(item: int) -> None:
        called.append(item)

    answers = by_threads(called.append, 4, range(100))
    assert sorted(called) == list(range(100))
    assert len(answers) == 100
    assert answers == sorted(answers)
    called.clear()
    assert len(asyncio.run(by_coroutines(called_by_coroutine, 4, range(100)))) == 100
    assert sorted(called) == list(range(100))


def test_the_rate_leaves_out_the_warm_up_and_the_last_call_of_each_caller() -> None:
    slow, steady, end = [10.0, 10.0], [20.0, 20.0, 30.0, 30.0], [1000.0, 1000.0]
    assert rate([*slow, *steady, *end], callers=2, warm_up=1) == pytest.approx(4 / 20.0)


def test_arrivals_are_all_answered_whatever_overtakes_what() -> None:
    order: list[int] = []
    first = asyncio.Event()

    async def call(number: int) -> None:
        if number == 0:
            await first.wait()
        elif number == 2:
            first.set()
        order.append(number)

    latencies = asyncio.run(arriving(call, [0.0, 0.0, 0.0]))
    assert order == [1, 2, 0]
    assert len(latencies) == 3
    assert min(latencies) > 0


def test_a_failed_call_of_an_open_loop_is_an_error() -> None:
    async def call(number: int) -> None:
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        asyncio.run(arriving(call, [0.0]))


def test_bare_hand_off_answers_full_batches_of_threads() -> None:
    sizes: list[int] = []
    with bare.for_threads(lambda items: sizes.append(len(items)), 32, callers=3) as call:
        by_threads(call, 3, range(30))
    assert sizes == [3] * 10


def test_bare_hand_off_answers_full_batches_of_coroutines() -> None:
    sizes: list[int] = []

    async def count(items: list[int]) -> None:
        sizes.append(len(items))

    async def main() -> None:
        async with bare.for_coroutines(count, 32, callers=3) as call:
            await by_coroutines(call, 3, range(30))

    asyncio.run(main())
    assert sizes == [3] * 10


def test_ours_answers_in_a_process_of_its_own() -> None:
    asked = [
        {"question": f"closed loop, {kind}", **CLOSED, "module": "ours"}
        for kind in ("threads", "coroutines")
    ]
    asked.append(
        {
            "question": "open loop",
            "module": "ours",
            "arrivals": [0.0] * 20,
            "warm_up": 2,
            "batch_size": 32,
            "settings": {"flush": "eager"},
            **NO_TIME,
        }
    )
    threads, coroutines, opened = ask(OURS, asked, 50)
    assert threads.keys() == coroutines.keys() == {"share", "rate"}
    assert opened["p99"] >= opened["mean"] > 0


def test_what_a_peer_raises_is_its_answer() -> None:
    [answer] = ask(
        BARE,
        [{"question": "closed loop, threads", **CLOSED, "settings": {"nonsense": 1}}],
        50,
    )
    assert "nonsense" in answer["error"]


def test_a_peer_that_never_answers_is_ended() -> None:
    with pytest.raises(Unavailable, match="no answers within"):
        ask(
            BARE,
            [{"question": "closed loop, threads", **CLOSED, "settings": {"callers": 1000}}],
            2,
        )


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Peer:
    """A peer that cannot be installed."""
    monkeypatch.setattr(contest, "ENVIRONMENTS", tmp_path)
    home = tmp_path / "absent" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)

    def refuse(peer: Peer) -> None:
        raise Unavailable("not installed: no such thing")

    monkeypatch.setattr(contest, "_install", refuse)
    return Peer("absent", "absent", "never", "absent")


def test_a_peer_that_is_missing_is_reported_and_ours_goes_on(absent: Peer) -> None:
    def questions(peer: Peer, settings: object) -> list[contest.Question]:
        return [{"question": "closed loop, threads", "title": "any", **CLOSED}]

    found = contest.contest(questions, 1, peers=[absent], ours=[OURS])
    assert found.missing == {"absent": "not installed: no such thing"}
    assert list(found.runs) == [("any", "ours", "share"), ("any", "ours", "rate")]


def test_ours_is_never_missing() -> None:
    def questions(peer: Peer, settings: object) -> list[contest.Question]:
        return [
            {
                "question": "closed loop, threads",
                "title": "any",
                **CLOSED,
                "settings": {"nonsense": 1},
            }
        ]

    with pytest.raises(Unavailable, match="nonsense"):
        contest.contest(questions, 1, peers=[], ours=[OURS])


def test_an_environment_of_a_peer_never_sees_this_project() -> None:
    for peer in PEERS:
        paths = contest.environment(peer)["PYTHONPATH"].split(":")
        assert not any((Path(path) / "batched").exists() for path in paths)


def test_a_question_is_asked_of_all_of_ours_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def ask(peer: Peer, questions: list[contest.Question]) -> list[dict[str, float]]:
        asked.extend((question["title"], question["module"]) for question in questions)
        return [{"rate": 1.0}] * len(questions)

    monkeypatch.setattr(contest, "ask", ask)
    contest.contest(lambda *_: [{"title": "a"}, {"title": "b"}], 1, ours=[OURS, BARE])
    assert asked == [("a", "ours"), ("a", "bare"), ("b", "ours"), ("b", "bare")]


FLOOR = Figure("floor", [1.0, 2.0, 1.0], "ms")
SLOW = Figure("slow | fast", [4.0, 2.0, 3.0], "ms", FLOOR, at_most=2.0)


def test_ratios_are_those_within_each_round() -> None:
    assert SLOW.ratio == 3.0
    assert not SLOW.kept
    assert Figure("", [2.0, 2.0, 2.0], "", FLOOR, at_most=2.0).kept


def test_where_rounds_are_missing_the_median_of_the_other_counts() -> None:
    assert Figure("", [3.0], "ms", FLOOR).ratio == 3.0


def test_bounds_hold_for_a_figure_that_is_beside_nothing() -> None:
    assert Figure("", [0.5], "", at_least=0.4).kept
    assert not Figure("", [0.5], "", at_least=0.6).kept


def test_a_table_says_what_was_reached_beside_what() -> None:
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


GOOD, BAD = Figure("a", [1.0], "", at_most=2.0), Figure("a", [3.0], "", at_most=2.0)
ALSO_BAD = Figure("b", [3.0], "", at_most=2.0)


def judged(*measured: list[Figure], noisy: bool = True) -> int:
    """How often figures were measured.

    Raises:
        SystemExit: a bound was missed.
    """
    left = [Result(figures) for figures in measured]
    conclude(lambda: left.pop(0), argparse.Namespace(check=True, save=False), noisy=noisy)
    return len(measured) - len(left)


def test_what_misses_a_bound_is_measured_once_more() -> None:
    assert judged([GOOD], [BAD]) == 1
    assert judged([BAD], [GOOD]) == 2
    assert judged([BAD, ALSO_BAD], [GOOD, Figure("b", [1.0], "")]) == 2
    assert judged([BAD], [GOOD, ALSO_BAD]) == 2


def test_what_misses_a_bound_twice_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        judged([BAD, ALSO_BAD], [BAD, Figure("b", [1.0], "")])
    assert capsys.readouterr().out.endswith("\nMISSED: a\n")


def test_what_is_not_noisy_is_judged_at_once() -> None:
    with pytest.raises(SystemExit):
        judged([BAD], noisy=False)


def arguments(**given: bool) -> argparse.Namespace:
    return argparse.Namespace(**{"check": False, "quick": False} | given)


def test_who_cannot_be_asked_is_named() -> None:
    reasons = without(arguments(), threads=True)
    assert "litserve" in reasons
    for peer in PEERS:
        assert peer.threads or not peer.coroutines or f"{peer.name}, threads" in reasons


@pytest.mark.parametrize("servers", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_whoever_is_not_compared_is_named(quick: bool, servers: bool) -> None:
    given = arguments(quick=quick)
    asked = [peer.name for peer in compared(given, servers=servers)]
    assert sorted([*asked, *without(given, servers=servers)]) == sorted(peer.name for peer in PEERS)
    quickly = compared(arguments(quick=True), servers=servers)
    assert all(len(peer.variants) == 1 for peer in quickly)


def test_a_check_asks_no_peer() -> None:
    assert not compared(arguments(check=True), servers=True)


def test_the_latest_failure_of_a_question_is_kept_beside_its_runs() -> None:
    found = Found()
    found.add("q", "row", {"share": 0.5})
    found.add("q", "row", {"error": "it broke"})
    assert found.runs == {("q", "row", "share"): [0.5]}
    assert found.missing == {"q: row": "it broke"}


def test_sleeps_take_what_the_model_says() -> None:
    assert Sleep(5.0, 0.1).seconds(10) == pytest.approx(0.006)


def test_bars_and_lines_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pictures import Panel, draw

    lines = Panel(
        "lines", {"ours": [1.0, 2.0], "other": [float("nan"), 3.0]}, ["1", "2"], "callers"
    )
    bars = Panel("bars", {"ours": [1.0], "other": [0.0]})
    draw("Both?", "a note", [lines, bars], tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_callers_of_a_closed_loop_run_at_once() -> None:
    together, seen = threading.Barrier(3), itertools.count()

    def call(_: int) -> None:
        together.wait(20)
        next(seen)

    by_threads(call, 3, range(9))
    assert next(seen) == 9


def test_all_benchmarks_are_run_by_one_command() -> None:
    named = (BENCHMARKS / "__main__.py").read_text()
    runnable = {
        path.stem for path in BENCHMARKS.glob("*.py") if "conclude(" in path.read_text()
    } - {"report"}
    assert len(runnable) > 5
    assert all(f'"{name}"' in named for name in runnable)


def test_what_very_many_rows_take_follows_from_what_was_measured() -> None:
    pytest.importorskip("ray")
    from at_scale import Plan, Rates

    rates = Rates(through=25e3, resumed=100e3, merged=50e3, stored=1500, resulting=1000)
    plan = Plan(rows=1e9, gpus=64, per_gpu=2000)
    assert plan.enough(rates) == 6, "drivers for 128,000 rows a second"
    one = {figure.name.removeprefix("1 run: "): figure.median for figure in plan.figures(rates)}
    assert round(one["GPUs compute"], 2) == round(1e9 / 128e3 / 3600, 2)
    assert one["rows are under way, the longer of both"] == 1e9 / 25e3 / 3600
    assert one["progress file of a run"] == 1.5
    six = replace(plan, runs=6).figures(rates)
    assert six[1].name == "6 runs: a driver takes results and commits them"
    assert 6 * six[1].median == pytest.approx(1e9 / 25e3 / 3600)
