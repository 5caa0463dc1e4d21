"""Reference: an object of a module of the user's, as commands name it, `module:attribute`; and
errors in one line.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import sys
from typing import Any

argument_error = functools.partial(argparse.ArgumentError, None)
"""Error of the command line with a message, about no option in particular."""


def import_attribute(reference: str) -> Any:
    """Object that `module:attribute` names, imported as `python -m` would.

    Raises:
        argparse.ArgumentError: there is no such object, or its module cannot be imported.
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*", reference):
        raise argument_error(f"name the function as module:function, got {reference!r}")
    if reference.partition(":")[0].endswith(".py"):
        raise argument_error(f"name the module without .py: {reference.replace('.py:', ':')}")
    module, _, attributes = reference.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever is wrong with the user's module
        reason = first_line(error) if isinstance(error, ModuleNotFoundError) else describe(error)
        raise argument_error(f"cannot import {module}: {reason}") from error
    at = module
    for name in attributes.split("."):
        try:
            found, at = getattr(found, name), f"{at}.{name}"
        except AttributeError as error:
            raise argument_error(f"{at} has no attribute {name!r}") from error
    return found


def describe(error: BaseException) -> str:
    """Type and first line of an error."""
    return ": ".join(filter(None, (type(error).__name__, first_line(error))))


def first_line(error: BaseException) -> str:
    """First line of what an error says."""
    return str(error).strip().partition("\n")[0]
