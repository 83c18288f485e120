"""Moments of an optimizer in 8 bits: what a checkpoint holds of them where the job asks for that.

Blocks of 256 with a scale s, the largest magnitude; a code is the square root of what it stands for, so that
small values of a block keep their digits:

    m = s sign(q) (q / 127)^2          q in -127..127
    v = (s (q / 255)^2)^2              q in 0..255, of sqrt(v), s a bfloat16: its square has no rounding

8 bytes a parameter become 2.03. A block's largest value has the largest code, so what was rounded once is
rounded to the same codes and scales again: a state needs no copy of them beside it.
papers/decentralized.md 7; square-root codes after Dettmers 2021 (arXiv 2110.02861).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from atoll.errors import UsageError

BLOCK = 256
LEAST = 1e-18
"""Of sqrt(v): less is 0. Its square would have fewer digits, and any optimizer's eps is far above it."""
SIGNED, SQUARES = "exp_avg", "exp_avg_sq"  # of AdamW
SCALE = ".scale"  # behind the name of what is in codes


def rounded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's state as a checkpoint holds it: moments as codes [n] and their scales."""
    found = dict(state)
    for key, encode in ((SIGNED, round_signed), (SQUARES, round_squares)):
        if key in state:
            found[key], found[key + SCALE] = encode(state[key])
    return found


def restored(stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the state of a parameter of ``shape`` from what ``rounded`` gave; what is not in codes stays
    as it is. UsageError where codes and scales do not fit."""
    found = dict(stored)
    for key, decode, dtype in ((SIGNED, signed, torch.int8), (SQUARES, squares, torch.uint8)):
        scale = found.pop(key + SCALE, None)
        if scale is None:
            continue
        codes = found.get(key)
        n = prod(shape)
        if (
            codes is None
            or codes.dtype is not dtype
            or codes.shape != (n,)
            or scale.shape != (-(-n // BLOCK),)
        ):
            raise UsageError(f"codes of {key} do not fit a parameter of the shape {shape}")
        found[key] = decode(codes, scale.to(torch.float32)).view(shape)
    return found


@torch.no_grad()
def round_in_place(state: Mapping[str, Tensor]) -> None:
    """Have a parameter's moments be what a checkpoint gives back of them."""
    for key, encode, decode in ((SIGNED, round_signed, signed), (SQUARES, round_squares, squares)):
        if key in state:
            state[key].copy_(decode(*encode(state[key])).view_as(state[key]))


def round_signed(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n] of int8 and scales [ceil(n / 256)] of float32."""
    blocks = _padded(m)
    scale = _scale(blocks.abs())
    codes = (blocks.abs() / scale.unsqueeze(1)).sqrt_().mul_(127.0).round_().copysign_(blocks)
    return codes.to(torch.int8).flatten()[: m.numel()].clone(), scale


def signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values [n] that codes stand for."""
    part = _padded(codes) / 127.0
    return (part * part.abs() * scale.unsqueeze(1)).flatten()[: codes.numel()]


def round_squares(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n] of uint8 and scales of what is at least 0; what is positive stays so, from LEAST^2."""
    blocks = _padded(v).sqrt()
    blocks = torch.where(blocks < LEAST, torch.zeros_like(blocks), blocks)
    largest = _scale(blocks)
    above = largest.to(torch.bfloat16)
    higher = torch.nextafter(above, torch.full_like(above, torch.inf))
    above = torch.where(above.float() < largest, higher, above)
    scale = above.float()
    codes = (blocks / scale.unsqueeze(1)).sqrt_().mul_(255.0).round_()
    codes = torch.maximum(codes, (blocks > 0).to(codes.dtype))
    codes = torch.where(blocks == largest.unsqueeze(1), torch.full_like(codes, 255.0), codes)
    return codes.to(torch.uint8).flatten()[: v.numel()].clone(), scale


def squares(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values [n] that codes of ``round_squares`` stand for."""
    part = _padded(codes) / 255.0
    return (part * part * scale.unsqueeze(1)).square_().flatten()[: codes.numel()]


def _scale(magnitudes: Tensor) -> Tensor:
    """Return the largest of each block, 1 where all are 0."""
    largest = magnitudes.amax(dim=1) if len(magnitudes) else magnitudes.new_zeros(0)
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def _padded(values: Tensor) -> Tensor:
    flat = values.detach().to(torch.float32).flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
