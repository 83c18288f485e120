"""AdaDUAL: whether a bulk transfer begins beside another on one link, or waits for its end.

A link carries a byte in b seconds; k transfers at once take k b + (k - 1) eta a byte each. One with M bytes
left runs, one of N bytes wants to begin. The sum of both ends is, waiting, 2 b M + b N; beginning at once,
(3 b + 2 eta) N + b M for N < M, and never less for N >= M. So beginning pays while

    N / M  <  b / (2 (b + eta))

and beside two or more nobody begins. Source: arXiv 2002.10105; the threshold is derived, not read.
"""

from __future__ import annotations

from collections.abc import Sequence


def begins(new_bytes: float, left_bytes: Sequence[float], byte_s: float, eta_s: float) -> bool:
    """Return whether a transfer of ``new_bytes`` begins beside those that have ``left_bytes``."""
    if len(left_bytes) > 1:
        return False
    return not left_bytes or new_bytes * 2.0 * (byte_s + eta_s) < left_bytes[0] * byte_s


def slowed_s(transfers: int, byte_s: float, eta_s: float) -> float:
    """Return the seconds a byte of each of so many transfers takes on one link."""
    return transfers * byte_s + (transfers - 1) * eta_s


def eta(one_bps: float, two_bps: float) -> float:
    """Return eta in seconds a byte, from the rate of one transfer alone and that of each of two at once."""
    byte_s = 8.0 / one_bps
    return max(0.0, 8.0 / two_bps - 2.0 * byte_s)
