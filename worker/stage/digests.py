"""Digest of a stage's gradients: eight bytes that whoever repeats the step on such a machine arrives at, too.

It is made of each gradient's norm and of the sum of its bits as whole numbers: a norm alone is the same of
a gradient whose sign is turned.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from atoll.messages.from_worker import DIGEST_BYTES

PIECE = 1 << 21
"""Elements that torch copies to twice their size at one time: of a whole table, twice the table."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


Joined = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Norms and sums of bits of what one process has -> those of the whole gradients."""


def norms_and_digest(
    gradients: Iterable[Tensor | None], device: torch.device, joined: Joined | None = None
) -> tuple[list[float], bytes]:
    """Return the norm of each gradient in float64, None is zero, and the digest of all in this order.

    One transfer from the device. ``joined``: where processes have parts of them.
    """
    norms, sums = [], []
    for gradient in gradients:
        if gradient is None:
            norms.append(torch.zeros((), dtype=torch.float64, device=device))
            sums.append(torch.zeros((), dtype=torch.int64, device=device))
        else:
            norms.append(norm(gradient))
            sums.append(_sum_of_bits(gradient))
    words: list[int] = []
    if norms:
        both = torch.stack(norms), torch.stack(sums)
        whole, bits = both if joined is None else joined(*both)
        words = torch.cat((whole.view(torch.int64), bits)).tolist()
    packed = struct.pack(f"<{len(words)}q", *words)
    digest = hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()
    return list(struct.unpack_from(f"<{len(norms)}d", packed)), digest


def norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm in float64, summed in pieces where there are more than ``PIECE`` elements."""
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in _pieces(gradient)]
    found: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return found


def _sum_of_bits(gradient: Tensor) -> Tensor:
    words = gradient.view(_WORDS[gradient.element_size()])
    return torch.stack([piece.sum(dtype=torch.int64) for piece in _pieces(words)]).sum()


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Slices along the longest dimension."""
    if tensor.numel() <= PIECE:
        return (tensor,)
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    return torch.split(tensor, max(1, PIECE * tensor.shape[longest] // tensor.numel()), longest)
