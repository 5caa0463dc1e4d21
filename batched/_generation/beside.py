"""Models beside the user's own: the same weights with another generation config."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel


def wrapped(model: Any) -> list[str]:
    """Return the names of models that `model` wraps, as `torch.compile` and adapters do."""
    if isinstance(model, PreTrainedModel):
        return []
    return [name for name, child in model.named_children() if hasattr(child, "generate")]


def innermost(model: Any) -> Any:
    """Return the model of transformers that `model` wraps, or `model` itself."""
    names = wrapped(model)
    return innermost(getattr(model, names[0])) if names else model


def beside(model: Any, config: Any) -> Any:
    """Return a model with the same weights and another generation config."""
    plain = copy.copy(model)
    object.__setattr__(plain, "_modules", dict(model._modules))
    for name in wrapped(model):
        plain._modules[name] = beside(getattr(model, name), config)
    if not wrapped(model):
        plain.generation_config = config
    return plain
