"""Digest of a stage's gradients: eight bytes that whoever repeats the step on such a machine arrives at, too.

It is made of each gradient's norm and of the sum of its bits as whole numbers: a norm alone is the same of
a gradient whose sign is turned.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from protos.bounds import DIGEST_BYTES

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def norms_and_digest(gradients: Iterable[Tensor | None], device: torch.device) -> tuple[list[float], bytes]:
    """Return the norm of each gradient in float64, None is zero, and the digest of all in this order.

    One transfer from the device.
    """
    norms, sums = [], []
    for gradient in gradients:
        if gradient is None:
            norms.append(torch.zeros((), dtype=torch.float64, device=device))
            sums.append(torch.zeros((), dtype=torch.int64, device=device))
        else:
            norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float64))
            sums.append(gradient.view(_WORDS[gradient.element_size()]).sum(dtype=torch.int64))
    words = torch.cat((torch.stack(norms).view(torch.int64), torch.stack(sums))).tolist() if norms else []
    packed = struct.pack(f"<{len(words)}q", *words)
    digest = hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()
    return list(struct.unpack_from(f"<{len(norms)}d", packed)), digest
