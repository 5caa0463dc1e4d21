"""Pickling of batched functions, by name or by value, as the pickler treats plain functions.

`pickle` sends a plain function by name; `cloudpickle` (joblib, Dask, Spark, Ray) sends one of
`__main__` by value. A batched function is therefore sent as two plain functions of its own module,
its carriers. Their names are attributes of the batched function, `embed._carriers.locate`.

Two carriers are needed, because a function may refer to itself: the object must exist before its
content.

1. A carrier sent by name is the receiver's own: `locate` returns the receiver's function.
2. A carrier sent by value is a copy: `locate` returns an empty object, and `describe` its content.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

DOTTED_NAMES: Final = 4
"""First protocol of `pickle` that sends a function by a dotted name."""


class Carriers:
    """Functions by which a batched function is pickled."""

    def __init__(self, thing: Any, function: object) -> None:
        origin = _Origin(thing)

        def locate(kind: type[Any]) -> Any:
            return object.__new__(kind) if origin is None else origin.thing

        def describe() -> object:
            return function

        self._kind = type(thing)
        self.locate, self.describe = locate, describe
        locate.__module__ = describe.__module__ = thing.__module__

    def reduce(self, name: str) -> tuple[Any, ...]:
        """Return the reduced value of the function that its module has as `name`.

        The content travels as state, so that a function may refer to itself.
        """
        self.locate.__qualname__ = f"{name}._carriers.locate"
        self.describe.__qualname__ = f"{name}._carriers.describe"
        return self.locate, (self._kind,), self.describe


class _Origin:
    """Reference to a batched function that is None wherever it is sent."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def importable_name(thing: Any, held_as: str) -> str | None:
    """Return the dotted name by which `thing` is found in its module, None if there is none.

    Tried are the name of the function, the class attribute that it is `held_as`, and the variables
    of the module. A method is the `function` of the attribute of its class.
    """
    module = sys.modules.get(thing.__module__)
    assigned = [name for name, value in vars(module).items() if value is thing] if module else []
    own: str = thing.__qualname__
    for name in (own, held_as, *assigned):
        for path in (name, f"{name}.function"):
            with suppress(AttributeError):
                if attrgetter(path)(module) is thing:
                    return path
    return None
