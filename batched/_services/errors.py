"""Errors of a service, and errors of the rows or prompts that it was asked about.

An error of the service says nothing about the rows: the same call may succeed a moment later. So
the call is retried after a wait, and never narrowed down. Any other error counts as an error of a
row. The first rule that applies decides:

1. Classes that the caller names, as `retry=` of a step does, are errors of the service.
2. An attribute `is_service`, which errors of this library have, decides.
3. An HTTP status decides: 408, 429 and all from 500 on mean the service. 401 and 403 mean the row:
   a function that fetches one address per row gets them for single rows. If every row gets them,
   giving up after a few calls costs less than waiting.
4. A gRPC status decides, and so does a code of AWS that means throttling.
5. Names that libraries give to failures of the connection and to timeouts mean the service.
6. An error raised `from` an error of the service is one, too. A group is one if all its parts are.

Classes are recognised by their names, so no library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import inf
from typing import Any, Final

from ..errors import TimeLimitExceeded, WorkerDied

_TRANSIENT_STATUS: Final = {408, 429}
"""HTTP statuses below 500 after which a retry may succeed: request timeout, too many requests."""

_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
"""Seconds of the units in a duration."""

_UNIX_TIME: Final = 1e9
"""Least number that is a moment, not a duration (s)."""

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
    """Return whether the service that the function calls is at fault, not a row.

    `more` are further classes of errors that mean the service.
    """
    try:
        return _is_service_error(error, more, set())
    except Exception:  # raised by the code of the error's class
        return False


def retry_after(error: BaseException, now: datetime | None = None) -> float | None:
    """Return the seconds that the service asks to wait, None if it names no time.

    The headers of the answer are `retry-after-ms`, `Retry-After`, which has seconds or a date, and
    `x-ratelimit-reset-*`, which have durations such as `1m2.5s`, or Unix times: of what is used up,
    the longest.
    """
    try:
        now = now or datetime.now(UTC)
        if (direct := _seconds(_read(error, "retry_after"))) is not None:
            return direct
        headers = {str(name).lower(): value for name, value in _headers(error).items()}
        if (milliseconds := _seconds(headers.get("retry-after-ms"))) is not None:
            return milliseconds / 1000
        asked = headers.get("retry-after")
        if asked is None:
            return _longest_reset(headers, now.timestamp())
        if (seconds := _seconds(asked)) is not None:
            return seconds
        moment = parsedate_to_datetime(str(asked))
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return max(0.0, (moment - now).total_seconds())
    except Exception:  # raised by the code of the error's class, or by a wrong date
        return None


def _longest_reset(headers: Mapping[str, Any], now: float) -> float | None:
    """Return the time from `now` until the limits that are used up are reset (s)."""
    resets = []
    for name, value in headers.items():
        kind = name.removeprefix("x-ratelimit-reset-")
        if kind != name and _seconds(headers.get(f"x-ratelimit-remaining-{kind}")) == 0:
            parts = re.findall(r"([\d.]+)(ms|s|m|h|d|$)", str(value))
            pause = sum(float(count) * _UNITS[unit] for count, unit in parts)
            if pause > _UNIX_TIME:  # of seconds, or of milliseconds
                pause = max(0.0, pause / (1 if pause < 1000 * _UNIX_TIME else 1000) - now)
            resets.append(pause)
    return max(resets, default=None)


def _is_service_error(
    error: BaseException, more: tuple[type[BaseException], ...], seen: set[int]
) -> bool:
    kind = type(error)  # `isinstance` would run code of the class
    seen.add(id(error))
    if issubclass(kind, more):
        return True
    if isinstance(is_service := _read(error, "is_service"), bool):
        return is_service
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
    # URLError of urllib has its cause as `reason`
    causes = [error.__cause__, _read(error, "reason")]
    return any(
        _is_service_error(each, more, seen)
        for each in causes
        if isinstance(each, BaseException) and id(each) not in seen
    )


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that raised `error`."""
    response = _read(error, "response")
    found = [
        *(_read(error, name) for name in ("status_code", "status", "code")),
        *(_read(response, name) for name in ("status_code", "status")),
        _part(_part(response, "ResponseMetadata"), "HTTPStatusCode"),
    ]
    return next((int(each) for each in found if isinstance(each, int) and 100 <= each <= 599), None)


def _aws_code(error: BaseException) -> str:
    """Return the code of an error of AWS."""
    return str(_part(_part(_read(error, "response"), "Error"), "Code"))


def _headers(error: BaseException) -> Mapping[Any, Any]:
    """Return the headers of the answer that raised `error`."""
    response = _read(error, "response")
    found = [
        _read(response, "headers"),
        _read(error, "headers"),
        _part(_part(response, "ResponseMetadata"), "HTTPHeaders"),
    ]
    return next((each for each in found if hasattr(each, "items")), {})


def _read(thing: Any, name: str) -> Any:
    """Return an attribute, None if there is none or reading it fails."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _part(mapping: Any, name: str) -> Any:
    """Return a value of a mapping, None if there is none."""
    return mapping.get(name) if isinstance(mapping, Mapping) else None


def _seconds(value: Any) -> float | None:
    """Return a number, or the number in a text, unless it is no time to wait."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < inf else None
