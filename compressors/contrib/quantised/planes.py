"""Several small digits in a byte, a plane of the chunk for each place.

Byte j of a chunk of n elements holds the elements j, j + w, j + 2w, ... with w = ceil(n / digits),
as digits of a number in base ``base``; missing ones are 0. Planes lie side by side in memory, so
both ways are a few passes over contiguous bytes.
"""

from __future__ import annotations

import numpy as np

from compressors.packing import Bytes, chunks
from compressors.rates import ceil_div, digit_bytes


class Planes:
    """Packing in one base: 16 takes 2 digits a byte, 3 takes 5 (1.6 bits each)."""

    def __init__(self, base: int) -> None:
        self.base, self.digits = base, 1
        while base ** (self.digits + 1) <= 256:
            self.digits += 1

    @property
    def codes(self) -> int:
        """Bytes from this on are no numbers of so many digits."""
        return int(self.base**self.digits)

    def part(self, chunk: slice) -> slice:
        """Return the bytes of a chunk, one of those that ``packing.chunks`` gives."""
        start = digit_bytes(chunk.start, self.digits)
        return slice(start, start + ceil_div(chunk.stop - chunk.start, self.digits))

    def pack(self, digits: Bytes, out: Bytes) -> None:
        """``digits`` of one chunk, each below ``base``, into ``out`` of its length."""
        planes = list(chunks(digits.size, out.size))
        out[:] = 0
        for plane in reversed(planes):
            np.multiply(out, np.uint8(self.base), out=out)
            some = out[: plane.stop - plane.start]
            np.add(some, digits[plane], out=some)

    def unpack(self, packed: Bytes, out: Bytes) -> None:
        """The digits of one chunk. Bytes of ``codes`` or more give digits of no meaning."""
        rest = packed
        for plane in chunks(out.size, packed.size):
            upper = np.floor_divide(rest, np.uint8(self.base))
            count = plane.stop - plane.start
            np.subtract(rest[:count], upper[:count] * np.uint8(self.base), out=out[plane])
            rest = upper
