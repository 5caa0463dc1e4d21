"""Libraries with the same purpose, each behind the same interface and in an interpreter of its own.

The module of a peer has some of these functions:

- `for_coroutines(function, batch_size, **settings)`: an async context manager of a coroutine
  function that takes one item;
- `for_threads(function, batch_size, **settings)`: a context manager of a function that threads call
  with one item;
- `serve(port, **settings)`: a server of its own kind, as `serving.py` describes it;
- `answer_all(questions)`: for peers that answer questions only in a process that they start.

The modules of this package run in the interpreters of peers, with `traffic.py`. Only `ours.py`
imports this project.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """One library of the comparison."""

    name: str
    module: str
    driven: str
    """The way it is used, in a sentence."""
    requirement: str = ""
    """Requirement for pip; empty for code of this environment."""
    variants: Mapping[str, Settings] = field(default_factory=lambda: {"": {}})
    """Compared settings, by the names of their rows."""
    threads: bool = False
    """Threads can call it."""
    coroutines: bool = True
    """Coroutines can call it in its own process."""
    starts_slowly: bool = False
    """Quick runs leave it out."""
    served_by: str = "the FastAPI application that all these share, and uvicorn, in one process"
    """The HTTP server, in a phrase."""
    beside: str = ""
    """A further requirement, which limits what the first brings in."""

    @property
    def distribution(self) -> str:
        """Name of the distribution whose version is printed."""
        return self.requirement.partition("==")[0].partition("[")[0]

    @property
    def package(self) -> str:
        """Name in lists of versions; one peer has the name of this project."""
        return "PyPI's batched" if self.distribution == "batched" else self.distribution

    def with_default(self) -> Peer:
        """Return the peer with its first settings only, which are its defaults."""
        return replace(self, variants=dict([next(iter(self.variants.items()))]))

    def labels(self) -> dict[str, Settings]:
        """Return settings by the names of rows."""
        return {
            f"{self.name}, {variant}" if variant else self.name: settings
            for variant, settings in self.variants.items()
        }


OURS = Peer("ours", "ours", "this project, as its README uses it", threads=True)
OURS_BY_LENGTH = replace(
    OURS, driven="this project, told `length=len`", variants={"": {"by_length": True}}
)
BARE = Peer(
    "bare hand-off", "bare",
    "no library: a lock or a future for each call, and one thread or task; it is told how many "
    "callers there are",
    threads=True,
)  # fmt: skip
QUEUE = Peer(
    "ten-line queue", "ten_lines",
    "no library: a queue, and one thread or task that takes up to `batch_size` waiting items",
    threads=True,
)  # fmt: skip
UNBATCHED = Peer(
    "no batching", "unbatched", "the model takes one sentence at a time, in a thread of its own"
)
PEERS = (
    Peer(
        "batched 0.1.5", "batched_on_pypi",
        "another project, PyPI's `batched`: `batched.dynamically` for threads, "
        "`batched.aio.dynamically` for coroutines; "
        "its default timeout is 5 ms",
        "batched==0.1.5", threads=True,
    ),
    Peer(
        "ray serve", "ray_serve",
        "`@serve.batch` in a replica on a local Ray; callers are coroutines in that replica, so no "
        "handle and no proxy is in between",
        "ray[serve]", {"10 ms": {"wait_ms": 10.0}, "5 ms": {"wait_ms": 5.0}}, starts_slowly=True,
        served_by="its own proxy and one replica, processes of a local Ray",
    ),
    Peer(
        "bentoml", "bento",
        "the dispatcher of its adaptive batching, set up as its server does it, with its default "
        "latency limit of 60 s; "
        "it learns how long to wait",
        "bentoml", starts_slowly=True, served_by="its own application, with uvicorn in one process",
    ),
    Peer(
        "async-batcher", "async_batcher_peer", "an `AsyncBatcher`, one batch at a time; its "
                                               "default wait is 10 ms",
        "async-batcher", {"10 ms": {"wait_ms": 10.0}, "5 ms": {"wait_ms": 5.0}},
    ),
    Peer(
        "aiodataloader", "dataloader",
        "a `DataLoader` without cache; it knows no limit to batches at once, so its function holds "
        "a lock, as a model would need it; "
        "batches of one that come at random queue up there",
        "aiodataloader",
    ),
    Peer(
        "litserve", "lit", "its own server with one worker; the default wait is 0 ms", "litserve",
        {"0 ms": {"wait_ms": 0.0}, "5 ms": {"wait_ms": 5.0}}, coroutines=False,
        served_by="its own server, and one worker process",
    ),
    Peer(
        "batchlet", "batchlet_peer", "an `AsyncBatcher`; its default wait is 2 ms", "batchlet",
    ),
    Peer(
        "mosec", "mosec_peer", "its own server with one worker; the wait is 5 ms", "mosec",
        coroutines=False,
        served_by="its own server, written in Rust, and one worker process",
    ),
    Peer(
        "infinity", "infinity", "its engine, which sorts by length, has a model of its own",
        "infinity-emb[server,torch]", coroutines=False, beside="torch==2.13.0",
    ),
)  # fmt: skip


def compared(arguments: Namespace, *, servers: bool = False) -> list[Peer]:
    """Return the peers of a run: libraries that coroutines can call in their own process or, with
    `servers`, all. A quick run takes their defaults, and a check of our bounds takes none.
    """
    if arguments.check:
        return []
    able = [peer for peer in PEERS if peer.coroutines or servers]
    if not arguments.quick:
        return able
    return [peer.with_default() for peer in able if not peer.starts_slowly]


def without(
    arguments: Namespace, *, servers: bool = False, threads: bool = False
) -> dict[str, str]:
    """Return the peers that a run leaves out, with the reasons. With `threads`, peers without an
    interface for threads are among them.
    """
    if arguments.check:
        return {}
    reasons = {}
    for peer in PEERS:
        if not (peer.coroutines or servers):
            reasons[peer.name] = "it batches in its own server only: see http_server.py"
        elif arguments.quick and peer.starts_slowly:
            reasons[peer.name] = "it takes long to start, and this was a quick run"
        elif threads and not peer.threads:
            reasons[f"{peer.name}, threads"] = "it has no interface for threads"
    return reasons
