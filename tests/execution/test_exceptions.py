"""Copies of exceptions, and exceptions that cannot be copied."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from batched._execution.exceptions import SharedError, copy_exception
from odd_errors import RAISING, Grouped, Slotted, Uncopyable, uncopyable

COPIED = [each for each in RAISING if each is not uncopyable]

OF_BUILTINS = {
    AttributeError: ("name", "obj"),
    ImportError: ("msg", "name", "path"),
    NameError: ("name",),
    OSError: ("errno", "strerror", "filename", "filename2"),
    SyntaxError: ("msg", "filename", "lineno", "offset", "text", "end_lineno", "end_offset"),
    UnicodeDecodeError: ("encoding", "object", "start", "end", "reason"),
}


def raised_by(function: Callable[[], None]) -> Any:
    with pytest.raises(Exception) as caught:  # of every kind
        function()
    return caught.value


@pytest.mark.parametrize("function", COPIED)
def test_a_copy_equals_the_original(function: Callable[[], None]) -> None:
    error = raised_by(function)
    twin: Any = copy_exception(error)
    assert twin is not error
    assert type(twin) is type(error)
    assert (str(twin), repr(twin), twin.args) == (str(error), repr(error), error.args)
    assert vars(twin) == vars(error)
    for kind, members in OF_BUILTINS.items():
        if isinstance(error, kind):
            assert [getattr(twin, each) for each in members] == [
                getattr(error, each) for each in members
            ]
    assert twin.__traceback__ is error.__traceback__
    for mine, other in ((twin.__cause__, error.__cause__), (twin.__context__, error.__context__)):
        assert (mine is None) is (other is None)
        assert mine is None or mine is not other
    assert twin.__suppress_context__ is error.__suppress_context__
    assert traceback.format_exception(twin) == traceback.format_exception(error)


def test_slots_are_copied_and_unset_slots_stay_unset() -> None:
    twin: Any = copy_exception(Slotted(None))
    assert twin.code is None
    assert not hasattr(twin, "never_set")


def test_a_copy_has_notes_and_attributes_of_its_own() -> None:
    error: Any = ValueError("a")
    error.add_note("first")
    error.detail = "kept"
    twin: Any = copy_exception(error)
    twin.add_note("second")
    twin.detail = "changed"
    twin.more = 1
    assert (error.__notes__, twin.__notes__) == (["first"], ["first", "second"])
    assert vars(error) == {"__notes__": ["first"], "detail": "kept"}


def test_the_parts_of_a_group_are_copied_too() -> None:
    error: Any = Grouped("two", [ValueError(1), ExceptionGroup("one", [ValueError(2)])])
    twin: Any = copy_exception(error)
    assert (type(twin), twin.message, twin.args) == (Grouped, "two", error.args)
    for part, original in zip(twin.exceptions, error.exceptions, strict=True):
        assert part is not original
        assert part.args == original.args
    assert twin.exceptions[1].exceptions[0] is not error.exceptions[1].exceptions[0]


def test_an_error_without_a_copy_is_returned_itself() -> None:
    error = Uncopyable("a")
    assert copy_exception(error) is error


def test_a_compiled_class_with_its_own_state_is_not_copied() -> None:
    pydantic_core = pytest.importorskip("pydantic_core")
    error = pydantic_core.PydanticKnownError("int_type")
    assert copy_exception(error) is error


def test_a_shared_error_is_restored_for_each_caller() -> None:
    with pytest.raises(Uncopyable) as caught:
        uncopyable()
    error = caught.value
    before = traceback.format_exception(error)
    shared = SharedError(error)
    for attempt in range(3):
        with pytest.raises(Uncopyable) as again:
            try:
                raise KeyError(attempt)
            except KeyError as other:
                raise shared.restored() from (other if attempt else None)
        assert again.value is error
    assert traceback.format_exception(shared.restored()) == before


def test_cause_and_context_are_copied_once_each_also_in_a_circle() -> None:
    root, error = KeyError("root"), ValueError("v")
    error.__cause__ = error.__context__ = root
    root.__context__ = error
    twin: Any = copy_exception(error)
    assert twin.__cause__ is twin.__context__ is not root
    assert twin.__cause__.args == ("root",)
    assert twin.__cause__.__context__ is twin
    twin.__cause__.add_note("of one caller")
    assert not hasattr(root, "__notes__")
