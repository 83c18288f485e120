"""Neighbours of a plan: who is there gets through to who still loads, and who is not reached is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from atoll.messages.to_worker import PeerLink
from tests.patience import HUNG_S
from tests.worker.transport.hosts import Host, joined
from worker.cancel import Cancel
from worker.hosting.neighbours.connecting import connect, expect
from worker.transport.contract import Paths, PeerLost

NOWHERE = ("127.0.0.1", 1)


@pytest.fixture
def host() -> Iterator[Callable[[str], Host]]:
    made: list[Host] = []

    def make(name: str) -> Host:
        made.append(Host(None, name=name))
        return made[-1]

    yield make
    for one in made:
        one.network.close()


@pytest.mark.parametrize("newcomer_dials", [True, False])
def test_those_who_are_there_are_connected_while_the_newcomer_still_loads(
    host: Callable[[str], Host], newcomer_dials: bool
) -> None:
    there, newcomer = host("w-a"), host("w-n")
    to_there = PeerLink("w-a", Paths((there.address,), dial=newcomer_dials))
    expect([to_there], newcomer.network, HUNG_S)
    connect(
        [PeerLink("w-n", Paths((newcomer.address,), dial=not newcomer_dials))],
        there.network,
        HUNG_S,
        Cancel(),
    )
    joined(newcomer.network, "w-a")
    connect([to_there], newcomer.network, HUNG_S, Cancel())


def test_who_is_not_reached_is_named(host: Callable[[str], Host]) -> None:
    there = host("w-a")
    with pytest.raises(PeerLost, match=r"did not connect within 0\.3 s") as lost:
        connect([PeerLink("w-n", Paths((NOWHERE,), dial=True))], there.network, 0.3, Cancel())
    assert lost.value.peer == "w-n"
