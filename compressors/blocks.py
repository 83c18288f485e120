"""Block quantisers: a scale for each run of neighbours, so that one large value costs only its block."""

from __future__ import annotations

import numpy as np
import torch

from compressors.packing import Floats
from compressors.rates import CHUNK

LEAST = np.float32(2.0**-120)
"""A block whose largest magnitude is below this decodes as zeros: 1 / scale would overflow."""


class BlockScaler:
    """Divides chunks of a tensor by their blocks' scales; one an encoding, it keeps its buffers.

    scale = m / steps, m the block's largest magnitude, so a value over its scale is in
    [-steps, steps] up to rounding (``margin`` lifts the scale by a hair for those who may not
    exceed that). No scale is so large that ``steps`` of it would be infinite.
    A block with an infinity or NaN gets the scale NaN, and decodes as NaN throughout.
    """

    def __init__(self, block: int, steps: int, *, margin: float = 0.0) -> None:
        self.block = block
        self._steps = np.float32(steps / (1.0 + margin))
        self._whole = steps
        self._most = np.nextafter(np.finfo(np.float32).max / np.float32(steps), np.float32(0.0))
        self._scaled = np.empty(CHUNK, np.float32)
        self._work = torch.empty(CHUNK, dtype=torch.float32)

    def scales(self, chunk: Floats) -> Floats:
        """Return a scale per block of this chunk (at most CHUNK elements); the last block may be short."""
        values, work = torch.from_numpy(chunk), self._work[: chunk.size]
        torch.abs(values, out=work)
        largest = np.empty(-(-chunk.size // self.block), np.float32)
        full = chunk.size // self.block
        if full:
            rows = work[: full * self.block].view(full, self.block)
            torch.amax(rows, 1, out=torch.from_numpy(largest[:full]))
        if full < largest.size:
            largest[full] = work[full * self.block :].max()
        largest[largest < LEAST] = 0.0
        largest[~np.isfinite(largest)] = np.nan
        scales: Floats = np.minimum(largest / self._steps, self._most)
        return scales

    def scaled(self, chunk: Floats, scales: Floats, by: float = 1.0) -> Floats:
        """``chunk * by / scale`` in a buffer that the next call overwrites; 0 in blocks whose scale
        is 0 or NaN."""
        out = self._scaled[: chunk.size]
        usable = scales > 0.0
        inverse = np.zeros_like(scales)
        np.divide(np.float32(by), scales, out=inverse, where=usable)
        multiply(chunk, inverse, self.block, out)
        top = scales.max()
        if np.isnan(top):
            np.nan_to_num(out, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        if not top < self._most:
            np.clip(out, -by * self._whole, by * self._whole, out=out)
        return out


def multiply(values: Floats, factors: Floats, block: int, out: Floats) -> None:
    """``out[i] = values[i] * factors[i // block]``; ``out`` may be ``values``."""
    full = values.size // block
    if full:
        rows = torch.from_numpy(values[: full * block]).view(full, block)
        target = torch.from_numpy(out[: full * block]).view(full, block)
        torch.mul(rows, torch.from_numpy(factors[:full]).unsqueeze(1), out=target)
    if full * block < values.size:
        np.multiply(values[full * block :], factors[full], out=out[full * block :])
