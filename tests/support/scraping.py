"""A client that scrapes an ASGI app of metrics in the same process."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def scrape(app: Any, function: str) -> dict[str, float]:
    """Return values by name or, if there is one, by reason: of a function, and without function."""
    return {
        sample.labels.get("reason", sample.name.removeprefix("batched_")): sample.value
        for family in text_string_to_metric_families(asyncio.run(_page(app)))
        for sample in family.samples
        if sample.labels.get("function", function) == function
    }


async def _page(app: Any) -> str:
    parts: list[bytes] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return b"".join(parts).decode()
