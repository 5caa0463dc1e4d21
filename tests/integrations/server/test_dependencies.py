"""Batched methods as dependencies of FastAPI: known again wherever they are looked up."""

from __future__ import annotations

from typing import Any

import pytest

import batched

fastapi: Any = pytest.importorskip("fastapi")
testclient: Any = pytest.importorskip("fastapi.testclient")


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


def test_a_method_that_two_parameters_depend_on_is_called_once_for_a_request() -> None:
    service, app = Service(), fastapi.FastAPI()
    depends, again = fastapi.Depends(service.embed), fastapi.Depends(service.embed)

    async def endpoint(one: Any = depends, two: Any = again) -> Any:
        return [one, two]

    app.add_api_route("/", endpoint, methods=["POST"])
    assert testclient.TestClient(app).post("/", json=["four"]).json() == [[4], [4]]
    assert service.embed.stats.calls == 1
