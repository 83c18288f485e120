"""WAGMA-SGD's groups as its paper draws them."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import UsageError


def butterfly_groups(ranks: Sequence[int], size: int, number: int) -> tuple[tuple[int, ...], ...]:
    """Groups of round ``number`` in which everybody hears of everybody within log_size P rounds.

    Ranks of a group differ in the butterfly's bits [t log2 S, (t + 1) log2 S) only, t the round. ``size`` and
    the number of ranks are powers of two. Source: WAGMA-SGD (papers/compression.md 7).
    """
    order = sorted(ranks)
    total, bits = len(order), size.bit_length() - 1
    if size < 2 or size & (size - 1) or total & (total - 1) or total < size:
        raise UsageError(f"groups of {size} among {total} ranks: both powers of two, {size} the smaller")
    width = total.bit_length() - 1
    phases = -(-width // bits)
    low = min((number % phases) * bits, width - bits)  # the last phase overlaps where S does not divide
    groups: dict[int, list[int]] = {}
    for place, rank in enumerate(order):
        groups.setdefault(place & ~((size - 1) << low), []).append(rank)
    return tuple(tuple(group) for group in groups.values())
