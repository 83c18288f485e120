"""The IDX format of MNIST's files: a header of big-endian words, then one array of big-endian numbers.

    2 zero bytes, 1 byte of element type, 1 byte of rank, rank sizes of 4 bytes, the elements

Source: the format's description with the MNIST data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_RANK = 8
MAX_HEADER_BYTES = 4 + 4 * MAX_RANK
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True, slots=True)
class IdxHeader:
    """First bytes of an IDX file; ``dtype`` as stored, big-endian."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        return 4 + 4 * len(self.shape)

    @property
    def data_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


def looks_like_idx(start: bytes) -> bool:
    """Return whether a file that starts with these four bytes or more may be IDX."""
    return len(start) >= 4 and start[:2] == b"\0\0" and start[2] in _TYPES and 1 <= start[3] <= MAX_RANK


def parse_header(start: bytes, what: str) -> IdxHeader:
    """The header in the first bytes of a file; ``what`` names it. UsageError for anything else."""
    if not looks_like_idx(start):
        raise UsageError(
            f"{what} is not an IDX file: it starts with {start[:4].hex(' ') or 'nothing'}, not with two zero "
            f"bytes, a known element type and a rank of 1 to {MAX_RANK}"
        )
    rank = start[3]
    if len(start) < 4 + 4 * rank:
        raise UsageError(f"{what} ends after {len(start)} bytes, inside its IDX header; fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(start, ">u4", rank, 4))
    return IdxHeader(np.dtype(_TYPES[start[2]]), shape)


def parse(data: bytes, what: str) -> NDArray[Any]:
    """The whole array, read-only, in native byte order. UsageError where sizes and bytes differ."""
    header = parse_header(data[:MAX_HEADER_BYTES], what)
    check_length(header, len(data), what)
    flat = np.frombuffer(data, header.dtype, offset=header.header_bytes)
    found: NDArray[Any] = flat.astype(header.dtype.newbyteorder("="), copy=False).reshape(header.shape)
    return found


def check_length(header: IdxHeader, file_bytes: int, what: str) -> None:
    """UsageError when a file of ``file_bytes`` cannot be what its header says."""
    if file_bytes != header.header_bytes + header.data_bytes:
        raise UsageError(
            f"{what} has {file_bytes:,} bytes; its header says {header.shape} of {header.dtype.name}, "
            f"{header.header_bytes + header.data_bytes:,} bytes; fetch it again"
        )
