"""Rounds by gateways: everybody has everything, and each part of the model crosses to another site once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collective import TOTAL, Add, Collective, Segment, Send, cut
from atoll.exchange import Exchange
from atoll.gateways import column_shares, grouped, site_relays, site_sums, sites_of

SITES = st.lists(st.integers(0, 3), min_size=2, max_size=12).map(lambda of: grouped(dict(enumerate(of))))


def crossing(collective: Collective, sites: tuple[tuple[int, ...], ...]) -> list[tuple[int, Send]]:
    number = {peer: at for at, site in enumerate(sites) for peer in site}
    return [
        (peer, action)
        for peer, actions in collective.actions.items()
        for action in actions
        if isinstance(action, Send) and number[peer] != number[action.to]
    ]


@given(SITES.filter(bool), st.integers(0, 400))
def test_everybody_has_all_and_a_site_sends_no_more_than_one_peer_would(
    sites: tuple[tuple[int, ...], ...], elements: int
) -> None:
    collective = site_sums(sites, cut(elements, column_shares(sites, {})))
    everyone = frozenset(peer for site in sites for peer in site)
    for peer in everyone:
        for at in collective.results(peer):
            assert collective.expected(peer, at) == everyone
            assert collective.maker(peer, at) in everyone
    sent = crossing(collective, sites)
    # Of each segment a site sends one sum to its owner, or the owner's one total to each other site.
    for peer, action in sent:
        assert not collective.plain(peer, action.to, action.label)
    number = {peer: at for at, site in enumerate(sites) for peer in site}
    once = Counter((number[peer], number[action.to], action.segment) for peer, action in sent)
    assert set(once.values()) <= {1}
    for site in range(len(sites)):
        out = sum(collective.segments[a.segment].size for peer, a in sent if number[peer] == site)
        own = sum(
            collective.segments[at].size
            for at in range(len(collective.segments))
            if number[collective.maker(sites[site][0], at)] == site
        )
        assert out == (elements - own) + own * (len(sites) - 1)


@given(SITES.filter(bool))
def test_a_relayed_part_crosses_once_to_each_other_site(sites: tuple[tuple[int, ...], ...]) -> None:
    collective = site_relays(sites, (Segment(0, 10), Segment(10, 15)))
    everyone = frozenset(peer for site in sites for peer in site)
    assert all(collective.expected(peer, at) == everyone for peer in everyone for at in (0, 1))
    assert Counter(a.label for _, a in crossing(collective, sites)) == dict.fromkeys(
        everyone, 2 * (len(sites) - 1)
    )
    orders = {a.slots for listed in collective.actions.values() for a in listed if isinstance(a, Add)}
    assert orders == {tuple(sorted(everyone))}


def test_an_element_is_added_in_one_order_whoever_owns_it() -> None:
    """Each site's sum first, then those of the sites: cuts of a model move owners, and no bit."""
    sites = ((0, 2), (1, 3, 4))
    collective = site_sums(sites, cut(60, column_shares(sites, {})))
    finals = {
        tuple(0 if slot == TOTAL and peer in sites[0] else 1 if slot == TOTAL else slot for slot in a.slots)
        for peer, actions in collective.actions.items()
        for a in actions
        if isinstance(a, Add) and TOTAL in a.slots
    }
    assert finals == {(0, 1)}


def test_who_waits_for_whom_is_four_messages_long() -> None:
    """A part, the site's sum, the total, and the total passed on: patience goes by them."""
    sites = ((0, 1), (2, 3))
    collective = site_sums(sites, cut(40, column_shares(sites, {})))
    hops = {collective.hops(peer, *slot) for peer in range(4) for slot in collective.sources(peer)}
    assert hops == {1, 2, 3, 4}
    relays = site_relays(sites, (Segment(0, 4),))
    assert {relays.hops(0, *slot) for slot in relays.sources(0)} == {1, 2}


def test_a_column_is_as_large_as_its_slowest_gateway_is_fast() -> None:
    shares = column_shares(((0, 1), (2, 3)), {0: 4.0, 1: 1.0, 2: 4.0, 3: 4.0})
    assert shares == pytest.approx((0.4, 0.4, 0.04, 0.16))


@pytest.mark.parametrize(
    ("exchange", "ranks"),
    [
        (Exchange("diloco", sites=(0, 0, 1)), {0: 0, 1: 1, 2: 2}),  # none within a site
        (Exchange("wagma", inner=Exchange(), sites=(0, 0, 1)), {0: 0, 1: 1, 2: 2}),
        (Exchange("diloco", inner=Exchange(), sites=(0, 0, 0)), {0: 0, 1: 1, 2: 2}),  # one site
        (Exchange("diloco", inner=Exchange(), sites=(0, 0, 1)), {0: 0, 2: 2}),  # the second peer is absent
    ],
)
def test_other_rounds_have_no_gateways(exchange: Exchange, ranks: dict[int, int]) -> None:
    assert sites_of(exchange, ranks) == ()


def test_sites_go_by_the_ranks_that_join_a_part_of_the_model() -> None:
    """Of peers across two sites one part has its holders at one, another at the other."""
    exchange = Exchange("diloco", inner=Exchange(), sites=(0, 1, 0, 1, 1))
    assert sites_of(exchange, {0: 0, 1: 2, 2: 4}) == ((0, 1), (2,))
    assert sites_of(exchange, {0: 1, 1: 3, 2: 4}) == ()
