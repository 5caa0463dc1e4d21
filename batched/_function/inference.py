"""Decorated functions of features: their calls take features in place of items.

Only the types differ from `Batched` and `AsyncBatched`. Features may also be passed by keyword.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .._collate.features.parse import Feature
from .batched import AsyncBatched, Batched, BatchedCallable, P

if TYPE_CHECKING:
    from typing import Self, Unpack

    from .._runtime.wakers import Future
    from .settings import InferenceSettings

U = TypeVar("U")

Features = Mapping[str, Feature]
"""Features of a call, by name: arrays or tensors, or lists of them, with one row per item."""


class _FeatureCalls(BatchedCallable[Features, U, P]):
    """The calls that threads and coroutines share, with features for items."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]  # features for items
        async def acall(self, features: Features, /, *args: P.args, **kwargs: P.kwargs) -> U: ...
        @overload
        async def acall(self, /, **features: Feature) -> U: ...
        async def acall(self, features: Any = ..., /, *args: Any, **kwargs: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

        @overload  # type: ignore[override]  # features for items
        def submit(self, features: Features, /, *args: P.args, **kwargs: P.kwargs) -> Future[U]: ...
        @overload
        def submit(self, /, **features: Feature) -> Future[U]: ...
        def submit(self, features: Any = ..., /, *args: Any, **kwargs: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

        def with_options(self, **settings: Unpack[InferenceSettings]) -> Self: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class BatchedInference(_FeatureCalls[U, P], Batched[Features, U, P]):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A batched function of features that threads call and wait for."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]  # features for items
        def __call__(self, features: Features, /, *args: P.args, **kwargs: P.kwargs) -> U: ...
        @overload
        def __call__(self, /, **features: Feature) -> U: ...
        def __call__(self, features: Any = ..., /, *args: Any, **kwargs: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class AsyncBatchedInference(_FeatureCalls[U, P], AsyncBatched[Features, U, P]):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A batched function of features that coroutines await, on asyncio, uvloop or trio."""

    if TYPE_CHECKING:
        # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
        __call__ = _FeatureCalls[U, P].acall  # type: ignore[assignment]  # features for items
