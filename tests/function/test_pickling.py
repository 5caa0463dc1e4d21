"""Batched functions travel between processes as plain functions do, by name or by value."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import batched
from stage import BOUND

cloudpickle = pytest.importorskip("cloudpickle")


@batched.dynamically
def doubled(items: list[int]) -> list[int]:
    return [2 * item for item in items]


@batched.aio.dynamically
async def awaited(items: list[int]) -> list[int]:
    return items


def _tripled(items: list[int]) -> list[int]:
    return [3 * item for item in items]


class Tripling:
    own = batched.dynamically(staticmethod(_tripled))

    def __call__(self, items: list[int]) -> list[int]:
        return _tripled(items)


tripled = batched.dynamically(_tripled)
small = doubled.with_options(batch_size=2)


@pytest.mark.parametrize("fn", [doubled, awaited])
def test_functions_pickle_by_name_with_every_protocol(fn: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(fn, protocol)) is fn


@pytest.mark.parametrize("fn", [tripled, small, Tripling.own])
def test_a_function_pickles_by_the_name_that_its_module_or_class_has_for_it(fn: Any) -> None:
    assert pickle.loads(pickle.dumps(fn)) is fn
    assert copy.deepcopy(fn) is fn


@pytest.mark.parametrize("func", [Tripling(), functools.partial(_tripled)])
def test_a_callable_object_pickles_by_value(func: Any) -> None:
    fn = batched.dynamically(batch_size=2)(func)
    twin = pickle.loads(pickle.dumps(fn))
    assert twin([1, 2, 3]) == [3, 6, 9]
    assert twin.options == fn.options


SCRIPT = """
import functools, sys
import batched

def logged(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)
    return wrapper

FACTOR = 2

@batched.dynamically(length=lambda item: 1)
def double(items: list[int], plus: int = 1) -> list[int]:
    assert double.options["batch_size"] == 32  # it refers to itself
    return [FACTOR * item + plus for item in items]

@logged
@batched.dynamically
def wrapped(items):
    return [FACTOR * item + 1 for item in items]

unnamed = batched.dynamically(lambda items: [FACTOR * item + 1 for item in items])

class Model:
    def __init__(self, factor):
        self.factor = factor

    @batched.dynamically
    def scaled(self, items):
        return [self.factor * item + 1 for item in items]

    @logged
    @batched.dynamically
    def wrapped(self, items):
        return [self.factor * item + 1 for item in items]

    @batched.dynamically
    @classmethod
    def class_below(cls, items):
        return [FACTOR * item + 1 for item in items]

    @classmethod
    @batched.dynamically
    def class_above(cls, items):
        return [FACTOR * item + 1 for item in items]

    @staticmethod
    @batched.dynamically
    def static(items):
        return [FACTOR * item + 1 for item in items]

def functions():
    model = Model(2)
    return [
        double, wrapped, unnamed, model.scaled, model.wrapped,
        Model.class_below, Model.class_above, Model.static,
    ]

def check(results):
    assert results == [7] * 8, results
"""
"""Functions of `__main__`, each of which makes 7 of 3."""


def run(folder: Path, code: str, timeout: float = 2 * BOUND) -> None:
    """Run the script with `code` at its end, in a process and a folder of its own."""
    script = folder / "script.py"
    guarded = textwrap.indent(textwrap.dedent(code), "    ")
    script.write_text(f"{SCRIPT}\nif __name__ == '__main__':\n{guarded}")
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(Path(batched.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr


def test_cloudpickle_takes_functions_of_a_script_to_another_process(tmp_path: Path) -> None:
    """Dask, Spark and Ray pickle functions by cloudpickle."""
    run(
        tmp_path,
        """
        import cloudpickle, subprocess
        there = "import pickle, sys; print([func(3) for func in pickle.load(sys.stdin.buffer)])"
        done = subprocess.run(
            [sys.executable, "-c", there], input=cloudpickle.dumps(functions()), capture_output=True
        )
        check(eval(done.stdout.decode() or repr(done.stderr)))
        """,
    )


def test_what_was_one_object_is_one_object_after_cloudpickle(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import cloudpickle, subprocess
        there = (
            "import pickle, sys\\n"
            "double, again, model, Model, method = pickle.load(sys.stdin.buffer)\\n"
            "print(double is again, double is double.__wrapped__.__globals__['double'],"
            " Model.scaled is method, model.scaled == model.scaled, double(3, plus=0))"
        )
        model = Model(2)
        data = cloudpickle.dumps([double, double, model, Model, Model.scaled])
        done = subprocess.run([sys.executable, "-c", there], input=data, capture_output=True)
        assert done.stdout.decode().strip() == "True True True True 6", done
        """,
    )


def test_joblib_takes_functions_of_a_script_to_its_processes(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    run(
        tmp_path,
        """
        import joblib
        check(joblib.Parallel(1, "loky")(joblib.delayed(func)(3) for func in functions()))
        parallel = joblib.Parallel(2)
        check(parallel(joblib.delayed(func)(3) for func in functions()))
        """,
    )


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_takes_functions_of_a_script_to_its_processes(
    method: str, tmp_path: Path
) -> None:
    """By their names, also if Ray is imported, which sends them by value."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no such start method")
    run(
        tmp_path,
        f"""
        import multiprocessing, types
        sys.modules["ray"] = types.ModuleType("ray")
        with multiprocessing.get_context({method!r}).Pool(1) as pool:
            check([pool.apply(func, (3,)) for func in functions()])
        """,
    )


@pytest.mark.slow  # Ray takes seconds to start
@pytest.mark.timeout(120)
def test_ray_takes_functions_of_a_script_to_its_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run(
        tmp_path,
        """
        import multiprocessing, ray
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        call = ray.remote(lambda func: func(3))
        check(ray.get([call.remote(func) for func in functions()]))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            check([pool.apply(func, (3,)) for func in functions()])
        ray.shutdown()
        """,
        timeout=100,
    )


def test_a_function_of_a_module_is_found_by_its_name(tmp_path: Path) -> None:
    """With cloudpickle, too: the other process has the module."""
    (tmp_path / "library.py").write_text(SCRIPT)
    run(
        tmp_path,
        """
        import cloudpickle, library, pickle
        for dumps in (pickle.dumps, cloudpickle.dumps, pickle._dumps):
            for thing in (library.double, library.unnamed, library.Model.scaled):
                assert pickle.loads(dumps(thing)) is thing
                assert len(dumps(thing)) < 250
            model = pickle.loads(dumps(library.Model(2).scaled)).__self__
            assert type(model) is library.Model
        """,
    )


def test_a_module_registered_by_value_is_sent_by_value(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(SCRIPT)
    run(
        tmp_path,
        """
        import cloudpickle, library, subprocess
        cloudpickle.register_pickle_by_value(library)
        data = cloudpickle.dumps(library.functions())
        there = "import pickle, sys; print([func(3) for func in pickle.load(sys.stdin.buffer)])"
        command = [sys.executable, "-c", there]
        done = subprocess.run(command, input=data, capture_output=True, cwd="/")
        check(eval(done.stdout.decode() or repr(done.stderr)))
        """,
    )


def test_a_class_that_no_module_has_is_sent_with_its_methods() -> None:
    class Local:
        @batched.dynamically
        def plus(self, items: list[int]) -> list[int]:
            return [1 + item for item in items]

    assert pickle.loads(cloudpickle.dumps(Local))().plus(1) == 2
    assert pickle.loads(cloudpickle.dumps(Local().plus))(1) == 2
    fn = batched.dynamically(lambda items: items)
    assert pickle.loads(cloudpickle.dumps(fn))(1) == 1
    assert copy.copy(fn) is copy.deepcopy(fn) is fn


def test_a_function_sent_by_value_has_a_batcher_and_settings_of_its_own() -> None:
    @batched.dynamically(batch_size=7)
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    assert double(1) == 2
    twin: Any = pickle.loads(cloudpickle.dumps(double))
    assert (twin.stats.calls, twin.options["batch_size"], twin.__name__) == (0, 7, "double")
    double.shutdown()
    assert twin(3) == 6


def test_a_function_that_its_module_does_not_have_is_refused_by_pickle() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="not the same object"):
        pickle.dumps(doubled.with_options(batch_size=3))
