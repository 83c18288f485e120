"""Collectives: what everybody holds at the end, in which order it was added, and how much was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collective import (
    TOTAL,
    Add,
    Collective,
    Copy,
    Segment,
    Send,
    cut,
    even_shares,
    gathered,
    owner_shares,
    owners,
    pairwise_sums,
    published,
    side_by_side,
    site_owners,
    tree,
)
from atoll.errors import UsageError


def elements_sent(collective: Collective, rank: int) -> int:
    return sum(
        collective.segments[action.segment].size
        for action in collective.actions[rank]
        if isinstance(action, Send)
    )


@given(st.integers(2, 12), st.integers(0, 500))
def test_owners_give_everybody_everything_at_2_of_r_minus_1_over_r(ranks: int, elements: int) -> None:
    everyone = range(ranks)
    segments = cut(elements, even_shares(ranks))
    collective = owners({rank: (rank,) for rank in everyone}, segments, tuple(everyone))
    for rank in everyone:
        for at in collective.results(rank):
            assert collective.expected(rank, at) == frozenset(everyone)
        own = segments[rank].size
        assert elements_sent(collective, rank) == (elements - own) + own * (ranks - 1)


def test_owners_add_in_the_order_of_labels_whoever_holds_them() -> None:
    collective = owners({0: (1, 3), 1: (0,), 2: (2,)}, cut(9, even_shares(3)), (0, 1, 2))
    orders = {a.slots for listed in collective.actions.values() for a in listed if isinstance(a, Add)}
    assert orders == {(0, 1, 2, 3)}


@pytest.mark.parametrize("labels", [{0: (1,), 1: (1,)}, {0: (-1,), 1: (2,)}])
def test_owners_refuse_labels_that_are_not_each_somebodys(labels: dict[int, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="labels"):
        owners(labels, cut(4, even_shares(2)), (0, 1))


@pytest.mark.parametrize("ranks", range(1, 33))
def test_a_tree_takes_log2_hops_and_one_copy(ranks: int) -> None:
    collective = tree(range(ranks), 10)
    hops = (ranks - 1).bit_length()
    for rank in range(ranks):
        assert collective.expected(rank, 0) == frozenset(range(ranks))
        merges = [a for a in collective.actions[rank] if isinstance(a, Add) and TOTAL in a.slots]
        copies = [a for a in collective.actions[rank] if isinstance(a, Copy)]
        assert len(merges) + len(copies) <= max(hops, 1)
        assert len(copies) == (rank > 0)


def test_all_of_a_group_hold_all_of_it() -> None:
    groups = gathered([(4, 1, 0), (2, 3)], 8)
    held = [groups.expected(rank, 0) for rank in range(5)]
    assert held == [{0, 1, 4}, {0, 1, 4}, {2, 3}, {2, 3}, {0, 1, 4}]
    assert [action.to for action in groups.actions[1] if isinstance(action, Send)] == [4, 0]
    assert groups.actions[1][-1] == Add(0, (0, 1, 4))


def test_pairs_and_readers_hold_two() -> None:
    pairs = pairwise_sums([(3, 1), (0, 2)], 8)
    assert [pairs.expected(rank, 0) for rank in range(4)] == [{0, 2}, {1, 3}, {0, 2}, {1, 3}]
    readers = published({0: 1, 1: 2}, 8)
    assert [readers.expected(rank, 0) for rank in range(3)] == [{0, 1}, {1, 2}, frozenset()]
    assert readers.results(2) == ()
    with pytest.raises(UsageError, match="two groups"):
        pairwise_sums([(0, 1), (1, 2)], 8)


def test_groups_stand_side_by_side() -> None:
    groups = [owners({r: (r,) for r in g}, cut(6, even_shares(2)), g) for g in ((0, 2), (1, 3))]
    both = side_by_side(groups)
    assert both.segments == (Segment(0, 3), Segment(3, 6)) * 2
    assert both.results(1) == (2, 3)
    assert both.expected(3, 2) == {1, 3}
    with pytest.raises(UsageError, match="two groups"):
        side_by_side([groups[0], groups[0]])


@pytest.mark.parametrize(
    "sites", [((0, 1), (2, 3)), ((0,), (1, 2), (3,)), ((0, 1, 2), (3, 4, 5, 6)), ((0, 1), (2, 3), (4, 5))]
)
def test_sites_in_turn_give_everybody_everything_and_cross_once_each_way(
    sites: tuple[tuple[int, ...], ...],
) -> None:
    everyone, elements = [rank for site in sites for rank in site], 840
    segments = cut(elements, even_shares(min(map(len, sites))))
    found = site_owners({rank: (rank,) for rank in everyone}, segments, sites)
    for rank in everyone:
        assert found.results(rank) == tuple(range(len(segments)))
        for at in range(len(segments)):
            assert found.expected(rank, at) == set(everyone)
    site_of = {rank: number for number, site in enumerate(sites) for rank in site}
    crossing: Counter[tuple[int, int]] = Counter()
    for rank, actions in found.actions.items():
        for action in actions:
            if isinstance(action, Send) and site_of[rank] != site_of[action.to]:
                crossing[site_of[rank], site_of[action.to]] += segments[action.segment].size
    neighbours = list(pairwise(range(len(sites))))
    assert crossing == {pair: elements for a, b in neighbours for pair in ((a, b), (b, a))}


def test_sites_whose_contributions_do_not_follow_each_other_are_refused() -> None:
    labels = {rank: (rank,) for rank in range(4)}
    with pytest.raises(UsageError, match="ascending from site to site"):
        site_owners(labels, cut(8, even_shares(2)), ((0, 2), (1, 3)))
    with pytest.raises(UsageError, match="2 segments and a site of 1 ranks"):
        site_owners(labels, cut(8, even_shares(2)), ((0, 1, 2), (3,)))


def test_a_collective_in_which_ranks_wait_for_each_other_is_refused() -> None:
    crossed = Collective((Segment(0, 1),), {0: (Copy(0, 1),), 1: (Copy(0, 0),)}, {0: (0,), 1: (1,)})
    with pytest.raises(ValueError, match="wait for each other"):
        crossed.expected(0, 0)


def owner_time_s(rates: Sequence[float], shares: Sequence[float], size_bytes: float) -> float:
    """Seconds that the busiest link carries an exchange of ``size_bytes`` by owners with these shares."""
    n = len(rates)
    return max(
        size_bytes * (1.0 + (n - 2) * share) / rate if rate > 0.0 else float("inf")
        for rate, share in zip(rates, shares, strict=True)
    )


def test_owner_shares_are_the_papers() -> None:
    shares = owner_shares([1.0, 1.0, 2.0, 4.0])
    assert shares == pytest.approx((0.0, 0.0, 1 / 6, 5 / 6), abs=1e-9)
    assert owner_time_s([1, 1, 2, 4], shares, 1.0) == pytest.approx(1.0)
    assert owner_time_s([1, 1, 2, 4], even_shares(4), 1.0) == pytest.approx(1.5)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12), st.data())
def test_no_other_shares_are_quicker(rates: list[float], data: st.DataObject) -> None:
    best = owner_time_s(rates, owner_shares(rates), 1.0)
    drawn = data.draw(st.lists(st.floats(0.0, 1.0), min_size=len(rates), max_size=len(rates)))
    whole = sum(drawn)
    if whole > 0.0 and len(rates) > 1:
        assert best <= owner_time_s(rates, [share / whole for share in drawn], 1.0) * (1 + 1e-9)


def test_a_rank_without_a_rate_owns_nothing() -> None:
    assert owner_shares([0.0, 5.0, 5.0])[0] == 0.0
    assert owner_shares([0.0, 5.0]) == (0.0, 1.0)
    with pytest.raises(UsageError, match="no owner"):
        owner_shares([0.0, 0.0])


@given(
    st.integers(0, 10_000), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9), st.sampled_from([1, 64])
)
def test_cuts_tile_at_multiples(elements: int, shares: list[float], multiple: int) -> None:
    if sum(shares) <= 0.0:
        shares = [1.0, *shares]
    segments = cut(elements, shares, multiple)
    assert [s.start for s in segments[1:]] == [s.stop for s in segments[:-1]]
    assert segments[0].start == 0
    assert segments[-1].stop == elements
    assert all(s.start % multiple == 0 or s.start == elements for s in segments)
    if elements and multiple == 1:
        wanted = Fraction(shares[0]) / Fraction(sum(map(Fraction, shares))) * elements
        assert abs(segments[0].size - wanted) <= 1 or len(shares) == 1
