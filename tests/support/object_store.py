"""An object store that speaks the protocol of S3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

from pyarrow import fs

SECRET = "hidden/secret"

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
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout
        yield int(server.stdout.readline())


class Bucket:
    """An empty bucket, new in a store."""

    def __init__(self, port: int, name: str) -> None:
        self.address = f"http://127.0.0.1:{port}/{name}"
        self.name = name
        self._query = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        with urlopen(Request(self.address, method="PUT")):
            self.filesystem, _ = fs.FileSystem.from_uri(self.uri("x"))

    def uri(self, path: str) -> str:
        return f"s3://key:{SECRET.replace('/', '%2F')}@{self.name}/{path}?{self._query}"

    def content(self) -> dict[str, bytes]:
        found = self.filesystem.get_file_info(fs.FileSelector(self.name, recursive=True))
        return {info.path.partition("/")[2]: self.read(info.path) for info in found if info.is_file}

    def read(self, path: str) -> bytes:
        with self.filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())

    def put(self, path: str, content: bytes) -> None:
        there = f"{self.name}/{path}"
        with self.filesystem.open_output_stream(there, compression=None) as stream:
            stream.write(content)
