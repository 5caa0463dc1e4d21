"""Errors of a service told from those of what it was asked: is the service at fault, or a row?

An error of the service says nothing about the rows: the same call may succeed a moment later. It is
tried again after a wait, and never narrowed down. Any other error is taken for one of the rows. The
rules, by the first that applies:

1. What the caller names, as `retry=` of a step does, is the service's.
2. What has an attribute `is_service`, as errors of this library have, says so itself.
3. An HTTP status decides: 408, 429 and from 500 on are the service's, all others are not. So are
   401 and 403 not: a function that fetches an address per row gets them for single rows, and where
   they come for every row, a batch that is given up after a few calls costs less than waiting.
4. So does a gRPC status, and the code of an AWS error that means throttling.
5. What is called as libraries call failures of the connection and timeouts is the service's.
6. What was raised explicitly `from` such an error is, too, and a group of nothing but such errors.

Classes are known by their names, so no library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, Final

from ..errors import TimeLimitExceeded, WorkerDied

_TRANSIENT_STATUS: Final = {408, 429}
"""HTTP statuses below 500 that another try may mend: request timeout, too many requests."""

_TRANSIENT_GRPC: Final = {"ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}

_THROTTLING: Final = re.compile(
    # codes of botocore's standard retry mode, many of which come with status 400
    "Throttl|TooManyRequests|RequestLimitExceeded|SlowDown|ThroughputExceeded|RequestTimeout"
)

_TRANSIENT_NAMES: Final = {
    *("ConnectionError", "TimeoutError", "gaierror"),  # builtin, and of many libraries
    *("IncompleteRead", "BadStatusLine", "SSLEOFError"),  # http.client, ssl
    *("NetworkError", "RemoteProtocolError", "ProxyError", "TimeoutException"),  # httpx
    *("Timeout", "ChunkedEncodingError"),  # requests
    *("MaxRetryError", "ProtocolError", "ReadTimeoutError", "ConnectTimeoutError"),  # urllib3
    *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
    *("APIConnectionError", "APITimeoutError", "RateLimitError"),  # openai, anthropic
    "HTTPClientError",  # botocore
    "ConnectionClosedError",  # botocore, websockets
}


def is_service_error(error: BaseException, more: tuple[type[BaseException], ...] = ()) -> bool:
    """Test of an error: the service that the function calls is at fault, not a row. So it is for
    connections, timeouts, HTTP 408, 429 and from 500 on, and `more` classes of errors.
    """
    try:
        return _is_service_error(error, more, set())
    except Exception:  # of a class that has code of its own
        return False


def retry_after(error: BaseException, now: datetime | None = None) -> float | None:
    """Seconds that the service asks to wait, from the headers of its answer: `Retry-After`, in
    seconds or as a date, or `retry-after-ms`. None if it does not say.
    """
    try:
        direct = _read(error, "retry_after")
        headers = {str(name).lower(): value for name, value in _headers(error).items()}
        if _is_seconds(direct):
            return float(direct)
        milliseconds = _seconds(headers.get("retry-after-ms"))
        if milliseconds is not None:
            return milliseconds / 1000
        asked = headers.get("retry-after")
        seconds = _seconds(asked)
        if seconds is not None or asked is None:
            return seconds
        moment = parsedate_to_datetime(str(asked))
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
    except Exception:  # of the error's class, or no date
        return None


def _is_service_error(
    error: BaseException, more: tuple[type[BaseException], ...], seen: set[int]
) -> bool:
    kind = type(error)  # `isinstance` would ask it for its `__class__`
    seen.add(id(error))
    if issubclass(kind, more):
        return True
    if isinstance(said := _read(error, "is_service"), bool):
        return said
    if not issubclass(kind, Exception) or issubclass(kind, TimeLimitExceeded | WorkerDied):
        return False
    if issubclass(kind, ExceptionGroup):
        parts: tuple[BaseException, ...] = _read(error, "exceptions")
        return all(_is_service_error(part, more, seen) for part in parts)
    names = {each.__name__ for each in kind.__mro__}
    if "RpcError" in names and callable(code := _read(error, "code")):
        return getattr(code(), "name", None) in _TRANSIENT_GRPC
    if (status := _status(error)) is not None:
        return (
            status in _TRANSIENT_STATUS
            or status >= 500
            or _THROTTLING.search(_aws_code(error)) is not None
        )
    if names & _TRANSIENT_NAMES:
        return True
    # of urllib's URLError, the reason says what happened
    causes = [error.__cause__, _read(error, "reason")]
    return any(
        _is_service_error(each, more, seen)
        for each in causes
        if isinstance(each, BaseException) and id(each) not in seen
    )


def _status(error: BaseException) -> int | None:
    """HTTP status of the answer that `error` tells of."""
    response = _read(error, "response")
    metadata = response.get("ResponseMetadata") if isinstance(response, Mapping) else None
    found = [
        *(_read(error, name) for name in ("status_code", "status", "code")),
        *(_read(response, name) for name in ("status_code", "status")),
        metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None,
    ]
    return next((int(each) for each in found if isinstance(each, int) and 100 <= each <= 599), None)


def _aws_code(error: BaseException) -> str:
    response = _read(error, "response")
    said = response.get("Error") if isinstance(response, Mapping) else None
    return str(said.get("Code")) if isinstance(said, Mapping) else ""


def _headers(error: BaseException) -> Mapping[Any, Any]:
    response = _read(error, "response")
    metadata = response.get("ResponseMetadata") if isinstance(response, Mapping) else None
    found = [
        _read(response, "headers"),
        _read(error, "headers"),
        metadata.get("HTTPHeaders") if isinstance(metadata, Mapping) else None,
    ]
    return next((each for each in found if hasattr(each, "items")), {})


def _read(thing: Any, name: str) -> Any:
    """Attribute of `thing`; None if there is none, or if it cannot be had."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _seconds(text: Any) -> float | None:
    """Number in the value of a header, unless that is another kind of text."""
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return number if _is_seconds(number) else None


def _is_seconds(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and isfinite(value)
        and value >= 0
    )
