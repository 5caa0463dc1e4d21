"""Without apache-beam."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_without_beam_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    for name in [each for each in sys.modules if each.startswith(("apache_beam.", "batched.beam"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r'^batched.beam needs .*"batched-dynamically\[beam\]"$'):
        importlib.import_module("batched.beam")
