"""FastAPI and Starlette with the middleware, under a uvicorn in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

import batched
from batched.asgi import BatchedMiddleware
from server.serving import BOUND, served

fastapi: Any = pytest.importorskip("fastapi")
testclient: Any = pytest.importorskip("fastapi.testclient")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
applications: Any = pytest.importorskip("starlette.applications")
middleware: Any = pytest.importorskip("starlette.middleware")
base: Any = pytest.importorskip("starlette.middleware.base")
responses: Any = pytest.importorskip("starlette.responses")
routing: Any = pytest.importorskip("starlette.routing")

Request = Any
"""Starlette's, which may not be there."""

pytestmark = [pytest.mark.anyio, pytest.mark.once]

CHUNK = 50_000
CHUNKS = 60
"""3 MB, of which uvicorn reads 64 KiB at a time."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def starlette(*endpoints: Callable[[Request], Any]) -> Any:
    return applications.Starlette(
        routes=[
            routing.Route(f"/{endpoint.__name__}", endpoint, methods=["GET", "POST"])
            for endpoint in endpoints
        ],
        middleware=[middleware.Middleware(BatchedMiddleware)],
    )


async def test_bodies_and_responses_of_many_parts_arrive_whole() -> None:
    async def double(request: Request) -> Any:
        parts = [part async for part in request.stream()]
        assert len(parts) > 1

        async def twice() -> AsyncIterator[bytes]:
            for part in (*parts, *parts):
                yield part

        return responses.StreamingResponse(twice())

    async def body() -> AsyncIterator[bytes]:
        for number in range(CHUNKS):
            yield number.to_bytes(2, "big") * CHUNK

    async with served(starlette(double)) as client:
        answer = await client.post("/double", content=body())
    assert answer.content == b"".join([part async for part in body()] * 2)


@pytest.mark.parametrize("place", ["around", "inside"])
async def test_other_middleware_may_stand_around_or_inside(place: str) -> None:
    """Starlette runs the inner application in a task, and fails if it sends no response."""
    began, ended = anyio.Event(), anyio.Event()
    errors: list[Exception] = []

    async def wait(request: Request) -> Any:
        began.set()
        await anyio.sleep_forever()
        raise AssertionError

    async def full(request: Request) -> Any:
        raise batched.QueueFull("q")

    async def dispatch(request: Request, call_next: Any) -> Any:
        try:
            return await call_next(request)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            ended.set()

    other = middleware.Middleware(base.BaseHTTPMiddleware, dispatch=dispatch)
    ours = middleware.Middleware(BatchedMiddleware)
    app = starlette(wait, full)
    app.user_middleware = [other, ours] if place == "around" else [ours, other]
    async with served(app) as client:
        waiting = asyncio.create_task(client.get("/wait"))
        with anyio.fail_after(BOUND):
            await began.wait()
            waiting.cancel()
            await ended.wait()
        assert errors == []
        assert (await client.get("/full")).status_code == 503


class Service:
    @batched.dynamically
    def embed(self, text: list[str]) -> list[int]:
        return [len(each) for each in text]

    @batched.aio.dynamically
    async def fetch(self, text: list[str]) -> list[int]:
        return [len(each) for each in text]


@pytest.mark.parametrize("name", ["embed", "fetch"])
def test_a_method_as_a_dependency_can_be_overridden(name: str) -> None:
    service, app = Service(), fastapi.FastAPI()
    depends = fastapi.Depends(getattr(service, name))

    async def endpoint(length: Any = depends) -> Any:
        return length

    app.add_api_route("/", endpoint, methods=["POST"])
    client = testclient.TestClient(app)
    assert client.post("/", json=["four"]).json() == [4]
    app.dependency_overrides[getattr(service, name)] = lambda: "overridden"
    assert client.post("/").json() == "overridden"
