"""Work of the codecs between two stages, as a step reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CodecUse:
    """Work of the codecs in training's steps on the way to and from one peer; evaluation counts apart. What
    travels as it is takes no codec's time: a copy, where its layout needs one, is handling."""

    dense_bytes: int = 0  # of boundary tensors sent, had they travelled as they are
    wire_bytes: int = 0  # of the same, with their headers
    encode_s: float = 0.0
    decode_s: float = 0.0
