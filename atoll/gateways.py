"""Rounds of peers of which some share a site: each part of the model crosses to another site once.

    site A: p0, p1 -> gateway of a column ---- one coded sum ----> owner's gateway, and the total back the way
    site B: p2, p3 -> its gateway of the same column                inside a site: parts as they are

Where sums travel, a column is what one peer of each site is the gateway of; as many as the largest site has
peers, so that no one of them passes all. Where every peer's parts travel to all, a part goes to one peer of
each other site, who passes it on: the bits are those of a round without sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from atoll.collective import TOTAL, Action, Add, Collective, Copy, Segment, Send, cut, owner_shares
from atoll.exchange import SITE_RULES, Exchange

Sites = tuple[tuple[int, ...], ...]
"""Peers of each site, ascending."""


def sites_of(exchange: Exchange, ranks: Mapping[int, int]) -> Sites:
    """Return the sites of peers, by the rank of the plan that each joins something with; none where there is
    one site, where none has two peers, or where the plan has no sites."""
    if exchange.inner is None or exchange.rule not in SITE_RULES or not exchange.sites:
        return ()
    return grouped({peer: exchange.sites[rank] for peer, rank in ranks.items()})


def grouped(site_of: Mapping[int, int]) -> Sites:
    """Return the peers of each site; none where sites would change nothing."""
    found: dict[int, list[int]] = {}
    for peer in sorted(site_of):
        found.setdefault(site_of[peer], []).append(peer)
    return tuple(map(tuple, found.values())) if 1 < len(found) < len(site_of) else ()


def column_shares(sites: Sites, rates: Mapping[int, float]) -> tuple[float, ...]:
    """Return shares of the elements for ``site_sums``: a column's by the rate of its slowest gateway, and
    within it an owner's by its own. ``rates`` in bytes/s by peer, above 0; none: even ones."""
    found: list[float] = []
    for gateways in _columns(sites):
        own = [rates.get(peer, 1.0) for peer in gateways]
        found += [min(own) * share for share in owner_shares(own)]
    return tuple(share / sum(found) for share in found)


def site_sums(sites: Sites, segments: Sequence[Segment]) -> Collective:
    """Reduce within each site at a column's gateway, between the gateways at an owner; the total goes back
    the way. Carries 2 (S - 1) / S of the vector out of each of S sites at equal shares, whatever its peers;
    four latencies, of which two are between sites. ``segments``: by column, then by the site that owns."""
    everyone = {peer: number for number, site in enumerate(sites) for peer in site}
    actions: dict[int, list[Action]] = {peer: [] for peer in everyone}
    later: dict[int, list[Action]] = {peer: [] for peer in everyone}
    places = [(gateways, owner) for gateways in _columns(sites) for owner in range(len(sites))]
    for at, (gateways, owner) in enumerate(places):
        if not segments[at].size:
            continue
        for number, site in enumerate(sites):
            here = gateways[number]
            members = [peer for peer in site if peer != here]
            for peer in members:
                actions[peer].append(Send(here, at, peer, peer))
                later[peer].append(Copy(at, here))
            later[here] += _at_gateway(at, sites, gateways, owner, number)
            later[here] += [Send(peer, at, TOTAL, TOTAL) for peer in members]
    found = {peer: (*actions[peer], *later[peer]) for peer in everyone}
    return Collective(tuple(segments), found, {peer: (peer,) for peer in everyone}, everyone)


def site_relays(sites: Sites, segments: Sequence[Segment]) -> Collective:
    """Give every peer's parts to all, who add them in one order: a part crosses once to each other site, to
    the one of its peers that passes it on. Two latencies."""
    everyone = sorted(peer for site in sites for peer in site)
    actions: dict[int, tuple[Action, ...]] = {}
    for site in sites:
        beyond = [other for other in sites if other is not site]
        for rank in site:
            others = [peer for peer in site if peer != rank]
            passed = [p for other in beyond for p in other if _relay(site, p) == rank]
            listed: list[Action] = []
            for at in range(len(segments)):
                to = [*(_relay(other, rank) for other in beyond), *others]
                listed += [Send(peer, at, rank, rank) for peer in to]
                listed += [Send(peer, at, label, label) for label in passed for peer in others]
                listed.append(Add(at, tuple(everyone)))
            actions[rank] = tuple(listed)
    return Collective(tuple(segments), actions, {rank: (rank,) for rank in everyone})


def of_units(sites: Sites, rates: Mapping[int, float], units: int, *, sums: bool) -> Collective:
    """Return the collective of so many equal elements, to count what it sends."""
    if sums:
        return site_sums(sites, cut(units, column_shares(sites, rates)))
    return site_relays(sites, (Segment(0, units),))


def _columns(sites: Sites) -> Iterator[tuple[int, ...]]:
    """Yield the gateways of each column, one a site."""
    for column in range(max(map(len, sites))):
        yield tuple(site[column % len(site)] for site in sites)


def _at_gateway(at: int, sites: Sites, gateways: Sequence[int], owner: int, number: int) -> Iterator[Action]:
    """Add a site's parts of a segment, and at the owner's gateway the sites' sums, each under the first label
    of its site: in one order, whoever owns it."""
    yield Add(at, sites[number])
    if number != owner:
        yield Send(gateways[owner], at, TOTAL, sites[number][0])
        yield Copy(at, gateways[owner])
        return
    yield Add(at, tuple(TOTAL if site is sites[owner] else site[0] for site in sites))
    for gateway in gateways:
        if gateway != gateways[owner]:
            yield Send(gateway, at, TOTAL, TOTAL)


def _relay(site: Sequence[int], label: int) -> int:
    """The peer of a site that passes on the parts of one elsewhere."""
    return site[label % len(site)]
