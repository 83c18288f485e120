"""Floats as planes of bytes: what is noise apart from what repeats.

The upper 16 bits of a float (all of fp16 and bf16) are rotated left by one. That leaves the exponent
alone in the high byte, with three mantissa bits in fp16, and the sign beside the mantissa in the low
one. The lower half of fp32 is mantissa and stays as it is. Other dtypes are one plane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compressors.packing import Bytes, chunks

Plane = NDArray[np.unsignedinteger]
_HALF: tuple[type[np.unsignedinteger], ...] = (np.uint8, np.uint8)
_WORD: tuple[type[np.unsignedinteger], ...] = (np.uint16, np.uint8, np.uint8)
KINDS = {"float32": _WORD, "complex64": _WORD, "bfloat16": _HALF, "float16": _HALF}
"""Lowest plane first, so that each stays aligned when they follow one another."""
BLOCK = 1 << 16
"""Elements split at a time: temporaries stay in the cache."""


def kinds(dtype: str) -> tuple[type[np.unsignedinteger], ...]:
    """The element type of each plane of a dtype."""
    return KINDS.get(dtype, (np.uint8,))


def plane_bytes(dtype: str, total: int) -> list[int]:
    """Bytes of each plane of ``total`` bytes of that dtype."""
    widths = [np.dtype(kind).itemsize for kind in kinds(dtype)]
    return [total // sum(widths) * width for width in widths]


def split(data: Bytes, dtype: str, targets: Sequence[Plane | None]) -> Iterator[list[Plane]]:
    """Block by block the planes of ``data``: parts of ``targets`` where given, else buffers that the
    next block overwrites."""
    if dtype not in KINDS:
        yield [data]
        return
    words = len(kinds(dtype)) == 3
    elements: Plane = data.view(np.uint32 if words else np.uint16)
    size = min(BLOCK, len(elements))
    buffers: list[Plane] = [np.empty(size, kind) for kind in kinds(dtype)]
    wide, upper, shifted = np.empty(size, np.uint32), np.empty(size, np.uint16), np.empty(size, np.uint16)
    for part in chunks(len(elements), BLOCK):
        block, n = elements[part], part.stop - part.start
        planes = [
            buffer[:n] if target is None else target[part]
            for buffer, target in zip(buffers, targets, strict=True)
        ]
        top, spare = upper[:n], shifted[:n]
        if words:
            np.copyto(planes[0], block, casting="unsafe")
            np.copyto(top, np.right_shift(block, 16, out=wide[:n]), casting="unsafe")
            block = top
        np.right_shift(block, 15, out=spare)
        np.bitwise_or(np.left_shift(block, 1, out=top), spare, out=top)
        np.copyto(planes[-2], top, casting="unsafe")
        np.copyto(planes[-1], np.right_shift(top, 8, out=spare), casting="unsafe")
        yield planes


def merge(target: Bytes, dtype: str, planes: Sequence[Callable[[slice], Plane]]) -> None:
    """Fill ``target`` from its planes; each is asked for its elements block by block, in order."""
    if dtype not in KINDS:
        for part in chunks(len(target), BLOCK):
            target[part] = planes[0](part)
        return
    words = len(kinds(dtype)) == 3
    elements: Plane = target.view(np.uint32 if words else np.uint16)
    upper, shifted = (np.empty(min(BLOCK, len(elements)), np.uint16) for _ in range(2))
    for part in chunks(len(elements), BLOCK):
        block, n = elements[part], part.stop - part.start
        top, spare = upper[:n] if words else block, shifted[:n]
        np.copyto(top, planes[-1](part))
        np.bitwise_or(np.left_shift(top, 8, out=top), planes[-2](part), out=top)
        np.left_shift(top, 15, out=spare)
        np.bitwise_or(np.right_shift(top, 1, out=top), spare, out=top)
        if words:
            np.copyto(block, top)
            np.bitwise_or(np.left_shift(block, 16, out=block), planes[0](part), out=block)
