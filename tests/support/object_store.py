"""An object store that speaks the protocol of S3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

# in a process of its own: pyarrow may wait for the store while it holds the interpreter's lock
SERVER = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

application = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, application, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""


@contextmanager
def object_store() -> Iterator[int]:
    """Start a store, and yield its port."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdin
        assert server.stdout
        yield int(server.stdout.readline())
        server.stdin.close()


def make_bucket(port: int, name: str) -> str:
    """Make a bucket, and return the query of its URIs."""
    with urlopen(Request(f"http://127.0.0.1:{port}/{name}", method="PUT")):
        return f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
