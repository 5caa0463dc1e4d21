"""Errors of a service that a batch function calls, and errors of a row."""

from __future__ import annotations

import http.client
import math
import pickle
import socket
import urllib.error
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("httpx")

import httpx

from batched._services.errors import is_service_error, retry_after
from batched._services.failures import MOST_FRAMES, RemoteMemoryError, error_text, to_remote
from batched.errors import RemoteError, TimeLimitExceeded, WorkerDied
from batched.offline.retry import Retry
from offline_steps import fail, outcome

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
STAMP = NOW.timestamp()


def http_error(status: int, headers: dict[str, str] | None = None) -> Exception:
    """Return the error of httpx for an answer with that status."""
    request = httpx.Request("POST", "https://api.example/v1")
    response = httpx.Response(status, headers=headers, request=request)
    return httpx.HTTPStatusError("no", request=request, response=response)


def urllib_error(status: int, headers: Any = None) -> Exception:
    return urllib.error.HTTPError("https://api.example", status, "no", headers, None)


class Answer:
    """A response of `requests`, which is false if its status is an error."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.status_code = status
        self.headers = headers or {}

    def __bool__(self) -> bool:
        return self.status_code < 400


def with_attributes(name: str, bases: tuple[type, ...] = (Exception,), **attributes: Any) -> Any:
    """Return an error of a class with that name, as a library that is not installed raises it."""
    return type(name, bases, attributes)(name)


def aws(code: str, status: int, headers: dict[str, str] | None = None) -> Any:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    response = {"Error": {"Code": code}, "ResponseMetadata": metadata}
    return with_attributes("ClientError", response=response)


def grpc(name: str) -> Any:
    base = type("RpcError", (Exception,), {})
    status = SimpleNamespace(name=name)
    return with_attributes("_InactiveRpcError", (base,), code=lambda _: status)


def circle() -> Exception:
    """Return an error that is the cause of its cause."""
    error, cause = ValueError(), KeyError()
    error.__cause__, cause.__cause__ = cause, error
    return error


class Hostile(Exception):
    """An error whose attributes cannot be read."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):  # for pytest
            return super().__getattribute__(name)
        raise RuntimeError(name)


SERVICE = [
    *(ConnectionResetError(), TimeoutError(), socket.gaierror(-2, "Name or service not known")),
    *(http.client.IncompleteRead(b""), urllib_error(503)),
    urllib.error.URLError(ConnectionRefusedError()),
    *(httpx.ConnectError("refused"), http_error(408), http_error(429), http_error(500)),
    with_attributes("ReadTimeout", (type("Timeout", (OSError,), {}),)),  # requests
    with_attributes("HTTPError", (OSError,), response=Answer(503)),  # requests
    with_attributes("APIStatusError", status_code=503),  # openai
    with_attributes("ClientResponseError", status=504),  # aiohttp
    with_attributes("ServiceUnavailable", code=http.HTTPStatus.SERVICE_UNAVAILABLE),  # google
    *(aws("InternalFailure", 500), aws("ThrottlingException", 400), grpc("UNAVAILABLE")),
    with_attributes("Odd", __cause__=with_attributes("Odd", __cause__=http_error(503))),
    ExceptionGroup("two", [ConnectionError(), http_error(429)]),
    RemoteError("APIError: busy", "", is_service=True),
]

OF_A_ROW = [
    *(ValueError("bad row"), FileNotFoundError("no such file"), KeyError("status")),
    *(urllib_error(404), urllib.error.URLError("unknown url type: x")),
    *(httpx.UnsupportedProtocol("x://"), http_error(400), http_error(401), http_error(403)),
    with_attributes("HTTPError", (OSError,), response=Answer(400)),
    with_attributes("ParseError", code=4),  # of XML: no status
    with_attributes("Odd", status=True),
    with_attributes("ConnectionError", status_code=404),  # its status says more than its name
    *(aws("ValidationException", 400), grpc("INVALID_ARGUMENT")),
    with_attributes("Odd", (type("RpcError", (Exception,), {}),), code=lambda: 1),
    *(with_attributes("Odd", __context__=ConnectionError()), circle()),
    ExceptionGroup("two", [ConnectionError(), ValueError()]),
    *(TimeLimitExceeded("fn took longer"), WorkerDied("the process exited")),
    *(RemoteError("ValueError: bad row", ""), MemoryError(), SystemExit(503), KeyboardInterrupt()),
    Hostile(),
]


def test_faults_of_a_service_are_told_from_errors_of_a_row() -> None:
    assert [error for error in SERVICE if not is_service_error(error)] == []
    assert [type(error) for error in OF_A_ROW if is_service_error(error)] == []


def test_retry_names_more_errors() -> None:
    assert Retry(on=(KeyError,)).is_service_fault(KeyError())
    assert not Retry().is_service_fault(KeyError())


RESETS = {
    "x-ratelimit-remaining-requests": "0",
    "x-ratelimit-reset-requests": "1m2s",
    "x-ratelimit-remaining-tokens": "7",
    "x-ratelimit-reset-tokens": "1h2m",
}
NAMED: list[tuple[BaseException, float | None]] = [
    (http_error(429, {"Retry-After": "7"}), 7.0),
    (http_error(503, {"Retry-After": "Thu, 01 Jan 2026 12:00:30 GMT"}), 30.0),
    (http_error(503, {"Retry-After": "Thu, 01 Jan 2026 12:00:30 -0000"}), 30.0),
    (http_error(503, {"Retry-After": "Thu, 01 Jan 2026 11:00:00 GMT"}), 0.0),
    (http_error(429, {"Retry-After": "9", "retry-after-ms": "250"}), 0.25),
    (http_error(429, {"Retry-After": "soon"}), None),
    (http_error(429, {"Retry-After": "-1"}), None),
    (http_error(429, RESETS), 62.0),
    (http_error(429, RESETS | {"x-ratelimit-reset-requests": f"{STAMP + 5:.0f}"}), 5.0),
    (http_error(429, RESETS | {"x-ratelimit-reset-requests": f"{1000 * STAMP + 5000:.0f}"}), 5.0),
    (http_error(429), None),
    (urllib_error(503, {"Retry-After": "0.5"}), 0.5),
    (with_attributes("E", response=Answer(429, {"RETRY-AFTER": "4"})), 4.0),
    (aws("Throttling", 400, {"retry-after": "5"}), 5.0),
    (with_attributes("FloodWait", retry_after=11), 11.0),
    (with_attributes("FloodWait", retry_after=math.inf), None),
    (RemoteError("E", "", True, 2.5), 2.5),
    (Hostile(), None),
]


def test_the_wait_that_a_service_names_is_read_in_each_form() -> None:
    assert [retry_after(error, NOW) for error, _ in NAMED] == [seconds for _, seconds in NAMED]
    past = http_error(503, {"Retry-After": "Thu, 01 Jan 2015 12:00:30 GMT"})
    assert retry_after(past) == 0.0  # a date is compared with the present


def test_a_wrong_retry_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"attempts": 0}, ValueError, "attempts must be at least 1, got 0"),
        ({"on": [ValueError]}, TypeError, "on must be a tuple of exception classes"),
        ({"wait_max": math.nan}, ValueError, "wait_max must be a number of at least 0, got nan"),
    ]
    for setting, kind, message in wrong:
        with pytest.raises(kind, match=message):
            Retry(**setting)


def test_waits_do_not_overflow() -> None:
    assert Retry(wait_initial=1, wait_max=30).wait(10_000, ConnectionError()) == 30.0


def test_an_error_is_described_by_class_message_and_lines_from_the_function_on() -> None:
    def fn(items: list[int]) -> list[int]:
        raise ValueError("bad row")

    (error,) = outcome(fn, [1]).results
    text = error_text(error)
    assert text.error == "ValueError: bad row"
    first, *lines, last = text.traceback.splitlines()
    assert first.startswith("Traceback")
    assert lines[0].endswith("in fn")
    assert last == "ValueError: bad row"
    assert error_text(ValueError()).error == "ValueError"


def test_the_text_of_an_error_that_is_raised_again_and_again_is_bounded() -> None:
    error = ValueError("bad row")

    def fn() -> None:
        raise error

    for _ in range(10 * MOST_FRAMES):
        with pytest.raises(ValueError, match="bad row"):
            fn()
    assert error_text(error).traceback.count("in fn") <= MOST_FRAMES


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def test_an_error_without_a_message_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_text(Mute()).error == "Mute: its message cannot be made: RuntimeError"
    # notes, causes and groups may have code of the user
    monkeypatch.setattr("traceback.format_exception", lambda *_, **__: fail("raise"))
    assert error_text(ValueError("bad row")) == ("ValueError: bad row", "")


def test_an_error_crosses_as_plain_data_and_is_classified_before() -> None:
    class Local(Exception):
        """An error that no other process can import."""

    with pytest.raises(Local) as raised:
        raise Local("busy")
    remote = pickle.loads(pickle.dumps(to_remote(raised.value, (Local,))))
    assert type(remote) is RemoteError
    assert (str(remote), remote.is_service, remote.retry_after) == ("Local: busy", True, None)
    assert 'raise Local("busy")' in remote.lines
    assert error_text(remote) == ("Local: busy", remote.lines)
    busy = to_remote(http_error(429, {"Retry-After": "7"}))
    assert is_service_error(busy)
    assert retry_after(busy) == 7.0
    memory = to_remote(MemoryError("too many"))
    assert type(memory) is RemoteMemoryError
    assert not is_service_error(memory)
    assert type(to_remote(Mute())) is RemoteError
