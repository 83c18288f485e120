"""Sites with gateways: the bits of flat rounds, few bytes, and nobody lost or counted twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.messages import to_worker as asked
from coordinator.federated import state as fed
from coordinator.messages.jobs import Phase
from tests.inprocess.site_federation import NAMES, SITES, SiteFederation, same
from tests.parameters import sampled


def made(folder: Path, **options: Any) -> SiteFederation:
    keys = ("site_of", "allowed", "silent", "unreachable", "on_order")
    own = {key: options.pop(key) for key in keys if key in options}
    wanted = {"gateways": "auto", "local_steps": 2, "evaluate_every": 0, **options}
    return SiteFederation(folder, NAMES, wanted, **own)


def finished(federation: SiteFederation) -> SiteFederation:
    federation.run()
    assert federation.state.phase is Phase.FINISHED, federation.state.reason
    for fact, ask in zip(federation.facts(), federation.asks, strict=True):
        summed = [*ask.updates, *(name for held in ask.sums.values() for name in held.samples)]
        assert len(summed) == len({*summed})  # nobody is counted twice
        assert sorted({*summed} - fact.dropped.keys()) == sorted(fact.participants)
        assert not fact.participants.keys() & fact.dropped.keys()
    return federation


def flat(folder: Path, **options: Any) -> SiteFederation:
    return finished(made(folder, site_of={}, **options))


@pytest.mark.parametrize(
    ("strategy", "uplink"),
    sampled(3, [("fedavg", "off"), ("fedavgm", "int8_block"), ("fedadam", "topk:3"), ("fedprox", "off"),
                ("scaffold", "off"), ("fedbn", "off")]),
)  # fmt: skip
def test_two_sites_end_with_the_bits_of_flat_rounds(tmp_path: Path, strategy: str, uplink: str) -> None:
    options = {"strategy": strategy, "uplink": uplink}
    sites = finished(made(tmp_path / "sites", **options))
    other = flat(tmp_path / "flat", **options)
    assert same(sites.weights(), other.weights())
    assert len(sites.asks) == len(sites.facts()) == 5
    assert all(sorted(ask.sums) == ["sum of w1", "sum of w4"] and not ask.updates for ask in sites.asks)
    assert all(len(ask.updates) == 6 and not ask.sums for ask in other.asks)


def test_to_the_coordinator_go_one_sum_and_one_model_a_site(tmp_path: Path) -> None:
    sites, other = finished(made(tmp_path / "sites")), flat(tmp_path / "flat")
    store = sites.server.store
    sums = {store.path(held.blob).stat().st_size for ask in sites.asks for held in ask.sums.values()}
    model = other.bytes()[0][1] // 6
    for up, down in sites.bytes():
        assert down == 2 * model
        assert up <= 2 * max(sums)
    updates = sum(up for up, _ in other.bytes()) // 30
    assert max(up for up, _ in sites.bytes()) < 3 * updates < other.bytes()[0][0]
    assert sites.near_bytes == 5 * (4 * model + 4 * updates)  # within the sites, that of all but the gateways


@pytest.mark.parametrize("gateway", ["w1", "w4"])
def test_a_gateway_that_dies_before_its_sum_came_costs_its_own_update_alone(
    tmp_path: Path, gateway: str
) -> None:
    def dies(federation: SiteFederation, worker: str, order: asked.TrainRound) -> None:
        if worker == gateway and order.round == 2 and order.gathers:
            federation.queue.append(fed.ClientLost(worker, "killed"))

    silent = frozenset({(gateway, 2, "sum")})
    sites = finished(made(tmp_path / "sites", silent=silent, on_order=dies))
    dropped = [sorted(fact.dropped) for fact in sites.facts()]
    assert dropped == [[], [], [gateway], [], []]
    assert len(sites.asks) == 5
    directly = [
        (who, o.order) for who, o in sites.orders() if o.round == 2 and not o.gateway and not o.gathers
    ]
    site = [name for name in NAMES if SITES[name] == SITES[gateway] and name != gateway]
    assert directly == [(name, "") for name in site]
    # Who was asked again sent the file that it had, so nobody trained twice.
    assert {name: sites.trains[name] for name in site} == dict.fromkeys(site, 5)
    # It is gone for good: the next of its site sums in its place.
    later = {o.gateway for who, o in sites.orders() if o.round == 3 and who in site and not o.gathers}
    assert later == {min(site)}


def test_a_gateway_that_says_nothing_is_late_once_and_every_update_counts(tmp_path: Path) -> None:
    sites = finished(made(tmp_path / "sites", silent=frozenset({("w1", 1, "sum")})))
    assert [fact.dropped for fact in sites.facts()] == [{}] * 5
    assert same(sites.weights(), flat(tmp_path / "flat").weights())
    assert sorted(sites.asks[1].updates) == ["w1", "w2", "w3"]
    assert sorted(sites.asks[1].sums) == ["sum of w4"]


def test_a_client_whose_gateway_cannot_reach_it_sends_for_itself_from_then_on(tmp_path: Path) -> None:
    sites = finished(made(tmp_path / "sites", unreachable=frozenset({"w3"})))
    assert same(sites.weights(), flat(tmp_path / "flat").weights())
    assert [sorted(ask.updates) for ask in sites.asks] == [["w3"]] * 5
    assert [who for who, order in sites.orders() if order.gateway and who == "w3"] == ["w3"]


def test_a_client_that_trains_never_holds_its_site_beyond_the_deadline(tmp_path: Path) -> None:
    sites = finished(made(tmp_path / "sites", silent=frozenset({("w2", 0, "train"), ("w4", 3, "train")})))
    dropped = [sorted(fact.dropped) for fact in sites.facts()]
    assert dropped == [["w2"], [], [], ["w4"], []]
    assert sorted(sites.asks[0].sums["sum of w1"].samples) == ["w1", "w3"]


@pytest.mark.parametrize("claims", [True, False])
def test_a_gateway_can_leave_nobody_out_and_add_nobody(tmp_path: Path, claims: bool) -> None:
    class Lies(SiteFederation):
        """The gateway claims a client of the other site, or leaves w2 out whose update is in its sum."""

        def tells(self, worker: str, message: Any) -> None:
            host = getattr(message, "host", None)
            if worker == "w1" and host is not None:
                rows = {**host.rows, "w5": host.rows["w3"]} if claims else dict(host.rows)
                if not claims:
                    del rows["w2"]
                message = replace(message, host=replace(host, rows=rows))
            super().tells(worker, message)

    sites = Lies(tmp_path / "sites", NAMES, {"gateways": "auto", "local_steps": 2, "evaluate_every": 0})
    finished(sites)
    dropped = sites.facts()[0].dropped
    # A sum over more samples than its members have is not counted, and neither are they.
    assert sorted(dropped) == ([] if claims else ["w1", "w3"])
    assert all(why.startswith("sum of w1: ") for why in dropped.values())
    assert sorted(sites.asks[0].updates) == (["w1", "w2", "w3"] if claims else ["w2"])
    assert all(not fact.dropped for fact in sites.facts()[1:])
    if not claims:  # who failed as a gateway sends for itself
        assert all(sorted(ask.updates) == ["w1", "w2", "w3"] for ask in sites.asks[1:])


def test_only_a_gateway_that_the_data_owner_allows_sees_an_update(tmp_path: Path) -> None:
    allowed: dict[str, tuple[str, ...]] = {"w1": (), "w2": (), "w3": (), "w4": (), "w6": ("w4",)}
    sites = finished(made(tmp_path / "sites", allowed=allowed))
    assert {(who, order.gateway) for who, order in sites.orders() if order.gateway} == {
        ("w4", "w4"), ("w5", "w4"), ("w6", "w4"),
    }  # fmt: skip
    assert all(sorted(ask.updates) == ["w1", "w2", "w3"] for ask in sites.asks)
    assert same(sites.weights(), flat(tmp_path / "flat").weights())


def test_gateways_by_name_sum_for_their_sites_alone(tmp_path: Path) -> None:
    sites = finished(made(tmp_path / "sites", gateways="w3"))
    assert all(sorted(ask.sums) == ["sum of w3"] for ask in sites.asks)
    assert all(sorted(ask.updates) == ["w4", "w5", "w6"] for ask in sites.asks)
