"""Batched functions travel between processes as plain functions do, by name or by value."""

from __future__ import annotations

import copy
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
unnamed: Any = batched.dynamically(lambda items: items)
small = doubled.with_options(batch_size=2)


@pytest.mark.parametrize("fn", [doubled, awaited, tripled, unnamed, small, Tripling.own])
def test_a_function_pickles_by_the_name_that_its_module_or_class_has_for_it(fn: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for pickler in (pickle, cloudpickle):
            assert pickle.loads(pickler.dumps(fn, protocol)) is fn
    assert copy.copy(fn) is copy.deepcopy(fn) is fn


def test_a_callable_object_pickles_by_value() -> None:
    fn = batched.dynamically(batch_size=2)(Tripling())
    twin = pickle.loads(pickle.dumps(fn))
    assert twin([1, 2, 3]) == [3, 6, 9]
    assert twin.options == fn.options


def test_a_function_with_other_settings_is_not_pickled_as_the_one_of_its_name() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="not the same object"):
        pickle.dumps(doubled.with_options(batch_size=3))


SCRIPT = """
import sys
import batched

FACTOR = 2

@batched.dynamically(length=lambda item: 1)
def double(items: list[int], plus: int = 1) -> list[int]:
    assert double.options["batch_size"] == 32  # it refers to itself
    return [FACTOR * item + plus for item in items]

unnamed = batched.dynamically(lambda items: [FACTOR * item + 1 for item in items])

class Model:
    def __init__(self, factor):
        self.factor = factor

    @batched.dynamically
    def scaled(self, items):
        return [self.factor * item + 1 for item in items]

    @batched.dynamically
    @classmethod
    def of_class(cls, items):
        return [FACTOR * item + 1 for item in items]

    @staticmethod
    @batched.dynamically
    def static(items):
        return [FACTOR * item + 1 for item in items]

def functions():
    return [double, unnamed, Model(2).scaled, Model.of_class, Model.static]

def check(results):
    assert results == [7] * 5, results
"""
"""Functions of `__main__`, each of which makes 7 of 3."""


def run(folder: Path, code: str) -> None:
    """Run the script with `code` at its end, in a process and a folder of its own."""
    script = folder / "script.py"
    guarded = textwrap.indent(textwrap.dedent(code), "    ")
    script.write_text(f"{SCRIPT}\nif __name__ == '__main__':\n{guarded}")
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=2 * BOUND,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(Path(batched.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr


def test_cloudpickle_takes_functions_of_a_script_to_another_process(tmp_path: Path) -> None:
    """One object arrives as one object."""
    run(
        tmp_path,
        """
        import cloudpickle, subprocess
        there = (
            "import pickle, sys\\n"
            "functions, double, model = pickle.load(sys.stdin.buffer)\\n"
            "assert functions[0] is double is double.__wrapped__.__globals__['double']\\n"
            "assert model.scaled == model.scaled and double(3, plus=0) == 6\\n"
            "print([func(3) for func in functions])"
        )
        data = cloudpickle.dumps([functions(), double, Model(2)])
        done = subprocess.run([sys.executable, "-c", there], input=data, capture_output=True)
        check(eval(done.stdout.decode() or repr(done.stderr)))
        """,
    )


def test_multiprocessing_takes_functions_of_a_script_to_its_processes(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import multiprocessing, types
        sys.modules["ray"] = types.ModuleType("ray")
        for method in multiprocessing.get_all_start_methods():
            with multiprocessing.get_context(method).Pool(1) as pool:
                check([pool.apply(func, (3,)) for func in functions()])
        """,
    )
