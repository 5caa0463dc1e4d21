"""Steps as fingerprints see them, and modules of users with steps in them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batched.offline.identity.code import fingerprint

Load = Callable[[Mapping[str, str]], dict[str, Any]]
"""Write modules, and return the fingerprint of the step in the module `steps`."""


def step(**settings: Any) -> SimpleNamespace:
    plain = {"fn": len, "name": "embed", "version": None, "args": (), "kwargs": {}}
    columns = {"input": ("text",), "output": ("vector",)}
    return SimpleNamespace(
        **{
            **plain,
            **columns,
            "preprocess": None,
            "postprocess": None,
            "where": None,
            "route": None,
            **settings,
        }
    )


def step_in(module: Any) -> SimpleNamespace:
    """Return the step that the variables of a module are the settings of."""
    names = vars(module).keys() & {"fn", "name", "args", "kwargs"}
    return step(**{name: getattr(module, name) for name in names})


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that makes modules in a new folder, imported anew each time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def import_anew(files: Mapping[str, str]) -> dict[str, Any]:
        for name, source in files.items():
            (tmp_path / f"{name}.py").write_text(source)
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return fingerprint(step_in(importlib.import_module("steps")))

    return import_anew
