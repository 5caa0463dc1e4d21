"""Decorated functions of features: their calls take features in place of items.

Only the types differ from `Batched` and `AsyncBatched`. Features may also be passed by keyword.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, Unpack, overload

from .._collate.features.parse import Feature
from .batched import AsyncBatched, Batched, BatchedCallable, P, U

if TYPE_CHECKING:
    from .._runtime.wakers import Future
    from .settings import InferenceSettings

U_co = TypeVar("U_co", covariant=True)

Features = Mapping[str, Feature]
"""Features of a call, by name: arrays or tensors, or lists of them, with one row per item."""

# mypy: disable-error-code="assignment"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false
# pyright: reportIncompatibleVariableOverride=false


class Call(Protocol[U_co, P]):
    """A call with features, as one mapping or by keyword."""

    @overload
    def __call__(self, features: Features, /, *args: P.args, **kwargs: P.kwargs) -> U_co: ...
    @overload
    def __call__(self, /, **features: Feature) -> U_co: ...


class _FeatureCalls(BatchedCallable[Features, U, P]):
    """The calls that threads and coroutines share, with features for items."""

    if TYPE_CHECKING:
        acall: Call[Coroutine[Any, Any, U], P]
        submit: Call[Future[U], P]

        def with_options(self, **settings: Unpack[InferenceSettings]) -> Self: ...


class BatchedInference(_FeatureCalls[U, P], Batched[Features, U, P]):
    """A batched function of features that threads call and wait for."""

    if TYPE_CHECKING:
        __call__: Call[U, P]


class AsyncBatchedInference(_FeatureCalls[U, P], AsyncBatched[Features, U, P]):
    """A batched function of features that coroutines await, on asyncio, uvloop or trio."""

    if TYPE_CHECKING:
        __call__: Call[Coroutine[Any, Any, U], P]
