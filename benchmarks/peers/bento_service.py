"""The service of BentoML. BentoML reads annotations as types, so annotations are evaluated in this
module.
"""

import bentoml
import numpy as np

from peers.model import BATCH_SIZE, load


@bentoml.service
class Embedder:
    def __init__(self) -> None:
        self.encode = load()

    @bentoml.api(batchable=True, max_batch_size=BATCH_SIZE, route="/embed")  # type: ignore[untyped-decorator]  # its types are not here
    def embed(self, texts: list[str]) -> np.ndarray:
        return np.asarray(self.encode(texts))
