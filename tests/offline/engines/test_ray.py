"""Runs on a real Ray: two raylets on this machine, of which one comes and goes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

import pyarrow.parquet as pq
import ray_steps

from batched import offline
from offline_steps import ask, running
from stage import python

pytestmark = [
    pytest.mark.once,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("default"),  # of Ray itself
]

CPUS = 2
"""CPUs of the node that stays."""
RAY = offline.Ray()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": CPUS, "include_dashboard": False, "object_store_memory": 2**28},
    )
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


def rows(count: int, **odd: str) -> list[dict[str, Any]]:
    """Return rows, each with its own text; `row5="bad"` names another text."""
    return [{"id": n, "text": odd.get(f"row{n}", f"row {n}")} for n in range(count)]


def pipeline(log: Path, pause: float = 0.0, count: int = 1, **settings: Any) -> offline.Pipeline:
    return offline.Pipeline(
        offline.Step(
            ray_steps.Shout,
            args=(str(log), pause, count),
            input=["id", "text"],
            output="loud",
            version=1,
        ),
        offline.Step(
            ray_steps.measure,
            input=["id", "loud"],
            output=["size", "vector"],
            num_cpus=0,
            **settings,
        ),
    )


def run(steps: offline.Pipeline, source: Any, dest: Path, **more: Any) -> offline.Report:
    settings = {"engine": RAY, "workers": 1, "key": "id", "watch": False}
    return steps.run(source, dest, **{**settings, **more})


def test_each_actor_builds_its_class_once_and_ends_with_its_run(
    cluster: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    dest, local = tmp_path / "ray.parquet", tmp_path / "local.parquet"
    report = run(pipeline(log, 0.02, CPUS), rows(5000), dest, workers=CPUS)
    assert (report.ok, report.failed) == (5000, 0)
    words = ray_steps.notes(log)
    built = [int(each[1]) for each in words if each[0] == "built"]
    assert len(built) == len(set(built)) == CPUS
    assert os.getpid() not in built
    assert {int(each[1]) for each in words} == set(built), "all of them work"
    seen = Counter(key for each in words if each[0] == "rows" for key in each[2:])
    assert set(seen.values()) == {1}
    assert len(seen) == 5000
    run(pipeline(tmp_path / "other"), rows(5000), local, engine=None)
    assert dest.read_bytes() == local.read_bytes()
    pause = threading.Event()
    while any(Path(f"/proc/{pid}").exists() for pid in built):
        pause.wait(0.01)
    assert not [each for each in threading.enumerate() if each.name.startswith("batched-ray")]


@pytest.mark.slow
def test_each_way_to_fail_costs_one_row(cluster: Any, tmp_path: Path) -> None:
    odd = {"row5": "bad", "row15": "exit", "row25": "sys.exit", "row35": "hang"}
    steps = pipeline(tmp_path / "log", timeout_s=3.0, processes=True)
    report = run(steps, rows(100, **odd), tmp_path / "out.parquet", batch_size=2)
    letters = {letter["key"]: letter["error"] for letter in report.dead_letters()}
    assert set(letters) == {5, 15, 25, 35}, letters
    assert report.ok == 96
    assert letters[5] == "ValueError: bad row"
    assert letters[15].startswith("WorkerDied: the actor of measure was lost: ")
    assert letters[25] == "SystemExit: 3"
    assert "timeout_s=3" in letters[35]


@pytest.mark.slow
def test_an_actor_that_dies_while_it_has_nothing_to_do_is_replaced(
    cluster: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with running(ray_steps.Shout, RAY, args=(str(log),), batch_size=2) as (submitter, _):
        assert ask(submitter, [{"id": 0, "text": "first"}]) == ["FIRST"]
        ((_, pid),) = [each for each in ray_steps.notes(log) if each[0] == "built"]
        os.kill(int(pid), signal.SIGKILL)
        large = "x" * 200_000  # which Ray stores first
        batch = [{"id": number, "text": text} for number, text in enumerate(("a", large))]
        assert ask(submitter, batch) == ["A", large.upper()]


@pytest.mark.slow
def test_closing_ends_a_call_and_its_actor(cluster: Any, tmp_path: Path) -> None:
    log, pause = tmp_path / "log", threading.Event()
    with running(ray_steps.Shout, RAY, args=(str(log), 1e6)) as (submitter, outcomes):
        submitter.submit([{"id": 1, "text": "a"}])
        while not (rows := [words for words in ray_steps.notes(log) if words[0] == "rows"]):
            pause.wait(0.01)
        submitter.engine.close()
        assert outcomes.empty()
        while Path(f"/proc/{rows[0][1]}").exists():
            pause.wait(0.01)


@pytest.mark.slow
def test_a_new_node_is_used_and_a_lost_node_costs_only_calls_in_flight(
    cluster: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    nodes: list[Any] = []

    def change(snapshot: offline.Snapshot) -> None:  # in this thread, as Ray has it
        built = sum(each[0] == "built" for each in ray_steps.notes(log))
        if built == CPUS and not nodes:
            nodes.append(cluster.add_node(num_cpus=CPUS, object_store_memory=2**28))
        elif built == 2 * CPUS and snapshot.steps[0].ok and nodes[0] in cluster.list_all_nodes():
            cluster.remove_node(nodes[0], allow_graceful=False)
            sizes.append(snapshot.steps[0].ok)

    sizes: list[int] = []
    report = run(
        pipeline(log, 0.05, 2 * CPUS),
        rows(4000),
        tmp_path / "out.parquet",
        workers=2 * CPUS,
        batch_size=16,
        watch=change,
    )
    assert (report.ok, report.failed) == (4000, 0)
    assert sizes[0] < 4000, "in the middle of the run"
    seen = Counter(key for each in ray_steps.notes(log) if each[0] == "rows" for key in each[2:])
    assert sum(count > 1 for count in seen.values()) <= CPUS * 16, "one call of each actor"


def test_a_run_goes_on_with_another_engine(cluster: Any, tmp_path: Path) -> None:
    steps, dest = pipeline(tmp_path / "log"), tmp_path / "out.parquet"
    for count, settings in ((50, {}), (100, {"engine": None}), (150, {})):
        report = run(steps, rows(count), dest, **settings)
        assert (report.ok, report.skipped) == (50, count - 50)


WITH_FOLDER = """
import sys
from batched import offline

def helped(texts):
    import only_there
    return [only_there.size(text) for text in texts]

engine = offline.Ray("local", runtime_env={"working_dir": "there"})
for number in range(2):
    report = offline.run(
        helped, [{"text": "abc"}], f"{number}.parquet", input="text", output="size", engine=engine
    )
    assert report.ok == 1, report
"""


@pytest.mark.slow  # a cluster of its own
def test_a_folder_goes_to_the_actors_of_each_run(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "only_there.py").write_text("def size(text):\n    return len(text)\n")
    (tmp_path / "script.py").write_text(WITH_FOLDER)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=100)


@pytest.mark.timeout(240)  # Ray starts a dying actor several times
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (ray_steps.Broken, "no model.bin"),
        (ray_steps.Dying, "the actor of Dying was lost: "),
    ],
)
def test_a_class_that_cannot_be_built_is_a_fatal_error(
    cluster: Any, broken: Any, message: str
) -> None:
    with running(broken, RAY) as (submitter, outcomes):
        submitter.submit([1])
        assert message in str(outcomes.get(timeout=200).fatal)


@pytest.mark.slow
def test_a_coroutine_function_stays_with_the_driver(cluster: Any, tmp_path: Path) -> None:
    step = offline.Step(ray_steps.wait, input="text", output="pid")
    dest = tmp_path / "out.parquet"
    run(offline.Pipeline(step), rows(10), dest)
    assert set(pq.read_table(dest)["pid"].to_pylist()) == {os.getpid()}


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Ray: tpu must be a number of at least 0, got '1'"):
        offline.Ray(resources={"tpu": "1"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"engine must be an offline.Ray\(\), got 'ray'"):
        run(pipeline(tmp_path / "log"), rows(1), tmp_path / "out.parquet", engine="ray")
    settings = 'input="a", output="n", engine=offline.Ray(address="localhost:1")'
    code = f"from batched import offline; offline.run(abs, [], '{tmp_path}/r.csv', {settings})"
    assert "no Ray answers at localhost:1: " in python(code).stderr
