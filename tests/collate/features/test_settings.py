"""Settings of batch functions of features."""

from __future__ import annotations

from typing import Any

import pytest

import batched


@pytest.mark.parametrize(
    ("settings", "kind", "name"),
    [
        ({"pad_token": 0}, TypeError, "pad_token"),
        ({"pad_token": {"x": "pad"}}, TypeError, "pad_token"),
        ({"pad_token": {1: 0}}, TypeError, "pad_token"),
        ({"pad_token": {}, "pad_tokens": {}}, TypeError, "pad_tokens"),
        ({"padding_side": "middle"}, ValueError, "padding_side"),
        ({"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": 1.5}, TypeError, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": True}, TypeError, "pad_to_multiple_of"),
        ({"unpad": True}, TypeError, "unpad"),
        ({"unpad": "never"}, TypeError, "unpad"),
        ({"unpad": {"x": 1}}, TypeError, "unpad"),
        ({"unpad": {"x": {"1": "ids"}}}, TypeError, "unpad"),
        ({"unpad": {"x": {0: "ids"}}}, ValueError, "unpad"),
        ({"spread_kwargs": 1}, TypeError, "spread_kwargs"),
        ({"device": "nowhere"}, ValueError, "device='nowhere': Expected one of cpu, cuda"),
        ({"output_device": 1.5}, ValueError, "output_device"),
        ({"on_oom": "ignore"}, ValueError, "on_oom"),
        ({"padding": "right"}, TypeError, "padding"),
    ],
)
def test_an_invalid_setting_is_refused_at_decoration(
    settings: dict[str, Any], kind: type[Exception], name: str
) -> None:
    if "device" in name:
        pytest.importorskip("torch")
    for decorator in (batched.inference.dynamically, batched.aio.inference.dynamically):
        with pytest.raises(kind, match=name):
            decorator(**settings)
