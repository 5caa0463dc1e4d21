"""Answers of requests that have ended."""

from __future__ import annotations

import contextlib
import gc
import weakref

from batched._core.request import Request
from batched._runtime.settling import answer_of


def test_a_raised_error_is_freed_with_its_caller() -> None:
    """Neither the request nor its own traceback keeps the error alive.

    The error is freed without garbage collection.
    """

    class BadItem(Exception):
        pass

    failed = Request([0], 1, "g", error=BadItem())
    gone = weakref.ref(failed.error)
    gc.disable()
    try:
        with contextlib.suppress(BadItem):
            answer_of(failed)
        assert gone() is None
    finally:
        gc.enable()
