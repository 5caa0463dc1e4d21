"""Servers of embeddings.

Run: python -m peers.serving MODULE PORT SETTINGS

SETTINGS is a JSON object. Every server answers `POST /embed`, with the body `{"texts": [one
sentence]}`, by a JSON list with one vector, until it is killed.
"""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    module, port, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    peer = importlib.import_module(f"peers.{module}")
    if hasattr(peer, "serve"):
        peer.serve(port, **settings)
    else:
        import uvicorn

        from peers.app import app

        uvicorn.run(app(peer, settings), port=port, log_level="warning")


if __name__ == "__main__":
    main()
