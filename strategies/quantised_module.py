"""Frozen weights in 8 or 4 bits, before capture: a base that adapters are trained on. Needs torch, torchao.

Quantised once, by torchao, on the owner's machine. What a worker holds are plain tensors, and what gives the
weight again are plain ops of the graph, so it needs no torchao:

    int8  W = q s                       one s a row (PerRow, symmetric): 1 byte a weight, 4 a row
    nf4   W = table[q] (c / f + m)      c in 8 bits for 64 weights, f for up to 256 c: 0.52 bytes a weight

As nobody trains these tensors, no micro-batch in flight keeps W for its backward (``atoll.standing``).
Sources: QLoRA (Dettmers 2023, arXiv 2305.14314) for NF4 and its double quantisation; torchao 0.18.
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from math import gcd
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from atoll.errors import UsageError
from strategies.lora_module import FACTOR_A, FACTOR_B

M = TypeVar("M", bound=nn.Module)
Kind = Literal["int8", "nf4"]
NF4_BLOCK = 64  # weights with a scale in common
NF4_SCALES = 256  # scales with a factor in common, at most


def quantise_frozen(module: M, kind: Kind, layers: str = "*") -> M:
    """Store frozen weights of ``module``'s linear layers in 8 or 4 bits, in place, and return ``module``.

    Taken is each weight of an ``nn.Linear`` or GPT-2's ``Conv1D`` that requires no gradient and is neither
    another layer's as well nor an adapter's of peft, in layers whose name matches the shell pattern
    ``layers``. So freeze first, or call ``peft.get_peft_model``, which does. The layer computes with the
    weight that comes back, in the dtype that it had. UsageError where there is none, for an unknown kind,
    without torchao, for weights on ``meta``, and where a weight has no multiple of 64 elements (nf4).
    """
    if kind not in ("int8", "nf4"):
        raise UsageError(f"quantise_frozen: {kind!r} is not a kind; take 'int8' or 'nf4'")
    found = frozen_layers(module, layers)
    if not found:
        raise UsageError(
            f"quantise_frozen: no linear layer that matches {layers!r} has a frozen weight of its own; call "
            "get_peft_model first, or requires_grad_(False) on the base"
        )
    for name, layer, weight in found:
        if weight.is_meta or not weight.is_floating_point():
            raise UsageError(
                f"quantise_frozen: {name}.weight is {weight.dtype} on {weight.device}; load the numbers first"
            )
        if kind == "nf4" and weight.numel() % NF4_BLOCK:
            raise UsageError(
                f"quantise_frozen: {name}.weight has {weight.numel()} elements, no multiple of {NF4_BLOCK}; "
                "take 'int8', or leave it out by layers="
            )
        form = Int8(weight) if kind == "int8" else Nf4(weight)
        parametrize.register_parametrization(layer, "weight", form, unsafe=True)
    return module


def is_quantised(module: nn.Module) -> bool:
    """Return whether some layer of ``module`` holds its weight in parts that others do not read."""
    return any(isinstance(inner, InParts) for inner in module.modules())


def frozen_layers(module: nn.Module, pattern: str) -> list[tuple[str, nn.Module, Tensor]]:
    """Return name, module and weight of each linear layer as ``quantise_frozen`` takes them."""
    owners = Counter(id(held) for inner in module.modules() for held in inner.parameters(recurse=False))
    found = []
    for name, layer in module.named_modules():
        linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
        factor = any(word in f".{name}." for word in (FACTOR_A, FACTOR_B))
        if not linear or factor or parametrize.is_parametrized(layer) or not fnmatchcase(name, pattern):
            continue
        weight = cast("Tensor", layer.weight)
        if not weight.requires_grad and owners[id(weight)] == 1:
            found.append((name, layer, weight))
    return found


class InParts(nn.Module):
    """Frozen weight that is stored as other tensors."""


class Int8(InParts):
    """Weight [r, c] from q [r, c] of int8 and s [r, 1] of float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.dtype = weight.dtype

    def forward(self, q: Tensor, scale: Tensor) -> Tensor:
        """Return the weight."""
        return (q * scale).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and s as torchao finds them."""
        try:
            from torchao.quantization import Int8Tensor, PerRow
        except ImportError as error:
            raise _missing() from error
        with torch.no_grad():
            found = Int8Tensor.from_hp(weight.detach(), PerRow())
        return found.qdata, found.scale


class Nf4(InParts):
    """Weight [r, c] from codes [r c / 2], two in a byte, and the scales of each 64 weights in two levels.

    ``pairs`` [256, 2] is the table of both weights of a byte: one look-up of a value of twice the width. It
    is a constant of the graph, one for all layers.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.dtype, self.shape = weight.dtype, tuple(weight.shape)
        self.wide = torch.float64 if weight.element_size() == 4 else torch.float32
        if weight.element_size() not in (2, 4):
            raise UsageError(f"quantise_frozen: a weight of {weight.dtype}; cast it to float32 or bfloat16")
        self.scales = gcd(weight.numel() // NF4_BLOCK, NF4_SCALES)
        self.pairs = torch.empty(256, 2, dtype=weight.dtype)

    def forward(self, codes: Tensor, scales: Tensor, factor: Tensor, mean: Tensor) -> Tensor:
        """Return the weight."""
        table = self.pairs.to(codes.device).view(self.wide).flatten()
        both = torch.index_select(table, 0, codes.to(torch.int32))
        by_block = (scales.view(-1, self.scales) / factor.unsqueeze(-1)).to(self.dtype).view(-1, 1) + mean
        return (both.view(self.dtype).view(-1, NF4_BLOCK) * by_block).view(self.shape)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return codes, scales, their factors and their mean as torchao finds them."""
        try:
            from torchao.quantization import to_nf4
        except ImportError as error:
            raise _missing() from error
        with torch.no_grad():
            found = to_nf4(weight.detach().contiguous(), NF4_BLOCK, self.scales)
            table = cast("Tensor", found.nf4)
            self.pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1).contiguous()
        parts = found.quantized_data, found.quantized_scalers, found.quantization_factor, found.scaler_mean
        # A factor alone has the stride of the table that it is a column of.
        codes, scales, factor, mean = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return codes, scales, factor, mean


def _missing() -> UsageError:
    return UsageError("quantise_frozen needs torchao on the owner's machine; pip install 'atoll[quantised]'")
