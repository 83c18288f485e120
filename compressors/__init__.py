"""Tensor -> Packet -> tensor: how a link spends its bytes.

A new codec: its file, one line here, one in the docs; the conformance tests find it.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import UsageError
from compressors.base import Compressor, Packet
from compressors.none import Uncompressed

__all__ = ["COMPRESSORS", "Compressor", "Packet", "make_compressor"]

COMPRESSORS: dict[str, Callable[[float], Compressor]] = {
    "none": lambda ratio: Uncompressed(),
}
"""Name -> builder from the plan's ratio (1 = nothing saved)."""


def make_compressor(name: str, ratio: float = 1.0) -> Compressor:
    """The codec a LinkSpec names. Raises UsageError for an unknown one."""
    builder = COMPRESSORS.get(name)
    if builder is None:
        raise UsageError(f"codec {name!r} is not known; there are: {', '.join(sorted(COMPRESSORS))}")
    return builder(ratio)
