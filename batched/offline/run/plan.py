"""Plan of a run: the columns that steps read, and the settings of their engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..engines.ray import Ray
from ..engines.spec import Spec
from ..step import Step


class Plan:
    """Columns that steps read, and the columns of the source on which these depend."""

    def __init__(self, steps: Sequence[Step], key: str | None) -> None:
        self.steps = steps
        self.key = key
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
        """Columns to be read from the source."""
        key = [self.key] if self.key is not None and self.key not in self.source else []
        return [*key, *self.source]


def spec_of(number: int, step: Step, ray: Ray | None = None) -> Spec:
    """Return the settings of a step for its engine. `ray`: a cluster, if it computes there."""
    if ray is not None:
        ray = replace(
            ray,
            num_cpus=ray.num_cpus if step.num_cpus is None else step.num_cpus,
            num_gpus=ray.num_gpus if step.num_gpus is None else step.num_gpus,
        )
    return Spec(
        step=number,
        name=step.name,
        func=step.fn,
        collator=step.parts.execution.collator,
        args=step.args,
        kwargs=dict(step.kwargs),
        workers=step.workers or 1,
        processes=step.processes,
        ray=ray,
        timeout_s=step.timeout_s,
        retry=step.call_retry,
        isolate_errors=step.isolate_errors,
        models=step.models,
        outputs=step.outputs,
    )
