"""A chat client as a step of an offline run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched import offline
from batched.chat import ChatClient
from batched.errors import RunMismatch, RunStopped
from chat_server import Asked, ChatServer, Reply, answer, chat_server, refuse


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "prompt": f"prompt {number}"} for number in range(count)]


def run(client: ChatClient[Any], rows: Any, dest: Path, **settings: Any) -> offline.Report:
    known = {"output": "answer", "retry": offline.Retry(wait_initial=0.01, wait_jitter=0)}
    step = offline.Step(client, input="prompt", **{**known, **settings})
    return offline.Pipeline(step).run(rows, dest, key="id", watch=False)


def read(dest: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in dest.read_text().splitlines()]


def reason_to_stop(server: ChatServer, dest: Path, most: float, **settings: Any) -> str:
    """Return why a run stops: its budget is small, and its client new, as in a new process."""
    costs: dict[str, Any] = {"prices": (1.0, 1.0), "max_cost": most, "max_tokens": 5}
    client = server.client(**costs, **settings, max_workers=1)
    with pytest.raises(RunStopped) as stopped:
        run(client, rows_of(100), dest, version="1")
    return str(stopped.value)


def test_bad_rows_are_dead_letters_and_a_resumed_run_sends_missing_rows_only(
    server: ChatServer, quick: None, tmp_path: Path
) -> None:
    bad = {"prompt 17": refuse(400), "prompt 60": Reply(None), "prompt 90": Reply(body=b"{")}

    def behave(asked: Asked) -> Reply:
        if 40 <= asked.number <= 60:  # an outage
            return Reply(end="reset") if asked.number % 2 else refuse(503)
        return bad.get(asked.prompt) or answer(asked)

    server.behave = behave
    rows = rows_of(100)
    rows[99]["prompt"] = ""
    dest = tmp_path / "answers.jsonl"
    report = run(server.client(max_workers=8, attempts=3), rows, dest)
    assert (report.ok, report.failed) == (96, 4)
    letters = {letter["key"]: letter["error"] for letter in report.dead_letters()}
    assert set(letters) == {17, 60, 90, 99}
    # perhaps after requests in the outage
    assert "EndpointError: chat: the service answered 400: not now" in letters[17]
    assert "its answer has no text" in letters[60]
    assert "[request req_" in letters[60]
    assert letters[99] == "ValueError: chat got an empty prompt"
    good = [row for row in rows if row["id"] not in letters]
    assert read(dest) == [{**row, "answer": f"re: {row['prompt']}"} for row in good]
    server.behave, before = answer, server.seen.copy()
    rows[99]["prompt"] = "not empty any more"
    again = run(server.client(), rows, dest)
    assert (again.ok, again.failed, again.skipped) == (4, 0, 96)
    assert set(server.seen - before) == {*bad, "not empty any more"}


def test_a_last_row_that_always_fails_is_one_dead_letter(
    server: ChatServer, quick: None, tmp_path: Path
) -> None:
    server.behave = lambda asked: Reply(end="hang") if asked.prompt == "prompt 9" else answer(asked)
    client = server.client(timeout_s=1, attempts=1)
    dest = tmp_path / "answers.jsonl"
    report = run(client, rows_of(10), dest)
    assert (report.ok, report.failed) == (9, 1)
    (letter,) = report.dead_letters()
    assert letter["key"] == 9
    again = run(client, rows_of(10), dest)  # nothing but this row is left
    assert (again.ok, again.failed) == (0, 1)


def test_two_steps_share_the_limits_of_their_service(server: ChatServer, tmp_path: Path) -> None:
    server.behave = lambda asked: Reply(f"re: {asked.prompt}", after=0.02)
    client = server.client(max_workers=3)
    again = client.with_options(system="again")
    steps = [
        offline.Step(client, input="prompt", output="answer"),
        offline.Step(again, input="answer", output="second", name="b"),
    ]
    dest = tmp_path / "answers.jsonl"
    report = offline.Pipeline(*steps).run(rows_of(20), dest, key="id", watch=False)
    assert report.ok == 20
    assert server.most_in_flight <= 3, "of one client for each step it would be 6"
    assert read(dest)[7]["second"] == "re: re: prompt 7"


def test_max_cost_is_the_budget_of_a_run_over_restarts(server: ChatServer, tmp_path: Path) -> None:
    for most, requests in [(300e-6, 20), (300e-6, 20), (450e-6, 30)]:
        reason = reason_to_stop(server, tmp_path / "answers.jsonl", most)
        assert f"may exceed max_cost={most:g}" in reason
        assert len(server.requests) == requests


def test_requests_without_a_result_cost_money_in_a_later_run_too(
    server: ChatServer, tmp_path: Path
) -> None:
    server.behave = lambda asked: Reply(None)  # paid, and of no use
    for _ in range(2):
        reason_to_stop(server, tmp_path / "answers.jsonl", 150e-6, attempts=1)
    assert len(server.requests) <= 10


def test_each_worker_process_has_its_share_of_the_money(server: ChatServer) -> None:
    client = server.client(prices=(1.0, 1.0), max_cost=1.0)
    client.spent = 0.4
    assert client.share(3).options["max_cost"] == pytest.approx(0.2)
    assert server.client().share(3).options["max_cost"] is None


def test_an_outage_marks_no_row_as_failed(server: ChatServer, quick: None, tmp_path: Path) -> None:
    dest = tmp_path / "answers.jsonl"
    server.down()
    client = server.client(max_workers=8, max_wait_s=0.3)
    with pytest.raises(RunStopped, match="no answer came") as raised:
        run(client, rows_of(20), dest, outage_s=0)
    assert (raised.value.report.ok, raised.value.report.failed) == (0, 0)
    server.up()
    assert run(client, rows_of(20), dest).ok == 20


def test_another_parameter_is_another_step_and_another_address_is_the_same(
    server: ChatServer, tmp_path: Path
) -> None:
    dest = tmp_path / "answers.jsonl"
    run(server.client(temperature=0), rows_of(3), dest)
    with pytest.raises(RunMismatch, match="its 'parameters' differs"):
        run(server.client(temperature=1), rows_of(3), dest)
    with chat_server() as other:
        moved = other.client(temperature=0, max_workers=2, api_key="another")
        assert run(moved, rows_of(4), dest).skipped == 3
        assert len(other.requests) == 1


def test_the_step_adds_no_retries_to_the_retries_of_the_client(
    server: ChatServer, quick: None, tmp_path: Path
) -> None:
    server.behave = lambda asked: refuse(500) if asked.prompt == "prompt 3" else answer(asked)
    client = server.client(max_workers=2, attempts=2)
    retry = offline.Retry(attempts=7, wait_initial=0.01, wait_jitter=0)
    report = run(client, rows_of(30), tmp_path / "answers.jsonl", retry=retry)
    assert (report.ok, report.failed) == (29, 1)
    # twice for each turn of the row: at first, three times after all other rows, and at the end
    assert server.seen["prompt 3"] <= 2 * 5


@pytest.mark.slow
def test_workers_may_be_processes(server: ChatServer, tmp_path: Path) -> None:
    dest = tmp_path / "answers.jsonl"
    assert run(server.client(), rows_of(6), dest, processes=True, workers=2).ok == 6
    assert read(dest)[5]["answer"] == "re: prompt 5"
