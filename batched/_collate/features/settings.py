"""Settings of batch functions of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        object.__setattr__(self, "pad_token", dict(pads))
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"padding_side must be 'right' or 'left', got {self.padding_side!r}")
        check_whole("pad_to_multiple_of", self.pad_to_multiple_of)
        if not isinstance(self.spread_kwargs, bool):
            raise TypeError(f"spread_kwargs must be True or False, got {self.spread_kwargs!r}")
        self._check_unpad()
        for name in ("device", "output_device"):
            _check_device(name, getattr(self, name))

    def round_up(self, width: int) -> int:
        """Return `width` rounded up to a multiple of `pad_to_multiple_of`."""
        return -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _check_unpad(self) -> None:
        unpad = self.unpad
        if unpad is False or unpad == "auto":
            return
        allowed = (
            "unpad must be 'auto', False, or map paths in the output to axes and the features they "
            "follow"
        )
        if not isinstance(unpad, Mapping):
            raise TypeError(f"{allowed}, got {unpad!r}")
        for path, axes in unpad.items():
            if not (isinstance(path, str) and isinstance(axes, Mapping)) or not all(
                isinstance(axis, int) and not isinstance(axis, bool) and isinstance(feature, str)
                for axis, feature in axes.items()
            ):
                raise TypeError(
                    f"{allowed}, such as {{'last_hidden_state': {{1: 'input_ids'}}}}, "
                    f"got {path!r}: {axes!r}"
                )
            if 0 in axes:
                raise ValueError(f"unpad cannot cut axis 0 of {path!r}, which has the rows")
        object.__setattr__(self, "unpad", {path: dict(axes) for path, axes in unpad.items()})


def _check_device(name: str, device: Device | None) -> None:
    if device is None:
        return
    try:
        import torch
    except ModuleNotFoundError:
        raise ValueError(f"{name}={device!r} needs torch, which is not installed") from None
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a device of torch, got {device!r}: {str(error).splitlines()[0]}"
        ) from None
    # a look for a device itself would break forks
    built = {"cuda": torch.backends.cuda, "mps": torch.backends.mps}.get(kind)
    if built is not None and not built.is_built():
        raise ValueError(
            f"{name}={device!r}, but this build of torch, {torch.__version__}, "
            f"has no {kind.upper()}"
        )
