"""Plan of a run: the columns that are read."""

from __future__ import annotations

from collections.abc import Sequence

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
        self.source: list[str] = []  # columns of the source that steps read
        for step in steps:
            behind: dict[str, None] = {}
            for name in step.inputs:
                behind.update(dict.fromkeys(made.get(name, (name,))))
                if name not in made and name not in self.source:
                    self.source.append(name)
            self.depends.append(tuple(behind))
            made.update(dict.fromkeys(step.outputs, self.depends[-1]))
        # for each step, its columns that a later step reads
        self.needed = [
            tuple(
                name
                for name in step.outputs
                if any(name in later.inputs for later in steps[number + 1 :])
            )
            for number, step in enumerate(steps)
        ]

    @property
    def columns(self) -> list[str]:
        """Columns of the source that the run needs."""
        key = [self.key] if self.key is not None and self.key not in self.source else []
        return [*key, *self.source]
