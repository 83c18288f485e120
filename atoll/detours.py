"""Ops that run another way than torch would run them, because torch's own way is wrong.

Half-precision convolutions on a CPU: oneDNN's kernels for AMX leave parts of some results as memory was.
In torch 2.13 a conv2d of ones in bfloat16 with stride (2, 3), padding (1, 0) and dilation 2 gives 4e14 for
30; others differ with stride 7 and groups of 5 channels. They are computed in float32 and rounded once.

Products of groups of rows, each with its own matrix (experts of a mixture): torch's kernel leaves rows behind
the last group as memory was, and takes offsets without looking.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from atoll.ops import GROUPED, schema

_CONVOLUTIONS = frozenset(
    ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
)
_HALVES = (torch.bfloat16, torch.float16)


def detoured(target: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, or what runs in its place."""
    if target == GROUPED:
        return _grouped_mm
    if target.split(".")[1] not in _CONVOLUTIONS:
        return call
    first = schema(target).arguments[0].name

    @wraps(call)
    def convolved(*args: Any, **kwargs: Any) -> Any:
        half = _half_of(args[0] if args else kwargs[first])
        if half is None:
            return call(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            exact = [_exact(value, half) for value in args]
            named = {name: _exact(value, half) for name, value in kwargs.items()}
            return call(*exact, **named).to(half)

    return convolved


def _grouped_mm(self: Tensor, mat2: Tensor, offs: Tensor, *_: None, **__: None) -> Tensor:
    return grouped_mm(self, mat2, offs)


def grouped_mm(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Return [S, N]: ``rows`` [S, K] up to offs[0] times matrices[0] [K, N], those up to offs[1] times
    matrices[1], and so on; zeros behind the last group. ``offs`` [groups] ascend from 0 to at most S."""
    with torch.autocast(rows.device.type, enabled=False):
        if isinstance(offs, FakeTensor):  # shapes and FLOPs alone
            return torch.mm(rows, matrices[0])
        ends = [0, *offs.tolist(), len(rows)]
        *groups, rest = torch.split(rows, [b - a for a, b in pairwise(ends)])
        products = [torch.mm(group, matrix) for group, matrix in zip(groups, matrices.unbind(), strict=True)]
        return torch.cat([*products, rest.new_zeros((len(rest), matrices.shape[2]))])


def _half_of(value: Tensor) -> torch.dtype | None:
    """The half precision that a convolution of ``value`` on the CPU is computed in, if it is."""
    if value.device.type != "cpu":
        return None
    if value.dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return value.dtype if value.dtype in _HALVES else None


def _exact(value: Any, half: torch.dtype) -> Any:
    """A tensor rounded to ``half``, in float32."""
    return value.to(half).float() if isinstance(value, Tensor) else value
