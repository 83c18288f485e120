"""Ends whose address changes while tensors are under way: nothing is lost or doubled, nobody given up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from protos.credentials import Authority
from tests.patience import HUNG_S
from tests.worker.transport.hosts import Host, joined_by
from tests.worker.transport.ways.test_tunnels import (
    Door,
    Make,
    Relays,
    exchange,
    host,
    leave,
    relayed,
    relays,
)
from worker.transport.contract import Paths, TransportConfig, Way

__all__ = ["host", "relays"]
# Silence lasts longer than the patience with a peer that is away.
QUICK = TransportConfig(silence_s=0.6, ping_s=0.1, reconnect_s=0.2, move_s=HUNG_S, streams=2)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def doors() -> Iterator[list[Door]]:
    made: list[Door] = []
    yield made
    for door in made:
        door.close()


def unharmed(*hosts: Host) -> None:
    for one in hosts:
        assert one.losses.empty()
        assert one.delivered.empty()


def test_who_dialled_and_moves_dials_again(host: Make, doors: list[Door]) -> None:
    a, b = host("w-a", QUICK), host("w-b", QUICK, listen=True)
    doors.append(Door(b.network.port, opened=True))
    b.network.expect("w-a", Paths(), HUNG_S)
    a.network.meet("w-b", Paths((doors[0].address,), dial=True), HUNG_S)
    for first in range(0, 12, 4):
        exchange(a, b, range(first, first + 4))
        doors[0].forget()
        a.network.moved()
    exchange(a, b, range(12, 16))
    assert joined_by(a.network) == {"w-b": Way.DIRECT}
    unharmed(a, b)


def test_who_was_dialled_and_moves_is_dialled_where_it_is_now(host: Make, doors: list[Door]) -> None:
    a, b = host("w-a", QUICK), host("w-b", QUICK, listen=True)
    doors += [Door(b.network.port, opened=True), Door(b.network.port, opened=True)]
    b.network.expect("w-a", Paths(), HUNG_S)
    a.network.meet("w-b", Paths((doors[0].address,), dial=True), HUNG_S)
    exchange(a, b, range(4))
    doors[0].shut()
    b.network.moved()
    # The coordinator has b's new address once b's session is back; nobody was lost meanwhile.
    a.network.expect("w-b", Paths((doors[1].address,), dial=True), HUNG_S)
    exchange(a, b, range(4, 8))
    assert joined_by(a.network) == {"w-b": Way.DIRECT}
    unharmed(a, b)


def test_who_moves_to_where_nobody_can_dial_it_is_met_at_the_relay(
    host: Make, relays: Relays, doors: list[Door]
) -> None:
    a, b = host("w-a", QUICK), host("w-b", QUICK, listen=True)
    doors.append(Door(b.network.port, opened=True))
    late = {dials: replace(leave(relays.port, dials=dials), after_s=HUNG_S) for dials in (True, False)}
    b.network.expect("w-a", Paths(relay=late[False]), HUNG_S)
    a.network.meet("w-b", Paths((doors[0].address,), True, late[True]), HUNG_S)
    exchange(a, b, range(4))
    doors[0].shut()
    b.network.moved()
    a.network.expect("w-b", Paths((), True, leave(relays.port, dials=True, serial=1)), HUNG_S)
    b.network.expect("w-a", Paths((), True, leave(relays.port, dials=False, serial=1)), HUNG_S)
    exchange(a, b, range(4, 8))
    assert joined_by(a.network) == {"w-b": Way.RELAYED}
    unharmed(a, b)


@pytest.mark.parametrize("mover", ["w-a", "w-b"])
def test_an_end_of_a_relayed_pair_moves(host: Make, relays: Relays, doors: list[Door], mover: str) -> None:
    doors.append(Door(relays.port, opened=True))
    ports = (doors[0].address[1], relays.port) if mover == "w-a" else (relays.port, doors[0].address[1])
    a, b = relayed(host, *ports, QUICK)
    for first in range(0, 12, 4):
        exchange(a, b, range(first, first + 4))
        doors[0].forget()
        next(one for one in (a, b) if one.network.name == mover).network.moved()
    exchange(a, b, range(12, 16))
    assert joined_by(a.network) == {"w-b": Way.RELAYED}
    unharmed(a, b)


def test_who_does_not_come_back_after_a_move_is_lost(host: Make, doors: list[Door]) -> None:
    config = replace(QUICK, move_s=0.5)
    a, b = host("w-a", config), host("w-b", config, listen=True)
    doors.append(Door(b.network.port, opened=True))
    b.network.expect("w-a", Paths(), HUNG_S)
    a.network.meet("w-b", Paths((doors[0].address,), dial=True), HUNG_S)
    doors[0].shut()
    begun_s = time.monotonic()
    a.network.moved()
    assert a.losses.get(timeout=HUNG_S)[0] == "w-b"
    assert time.monotonic() - begun_s >= config.move_s
