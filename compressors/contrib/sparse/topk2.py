"""Top-k with two bits a value: many more elements in the same bytes than with sixteen.

    v'[i] = s sign(v[i]) low  or  s sign(v[i]) high for i in S, 0 elsewhere

with S the k largest |v| of each row, s the row's mean kept |v|, low and high the packet's two means
of |v|/s (``values.py``). An exact k in each row and no state, like ``topk``; the same positions serve
a gradient on the way back.

Two bits and a position cost a third of sixteen and a position, so more than three times the
elements arrive. Relative error at the same bytes, measured on N(0, 1) and on Student's t of 3
degrees (heavy tails), 256 rows of 256, against ``topk``:

    ratio   N(0, 1)        t(3)
    8       0.35 (0.59)    0.59 (0.41)
    12      0.31 (0.70)    0.56 (0.51)
    16      0.35 (0.76)    0.52 (0.56)
    32      0.66 (0.87)    0.60 (0.68)
    100     0.90 (0.95)    0.76 (0.81)

Below a ratio of about 15 every element travels and no more bytes are spent. Sources: papers/peers.md 7.5
(two bits a value), papers/compression.md 4 (two means); rows as in ``topk``.
"""

from __future__ import annotations

from compressors.topk import TopK


class TopK2(TopK):
    """The codec above. ``ratio``: dense bytes / payload bytes aimed at."""

    name = "topk2"

    def __init__(self, ratio: float = 100.0) -> None:
        """Raises ValueError for a ratio below 1."""
        super().__init__(ratio, values="2bit")
