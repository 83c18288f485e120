"""Tensor -> Packet -> tensor: how a link spends its bytes.

A new codec: its file (in ``contrib/`` until a policy chooses it), one entry in ``catalogue.py``, one line
in docs/compression.md; the conformance tests find it. Importing this package alone does not load torch.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from compressors.catalogue import CODECS, codec

if TYPE_CHECKING:
    from compressors.base import Compressor

__all__ = ["CODECS", "codec", "make_compressor"]


def make_compressor(name: str, ratio: float = 1.0) -> Compressor:
    """The codec a LinkSpec names. Raises UsageError for an unknown one."""
    facts = codec(name)
    build = resolve_name(f"compressors.{facts.builder}")
    made: Compressor = build(ratio=ratio) if facts.rated else build()
    return made
