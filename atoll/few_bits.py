"""Saved activations in 8 or 4 bits: blocks of 32 values, each with its least value and a step.

code = round((x - low) / step) in [0, 2^bits - 1],  x' = low + code * step,  |x - x'| <= step / 2
step <= (max - min + |min| / 128) / (2^bits - 1) * 65 / 64, by rounding ``low`` down and ``step`` up in bf16

To nearest, without a draw: what comes back is a function of the values alone. So a tensor that two ops save
is packed once, and the bits are the same wherever a graph is cut. A block with a NaN comes back as NaN, one
with an infinity as values that are not finite.
Source: AGoQ (blocks, bits of what is saved between forward and backward).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from atoll.job import FEW_BITS_BLOCK, packed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

BLOCK = FEW_BITS_BLOCK
LEAST = 1024
"""Elements of a tensor that is worth packing."""
STATISTIC = 16
"""Times fewer elements than the op's largest argument: a mean or a log-sum-exp, which stays exact."""
PIECE = 1 << 18
"""Elements packed at one time: what that makes stays in a core's cache."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Packed(NamedTuple):
    """Bytes of a tensor: the codes of its blocks, then low and step of each."""

    data: Tensor  # uint8
    bits: int
    elements: int


def takes(tensor: Tensor, largest: int, leaves: Iterable[tuple[int, torch.dtype]]) -> bool:
    """Return whether a tensor that an op saves is packed: an activation of some size.

    ``largest``: elements of the op's largest argument; ``leaves``: elements and type of the weights that it
    reads, of which autocast saves a copy in another type.
    """
    elements = tensor.numel()
    return (
        tensor.dtype in FLOATS
        and elements >= LEAST
        and elements * STATISTIC > largest
        and not any(elements == n and dtype is not tensor.dtype for n, dtype in leaves)
    )


def pack(tensor: Tensor, bits: int) -> Packed:
    """Return a floating-point tensor in ``bits`` of 8 or 4 a value, in its logical order."""
    flat = tensor.detach().reshape(-1)
    elements, blocks = flat.numel(), -(-flat.numel() // BLOCK)
    data = torch.empty(int(packed_bytes(blocks * BLOCK, bits)), dtype=torch.uint8, device=tensor.device)
    codes = data[: blocks * BLOCK * bits // 8].view(blocks, -1)
    scales = data[codes.numel() :].view(torch.bfloat16).view(blocks, 2)
    for begin in range(0, blocks, PIECE // BLOCK):
        end = min(blocks, begin + PIECE // BLOCK)
        values = flat[begin * BLOCK : end * BLOCK].to(torch.float32)
        if len(values) < (end - begin) * BLOCK:
            values = torch.cat([values, values[-1:].expand((end - begin) * BLOCK - len(values))])
        _pack_into(codes[begin:end], scales[begin:end], values.view(-1, BLOCK), bits)
    return Packed(data, bits, elements)


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Return the values that were packed, flat."""
    bits, blocks = packed.bits, -(-packed.elements // BLOCK)
    codes = packed.data[: blocks * BLOCK * bits // 8].view(blocks, -1)
    scales = packed.data[codes.numel() :].view(torch.bfloat16).view(blocks, 2)
    found = torch.empty(blocks, BLOCK, dtype=dtype, device=packed.data.device)
    for begin in range(0, blocks, PIECE // BLOCK):
        some = slice(begin, begin + PIECE // BLOCK)
        low, step = scales[some].float().unbind(1)
        code = codes[some]
        if bits == 4:
            code = torch.cat([code & 15, code >> 4], dim=1)
        found[some] = code.float().mul_(step[:, None]).add_(low[:, None])
    return found.view(-1)[: packed.elements]


def _pack_into(codes: Tensor, scales: Tensor, values: Tensor, bits: int) -> None:
    """Write the codes of ``values`` [blocks, BLOCK], and low and step of each block."""
    levels = 2**bits - 1
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    # Rounding to bf16 is off by 2^-9 at most, so what is stored is never above the least value ...
    low = (low - low.abs() * 2.0**-8).bfloat16().float()
    # ... and so many steps reach the largest one.
    step = ((high - low) * ((1.0 + 2.0**-7) / levels)).clamp_(min=torch.finfo(torch.float32).tiny)
    step = step.bfloat16().float()
    scales[:, 0:1], scales[:, 1:2] = low, step
    found = (values - low).div_(step).round_().clamp_(0, levels).to(torch.uint8)
    if bits == 4:
        found = found[:, : BLOCK // 2] | (found[:, BLOCK // 2 :] << 4)
    codes.copy_(found)
