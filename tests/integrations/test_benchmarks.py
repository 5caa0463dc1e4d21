"""Machinery of the benchmarks: figures, bounds, tables, and environments of peers."""

import re
from pathlib import Path

import pytest

import contest
from peers import PEERS
from report import RESULTS, Figure, Result, table

pytestmark = pytest.mark.once

BENCHMARKS = Path(contest.__file__).parent


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


def test_all_benchmarks_are_run_by_one_command() -> None:
    named = (BENCHMARKS / "__main__.py").read_text()
    runnable = [path for path in BENCHMARKS.glob("*.py") if "conclude(" in path.read_text()]
    assert len(runnable) > 5
    assert all(f'"{path.stem}"' in named for path in runnable if path.stem != "report")
