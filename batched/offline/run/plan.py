"""Plan of a run: the columns that are read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..step import Step


class Plan:
    """Columns that steps read, and the columns of the source on which these depend.

    `keep` are the columns of the source that the result has; None: all.
    """

    def __init__(self, steps: Sequence[Step], key: str | None, keep: Sequence[str] | None) -> None:
        self.steps = steps
        self.key = key
        self.keep = keep
        made: dict[str, tuple[str, ...]] = {}  # source columns behind the columns of steps
        self.depends: list[tuple[str, ...]] = []  # source columns, for each step
        for step in steps:
            behind = chain.from_iterable(made.get(name, (name,)) for name in step.inputs)
            self.depends.append(tuple(dict.fromkeys(behind)))
            made.update(dict.fromkeys(step.outputs, self.depends[-1]))
        self.source = list(dict.fromkeys(chain.from_iterable(self.depends)))
        """Columns of the source that steps read."""
        read = {name for step in steps for name in step.inputs}
        self.needed = [[name for name in step.outputs if name in read] for step in steps]
        """Columns of each step that other steps read."""

    @property
    def columns(self) -> list[str]:
        """Columns of the source that the run needs."""
        key = [self.key] if self.key is not None and self.key not in self.source else []
        return [*key, *self.source]
