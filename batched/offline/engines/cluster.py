"""Ray: setting of a run, for a cluster on which functions compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..._installation import needs
from ..checks import check_amount


@dataclass(frozen=True)
class Ray:
    """Setting of `run`: functions compute in actors of a Ray cluster, `workers` of them a step.

    Coroutine functions stay in the driver, on its loop. Needs the extra `ray`, and the same
    versions of Python, Ray and this library on all nodes. The driver joins the cluster at
    `address`, or the cluster that it runs in; without either it starts a cluster on this machine.

    Raises:
        TypeError, ValueError: a setting is of the wrong type or out of its range.
        ImportError: the extra is missing.
    """

    address: str | None = None
    """Address of the cluster, as `ray.init` takes it."""
    num_cpus: float = 1
    """CPUs of each actor, of steps without their own `num_cpus`; may be a part of one."""
    num_gpus: float = 0
    """GPUs of each actor, of steps without their own `num_gpus`."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of each actor, by name."""
    runtime_env: Mapping[str, Any] | None = None
    """Runtime environment of the actors, as Ray takes it: packages, files, variables."""

    def __post_init__(self) -> None:
        amounts = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}
        for name, value in amounts.items():
            check_amount(f"Ray: {name}", value)
        import_ray()


def import_ray() -> Any:
    """Return the module `ray`."""
    with needs("offline.Ray", "ray"):
        import ray
    return ray
