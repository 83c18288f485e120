"""Which links are measured when: nothing twice, nothing that disturbs what is measured beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import Probing
from coordinator.membership.links.probing import Kind, LinkProbing, Measurement
from coordinator.messages.events import LinkProbed
from coordinator.planning.costs.fleet import Pair


def anybody(one: str, other: str) -> bool:
    """Every machine accepts connections."""
    return one != other


@dataclass
class Net:
    """Hosts behind lines: ``line[host]`` names it, ``up`` and ``down`` its rates, payload bit/s."""

    line: Mapping[str, str]
    up: Mapping[str, float]
    down: Mapping[str, float]
    near_s: float = 0.005
    far_s: float = 0.06
    probing: LinkProbing = field(default_factory=lambda: LinkProbing(Probing()))
    now_s: float = 0.0
    requests: int = 0
    rounds: list[list[Measurement]] = field(default_factory=list)

    def rtt_s(self, pair: Pair) -> float:
        return self.near_s if self.line[pair[0]] == self.line[pair[1]] else self.far_s

    def rates(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """A line's flows share it alike."""
        ups = [self.line[a] for a, b in pairs if self.line[a] != self.line[b]]
        downs = [self.line[b] for a, b in pairs if self.line[a] != self.line[b]]
        found = {}
        for a, b in pairs:
            x, y = self.line[a], self.line[b]
            shares = (self.up[x] / ups.count(x), self.down[y] / downs.count(y)) if x != y else (1e9,)
            found[a, b] = min(shares)
        return found

    def measure(self, workers: Sequence[str]) -> float:
        """Answer everything that is asked; returns the seconds it took."""
        begun_s = self.now_s
        while True:
            due = self.probing.due(list(workers), anybody, self.now_s, False)
            if not due:
                assert not self.probing.busy
                return self.now_s - begun_s
            self.rounds.append(due)
            asked = []
            for measurement in due:
                asked += self.probing.begin(measurement, self.requests + 1, self.now_s)
                self.requests += len(measurement.pairs)
            flowing = [(r.source, r.target) for r in asked if r.rate]
            rates = self.rates(flowing)
            self.now_s += 1.7 if flowing else 2.0
            for r in asked:
                pair = (r.source, r.target)
                message = LinkProbed(r.request, r.target, self.rtt_s(pair), rates.get(pair, 0.0))
                assert self.probing.answered(r.source, message, self.now_s) is None


def homes(count: int) -> Net:
    names = [f"h{i}" for i in range(count)]
    ups = {name: 20e6 + 10e6 * (i % 5) for i, name in enumerate(names)}
    return Net(dict(zip(names, names, strict=True)), ups, dict.fromkeys(names, 100e6))


def islands() -> Net:
    line = {"f1": "fast", "f2": "fast", "s1": "slow", "s2": "slow"}
    return Net(line, {"fast": 8e6, "slow": 8e6}, {"fast": 8e6, "slow": 8e6})


@pytest.mark.parametrize("net", [homes(6), islands()], ids=["homes", "islands"])
def test_every_pair_gets_the_rate_that_it_has_alone(net: Net):
    net.measure(list(net.line))
    for pair, bps in net.probing.solo_bps.items():
        assert bps == net.rates([pair])[pair]
    assert len(net.probing.solo_bps) == len(net.line) * (len(net.line) - 1)


def test_eight_homes_are_known_in_well_under_a_minute():
    net = homes(8)
    took_s = net.measure(list(net.line))
    assert took_s < 50.0


def test_two_rates_at_once_have_no_worker_and_no_line_in_common():
    for net in (homes(7), islands()):
        net.measure(list(net.line))
        for measurements in net.rounds:
            ends = [{w for pair in m.pairs for w in pair} for m in measurements if m.kind is not Kind.LOOK]
            lines = [{net.line[w] for w in some} for some in ends]
            assert all(a.isdisjoint(b) for i, a in enumerate(ends) for b in ends[:i])
            assert all(a.isdisjoint(b) for i, a in enumerate(lines) for b in lines[:i])


def test_round_trips_are_looked_at_before_any_rate():
    net = homes(5)
    net.measure(list(net.line))
    kinds = [{m.kind for m in measurements} for measurements in net.rounds]
    order = [kind for some in kinds for kind in some]
    assert all(len(some) == 1 for some in kinds)
    assert order == sorted(order, key=list(Kind).index)


def test_a_home_s_own_line_is_read_in_both_directions():
    net = homes(4)
    net.measure(list(net.line))
    found = {u.members: u for u in net.probing.uplinks(dict.fromkeys(net.line, ""))}
    assert found["h0",].up_bps == pytest.approx(20e6)
    # Three others can send it 120 Mbit/s together: two of them do not fill 100.
    assert set(found) == {(name,) for name in net.line}


def test_islands_share_their_line_and_no_host_has_one_of_its_own():
    net = islands()
    net.measure(list(net.line))
    found = {u.members: u for u in net.probing.uplinks(dict.fromkeys(net.line, ""))}
    assert set(found) == {("f1", "f2"), ("s1", "s2")}
    assert all(u.up_bps == pytest.approx(8e6) for u in found.values())


def test_machines_of_one_declared_site_are_never_measured_at_once():
    net = homes(4)
    sites = dict.fromkeys(net.line, "") | {"h0": "flat", "h2": "flat"}
    net.probing.looked_s.update({frozenset((a, b)): 0.06 for a in net.line for b in net.line if a != b})
    assert len(net.probing.due(list(net.line), anybody, 0.0, False)) == 2
    # Any two disjoint pairs of four: each holds one of the flat's, or one holds both.
    sites["h1"] = "flat"
    assert len(net.probing.due(list(net.line), anybody, 0.0, False, sites)) == 1


def test_a_pair_that_does_not_answer_is_given_up_and_the_others_go_on():
    probing = LinkProbing(Probing(attempts=2))
    workers = ["a", "b", "c"]
    requests, now_s = 0, 0.0
    for _ in range(60):
        due = probing.due(workers, anybody, now_s, False)
        asked = []
        for measurement in due:
            asked += probing.begin(measurement, requests + 1, now_s)
            requests += len(measurement.pairs)
        now_s += 100.0
        for r in asked:
            if "a" in (r.source, r.target):
                continue
            probing.answered(r.source, LinkProbed(r.request, r.target, 0.05, 1e7), now_s - 99.0)
        probing.expire(now_s)
    assert not probing.busy
    assert set(probing.solo_bps) == {("b", "c"), ("c", "b")}
    assert probing.table.estimates["a", "b"].bandwidth_bps == 1e3


def test_two_that_accept_no_connections_are_not_measured_and_plans_avoid_them():
    probing = LinkProbing(Probing())
    (measurement,) = probing.due(["a", "b", "c"], lambda *pair: "c" in pair, 0.0, False)[:1]
    assert "c" in measurement.pairs[0]
    assert probing.table.estimates["a", "b"].bandwidth_bps == 1e3
    assert probing.table.probed("a", "b", 1e7, 0.05) is None
    assert probing.table.estimates["a", "b"].bandwidth_bps == 1e7


def test_a_worker_that_leaves_in_the_middle_of_a_probe_leaves_nothing_behind():
    net = homes(3)
    net.measure(list(net.line))
    net.probing.together.clear()
    (measurement,) = net.probing.due(list(net.line), anybody, net.now_s, False)
    requests = net.probing.begin(measurement, 1000, net.now_s)
    gone = requests[0].target
    net.probing.forget(gone)
    for r in requests:
        net.probing.answered(r.source, LinkProbed(r.request, r.target, 0.05, 1e7), net.now_s)
    assert not net.probing.busy
    assert not net.probing.together
    assert all(gone not in pair for pair in net.probing.solo_bps)


@given(st.lists(st.sampled_from("xyz"), min_size=2, max_size=7), st.integers(2, 8))
def test_any_layout_ends_with_every_pair_measured_at_its_own_rate(lines: list[str], at_once: int):
    line = {f"w{i}": name for i, name in enumerate(lines)}
    rates = {"x": 10e6, "y": 30e6, "z": 50e6}
    net = Net(line, rates, rates, probing=LinkProbing(Probing(probes_at_once=at_once)))
    net.measure(list(line))
    assert len(net.probing.solo_bps) == len(line) * (len(line) - 1)
    assert all(bps == net.rates([pair])[pair] for pair, bps in net.probing.solo_bps.items())
