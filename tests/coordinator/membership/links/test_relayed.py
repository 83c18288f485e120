"""Pairs that cannot dial each other meet at relays, whose lines plans share out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import CoordinatorConfig, Relaying
from coordinator.membership.links.probing import HOPELESS
from coordinator.membership.links.relayed import RELAY_AFTER_S, Joined
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.planning.peers.transfers import seconds
from coordinator.services.owners.views import link_statuses
from coordinator.services.workers.relay_ways import RelayWays
from protos import relay_tickets as tickets
from tests.coordinator.planning.fleets import two_islands
from tests.sim.scripted import Scripted
from tests.sim.worker import introduction

RELAY = Relaying(port=0, ticket_s=60.0)


class Closed(Scripted):
    """Workers that accept no connection."""

    def introduced(self, worker: str, incarnation: int) -> ev.Introduction:
        return replace(introduction(worker, incarnation), addresses=())


def scripted(relaying: Relaying = RELAY, kind: type[Scripted] = Closed) -> Scripted:
    return kind(config=CoordinatorConfig(Path("state"), relaying=relaying))


def report(world: Scripted, worker: str, peer: str, way: str, relay: str = "") -> None:
    world.says(worker, ev.PeerJoined(peer, way, relay))


def test_a_closed_pair_is_hopeless_without_a_relay_and_measured_through_one() -> None:
    world = scripted(Relaying())
    world.join("a", "b")
    assert world.scheduler.roster.links.table.estimates["a", "b"] == HOPELESS
    world = scripted()
    world.join("a", "b")
    assert world.scheduler.roster.links.table.estimates["a", "b"].bandwidth_bps > 1e6
    probe = next(m for w, m in world.messages(do.ProbeLink) if w == "a")
    assert probe.link == do.ExpectPeer("b", (), False, do.RelayUse(True, 0.0))
    expect = next(m for w, m in world.messages(do.ExpectPeer) if w == "b")
    assert expect.relay == do.RelayUse(False, 0.0)


def test_two_that_may_dial_each_other_try_that_first() -> None:
    known = Joined(RELAY)
    assert known.use("a", "b", dialable=True) == do.RelayUse(True, RELAY_AFTER_S)
    assert known.use("b", "a", dialable=True) == do.RelayUse(False, RELAY_AFTER_S)
    assert Joined(Relaying()).use("a", "b", dialable=False) is None


def test_the_ways_of_pairs_are_shown_until_they_change_or_a_worker_leaves() -> None:
    world = scripted()
    world.join("a", "b")
    report(world, "a", "b", "relayed", "r:1")
    report(world, "b", "a", "relayed", "r:1")
    report(world, "a", "stranger", "direct")
    shown = {(s.source, s.target): s for s in link_statuses(world.scheduler)}
    assert [shown[pair].way for pair in (("a", "b"), ("b", "a"))] == ["relayed", "relayed"]
    assert "relay r:1" in shown["a", "b"].shared
    report(world, "a", "b", "direct")
    report(world, "b", "a", "reversed")
    shown = {(s.source, s.target): s for s in link_statuses(world.scheduler)}
    assert [shown[pair].way for pair in (("a", "b"), ("b", "a"))] == ["direct", "reversed"]
    assert shown["a", "b"].shared == ""
    report(world, "a", "b", "")
    assert world.scheduler.roster.joined.way(("a", "b")) == ""
    world.handle(ev.KickAsked("b", "", False))
    assert not world.scheduler.roster.joined.ways


def test_relayed_pairs_of_one_job_get_new_tickets_at_half_the_life_of_the_old() -> None:
    world = scripted(replace(RELAY, ticket_s=10.0)).training()
    report(world, "a", "b", "relayed", "r:1")
    report(world, "b", "a", "relayed", "r:1")

    def renewed() -> set[tuple[str, str]]:
        """Who hears of whom in eight seconds, of which a step is a part."""
        world.done.clear()
        world.wait(4.0)
        world.step()
        world.wait(4.0)
        return {(w, m.peer) for w, m in world.messages(do.ExpectPeer)}

    assert renewed() == {("a", "b"), ("b", "a")}
    uses = {m.relay for _, m in world.messages(do.ExpectPeer)}
    assert uses == {do.RelayUse(True, 0.0), do.RelayUse(False, 0.0)}
    report(world, "a", "b", "direct")
    report(world, "b", "a", "reversed")
    assert renewed() == set()


def line_of(known: Joined, alone: dict[tuple[str, str], float]) -> Any:
    return known.lines(["a", "b", "c"], alone)


def test_a_relays_line_is_what_is_configured_else_the_most_of_one_pair() -> None:
    known = Joined(RELAY)
    for worker, peer in (("a", "b"), ("b", "a"), ("a", "c")):
        known.reported(worker, ev.PeerJoined(peer, "relayed", "r:1"))
    known.reported("c", ev.PeerJoined("b", "direct"))
    assert line_of(known, {}) == ()
    (line,) = line_of(known, {("a", "b"): 5e6, ("c", "a"): 8e6, ("b", "c"): 1e9})
    assert (line.name, line.bps) == ("relay r:1", 8e6)
    assert line.pairs == {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")}
    assert known.lines(["b", "c"], {("a", "b"): 5e6}) == ()
    bounded = Joined(replace(RELAY, line_bps=2e6), known.ways)
    assert [line.bps for line in line_of(bounded, {})] == [2e6]


def test_a_plan_counts_a_relay_once_for_all_who_pass_it() -> None:
    fleet = two_islands()
    workers = [device.worker for device in fleet.devices]
    known = Joined(replace(RELAY, line_bps=1e6))
    pairs = [(0, 1), (2, 3)]
    for i, j in pairs:
        known.reported(workers[i], ev.PeerJoined(workers[j], "relayed", "r:1"))
    relayed = replace(fleet, relays=known.lines(workers, {}))
    for i, j in pairs:
        assert ("relay r:1", 1e6 * fleet.payload_share) in relayed.path(i, j)
        assert relayed.effective_bps[j, i] == pytest.approx(1e6 * fleet.payload_share)
    assert relayed.path(0, 2) == fleet.path(0, 2)
    sent = fleet.bandwidth_bps * 0.0
    for i, j in pairs:
        sent[i, j] = 1e6
    alone = sent.copy()
    alone[2, 3] = 0.0
    assert seconds(relayed, sent) == pytest.approx(2 * seconds(relayed, alone))
    assert seconds(relayed, sent) == pytest.approx(16.0 / fleet.payload_share)
    part = relayed.subset(workers[:2])
    assert ("relay r:1", 1e6 * fleet.payload_share) in part.path(0, 1)
    assert relayed.subset(workers[1:3]).relays == ()


def test_a_ticket_is_of_its_pair_and_end_alone_and_ends() -> None:
    key = tickets.new_key()
    ways = RelayWays(key, (("", 7702), ("r", 1)), RELAY, lambda: 1000.0)
    one = ways.way("w-a", "w-b", do.RelayUse(True, 2.5))
    other = ways.way("w-b", "w-a", do.RelayUse(False, 2.5))
    assert one is not None
    assert other is not None
    assert one.addresses == (("", 7702), ("r", 1))
    mine, theirs = (tickets.opened(key, way.ticket, 1060.0) for way in (one, other))
    assert (mine.pair, mine.dials, theirs.dials) == (theirs.pair, True, False)
    assert mine.serial != theirs.serial
    assert (mine.max_bytes, mine.max_connections) == (RELAY.ticket_bytes, RELAY.ticket_connections)
    with pytest.raises(Exception, match="ended"):
        tickets.opened(key, one.ticket, 1061.0)
    nonce = bytes(tickets.NONCE_BYTES)
    tickets.admitted(key, tickets.answer(one.ticket, one.key, nonce), nonce, 1000.0)
    assert RelayWays(key, (), RELAY, lambda: 0.0).way("a", "b", do.RelayUse(True, 0.0)) is None


class Placed(Scripted):
    """Workers that are dialled at 10.0.0.``at``."""

    at = 1

    def introduced(self, worker: str, incarnation: int) -> ev.Introduction:
        return replace(introduction(worker, incarnation), addresses=((f"10.0.0.{self.at}", 7),))


def test_a_worker_that_moves_and_its_peers_hear_where_they_find_each_other() -> None:
    world = Placed(config=CoordinatorConfig(Path("state"), relaying=RELAY)).training()
    report(world, "a", "b", "direct")
    report(world, "b", "a", "reversed")
    world.done.clear()
    world.join("b")
    assert world.messages(do.ExpectPeer) == []
    world.at = 2
    world.join("b")
    told = dict(world.messages(do.ExpectPeer))
    assert told.keys() == {"a", "b"}, "c is no peer of it"
    assert (told["a"].peer, told["a"].addresses, told["a"].dial) == ("b", (("10.0.0.2", 7),), True)
    assert (told["b"].peer, told["b"].addresses) == ("a", (("10.0.0.1", 7),))
    assert told["a"].relay is not None
    assert world.state().phase.value == "training"
    assert world.state().version == 1
