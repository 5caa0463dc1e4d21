"""Settings of batch functions of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = str | int | torch.device
else:
    Device = Any

from ..._core.checks import check_whole

PaddingSide = Literal["right", "left"]
Unpad = Literal["auto", False] | Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """Settings of the padding, the call, the cuts and the devices of features.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: a setting is out of its range.
    """

    pad_token: Mapping[str, Any] = field(default_factory=dict)
    """Value that fills short rows, by the name of the feature; 0 for a feature without a name here.
    `pad_tokens` is another spelling.
    """
    padding_side: PaddingSide = "right"
    """Side on which short rows are filled."""
    pad_to_multiple_of: int = 1
    """Divisor of the length of tokens, of features as long as tokens, and of all padded rows."""
    unpad: Unpad = "auto"
    """Rule for cuts of outputs to the caller's own length: learned, none, or declared.

    A declaration has the feature that an axis follows, by the path of the output and the axis.
    """
    spread_kwargs: bool = False
    """True: the function is called `func(**features)`; False: `func(features)`."""
    device: Device | None = None
    """Device of the features that the function gets; None: the device of the callers' features."""
    output_device: Device | None = None
    """Device of the results that callers get; None: the device of the output."""

    def __post_init__(self) -> None:
        pads = self.pad_token
        if not isinstance(pads, Mapping) or not all(
            isinstance(name, str) and isinstance(pad, Number) for name, pad in pads.items()
        ):
            raise TypeError(
                "pad_token must map names of features to the numbers that fill them, as in "
                f"{{'input_ids': 0}}, got {pads!r}"
            )
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"padding_side must be 'right' or 'left', got {self.padding_side!r}")
        check_whole("pad_to_multiple_of", self.pad_to_multiple_of)
        if not isinstance(self.spread_kwargs, bool):
            raise TypeError(f"spread_kwargs must be True or False, got {self.spread_kwargs!r}")
        if self.unpad is not False and self.unpad != "auto":
            self._check_unpad()
        for name in ("device", "output_device"):
            device = getattr(self, name)
            if device is not None:
                import torch

                try:
                    object.__setattr__(self, name, torch.device(device))
                except (RuntimeError, TypeError) as error:
                    raise ValueError(f"{name}={device!r}: {error}") from None

    def _check_unpad(self) -> None:
        unpad: Any = self.unpad
        if not isinstance(unpad, Mapping) or not all(
            isinstance(path, str)
            and isinstance(axes, Mapping)
            and all(type(axis) is int and isinstance(name, str) for axis, name in axes.items())
            for path, axes in unpad.items()
        ):
            raise TypeError(
                "unpad must be 'auto', False, or map paths in the output to axes and the features "
                f"they follow, such as {{'last_hidden_state': {{1: 'input_ids'}}}}, got {unpad!r}"
            )
        if 0 in chain(*unpad.values()):
            raise ValueError("unpad cannot cut axis 0, which has the rows")
