"""Collective of a round: derived at every rank alike from the rule's pattern and who meets whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from atoll.collective import (
    Collective,
    even_shares,
    gathered,
    owners,
    pairwise_sums,
    published,
    side_by_side,
    tree,
)
from atoll.errors import UsageError
from atoll.exchange import Pattern
from atoll.gateways import Sites, site_relays, site_sums

if TYPE_CHECKING:
    from strategies.exchanges.base import Contribution

Groups = Sequence[tuple[int, ...]]
"""Ranks that exchange with each other, alone where a rank has nobody; of ``PUBLISHED`` (reader, source)."""


def collective_of(
    pattern: Pattern,
    groups: Groups,
    contribution: Contribution,
    *,
    shares: Mapping[int, float] | None = None,
    labels: Mapping[int, Sequence[int]] | None = None,
) -> Collective:
    """Actions of one phase in which each of ``groups`` joins contributions like this one.

    ``shares`` of the elements that a rank owns (``collective.owner_shares``), even without; ``labels`` of the
    contributions that it holds, its own rank without. Raises UsageError for groups that do not fit the
    pattern.
    """
    size = contribution.vector.size
    match pattern:
        case Pattern.OWNERS:
            return side_by_side([_owned(group, contribution, shares, labels) for group in groups])
        case Pattern.TREE:
            return side_by_side([tree(group, size) for group in groups])
        case Pattern.GATHERED:
            return gathered(groups, contribution.segments(()) if contribution.borders else size)
        case Pattern.PAIRWISE | Pattern.PUBLISHED:
            if any(len(group) not in (1, 2) for group in groups):
                raise UsageError(f"{pattern} among {[len(group) for group in groups]} ranks; it takes pairs")
            pairs = [(group[0], group[1]) for group in groups if len(group) == 2]
            joined = pairwise_sums if pattern is Pattern.PAIRWISE else _read
            alone = [group for group in groups if len(group) == 1]  # with what is its own
            return (
                side_by_side([joined(pairs, size), gathered(alone, size)]) if alone else joined(pairs, size)
            )


def of_sites(
    pattern: Pattern, sites: Sites, contribution: Contribution, shares: Sequence[float]
) -> Collective:
    """Actions of a phase in which all join contributions like this one, by gateways between ``sites``;
    ``shares`` of the elements as ``atoll.gateways.column_shares`` gives them."""
    joined = site_sums if pattern is Pattern.OWNERS else site_relays
    return joined(sites, contribution.segments(shares))


def _read(pairs: Sequence[tuple[int, int]], size: int) -> Collective:
    return published(dict(pairs), size)


def _owned(
    group: Sequence[int],
    contribution: Contribution,
    shares: Mapping[int, float] | None,
    labels: Mapping[int, Sequence[int]] | None,
) -> Collective:
    ranks = sorted(group)
    parts = even_shares(len(ranks)) if shares is None else tuple(shares[rank] for rank in ranks)
    segments = contribution.segments(parts)
    if len(segments) != len(ranks):
        raise UsageError(f"{len(segments)} segments for {len(ranks)} owners")
    held = {rank: (rank,) if labels is None else labels[rank] for rank in ranks}
    return owners(held, segments, ranks)
