"""Moments of an optimizer in 8 bits: what a checkpoint holds of them where the job asks for that.

Blocks of 256 with a scale s, the largest magnitude; a code is the square root of what it stands for, so that
small values of a block keep their digits:

    m = s sign(q) (q / 127)^2          q in -127..127
    v = (s (q / 255)^2)^2              q in 0..255, of sqrt(v); 0 only for what is 0

8 bytes a parameter become 2.03. papers/decentralized.md 7; design after Dettmers 2021 (arXiv 2110.02861).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def round_signed(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n] of int8 and scales [ceil(n / 256)] of float32."""
    blocks, scale = _blocks(m)
    codes = (blocks.abs() / scale.unsqueeze(1)).sqrt_().mul_(127.0).round_().copysign_(blocks)
    return codes.to(torch.int8).flatten()[: m.numel()].clone(), scale


def signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values [n] that codes stand for."""
    part = _padded(codes.to(torch.float32)) / 127.0
    return (part * part.abs() * scale.unsqueeze(1)).flatten()[: codes.numel()]


def round_squares(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n] of uint8 and scales of what is at least 0; what is positive stays so."""
    blocks, scale = _blocks(v.sqrt())
    codes = (blocks / scale.unsqueeze(1)).sqrt_().mul_(255.0).round_()
    codes = torch.maximum(codes, (blocks > 0).to(codes.dtype))
    return codes.to(torch.uint8).flatten()[: v.numel()].clone(), scale


def squares(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values [n] that codes of ``round_squares`` stand for."""
    part = _padded(codes.to(torch.float32)) / 255.0
    return (part * part * scale.unsqueeze(1)).square_().flatten()[: codes.numel()]


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _padded(values.detach().to(torch.float32).flatten())
    largest = blocks.abs().amax(dim=1) if len(blocks) else blocks.new_zeros(0)
    return blocks, torch.where(largest > 0, largest, torch.ones_like(largest))


def _padded(flat: Tensor) -> Tensor:
    lacking = -flat.numel() % BLOCK
    return torch.nn.functional.pad(flat, (0, lacking)).view(-1, BLOCK)
