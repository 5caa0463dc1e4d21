"""LitServe: only its server forms batches. LitServe reads the annotation of a request as a type, so
annotations are evaluated.
"""

from typing import Any

import litserve

from peers.model import BATCH_SIZE, load


class Embedder(litserve.LitAPI):  # type: ignore[misc]  # its types are not here
    def setup(self, device: str) -> None:  # noqa: ARG002  # it passes this
        self.encode = load()

    def decode_request(self, request: dict[str, Any]) -> str:
        text: str = request["texts"][0]
        return text

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def predict(self, texts: list[str]) -> Any:
        return self.encode(texts)

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> list[list[float]]:
        return [output.tolist()]


def serve(port: int, *, wait_ms: float) -> None:
    api = Embedder(max_batch_size=BATCH_SIZE, batch_timeout=wait_ms / 1e3, api_path="/embed")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")
