"""Ops that run another way than torch would run them, because torch's own way is wrong.

Half-precision convolutions with a dilation: oneDNN's kernels for AMX leave a part of the result as memory was
(torch 2.13: a conv2d of ones in bfloat16 with stride (2, 3), padding (1, 0) and dilation 2 gives 4e14 for 30,
by what lay there before). They are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from atoll.ops import schema

_CONVOLUTIONS = frozenset(
    ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
)
_HALVES = (torch.bfloat16, torch.float16)


def detoured(target: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, or what runs in its place."""
    if target.split(".")[1] not in _CONVOLUTIONS:
        return call
    names = [argument.name for argument in schema(target).arguments]

    @wraps(call)
    def convolved(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        half = _half_of(given["input"])
        if half is None or not _dilated(given.get("dilation", 1)):
            return call(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            exact = {n: v.to(half).float() if isinstance(v, Tensor) else v for n, v in given.items()}
            return call(**exact).to(half)

    return convolved


def _half_of(value: Tensor) -> torch.dtype | None:
    """The half precision that a convolution of ``value`` on the CPU is computed in, if it is."""
    if value.device.type != "cpu":
        return None
    if value.dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return value.dtype if value.dtype in _HALVES else None


def _dilated(dilation: Any) -> bool:
    return any(d != 1 for d in (dilation if isinstance(dilation, list | tuple) else (dilation,)))
