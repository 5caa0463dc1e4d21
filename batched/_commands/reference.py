"""Objects of a user's modules, as commands name them (`module:attribute`), and errors as text."""

from __future__ import annotations

import argparse
import functools
import os
import pkgutil
import re
import sys
from typing import Any, Final

from ..errors import BatchedError

argument_error = functools.partial(argparse.ArgumentError, None)
"""Error of the command line with a message, about no option in particular."""

_ARGUMENT: Final = re.compile(r"\b(on_mismatch|overwrite|progress)=(True|'(\w+)'|(PATH))?")


def import_attribute(reference: str) -> Any:
    """Return the object that `module:attribute` names, imported as `python -m` would.

    Raises:
        argparse.ArgumentError: the object does not exist, or its module cannot be imported.
    """
    module, colon, _ = reference.partition(":")
    if not colon or module.endswith(".py") or not module.replace(".", "_").isidentifier():
        raise argument_error(f"name the function as module:function, got {reference!r}")
    sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(reference)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise argument_error(f"cannot import {reference}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return the type and the first line of an error; of this library's errors the line alone.

    The line names options of the command in place of arguments of functions.
    """
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, BatchedError):
        return _ARGUMENT.sub(_option, line)
    return ": ".join(filter(None, (type(error).__name__, line)))


def _option(argument: re.Match[str]) -> str:
    name, _, *values = argument.groups("")
    return " ".join(filter(None, (f"--{name.replace('_', '-')}", *values)))
