"""How a federated job sets its clients' ratios from what it measured of their lines."""

from __future__ import annotations

import pytest

from atoll.opdag import TensorMeta
from coordinator.federated import selection
from coordinator.federated.selection import BASE
from coordinator.messages import instructions as do
from strategies.bcrs import EVEN, PLANNED, Uplink
from tests.coordinator.federated.lone_machine import UP, LoneMachine, spec, update


def test_bcrs_gives_the_fast_line_more_of_its_update() -> None:
    world = LoneMachine(spec(uplink="bcrs:32", evaluate_every=0))
    world.begin("a", "b")
    first = {name: world.heard(name, do.TrainRound)[0] for name in ("a", "b")}
    assert {m.codec for m in first.values()} == {"topk"}
    assert all(m.ratio == 32.0 for m in first.values())
    world.says("a", update("a", 0, upload_bytes=40_000, upload_s=0.01))
    world.says("b", update("b", 0, upload_bytes=40_000, upload_s=0.4))
    second = {name: world.heard(name, do.TrainRound)[1] for name in ("a", "b")}
    assert second["b"].ratio > 28.0
    assert second["a"].ratio < 10.0
    assert "b" in world.state.pace


def evenly() -> LoneMachine:
    """Two clients whose lines are known, as their second round begins."""
    world = LoneMachine(spec(uplink="bcrs", evaluate_every=0))
    world.begin("a", "b", a=0.001, b=0.005)
    for name, upload_s in (("a", 0.2), ("b", 0.8)):
        world.now_s += 0.5
        moved = {"upload_bytes": 40_000, "upload_s": upload_s, "download_bytes": 0}
        world.says(name, update(name, 0, train_s=0.3, **moved))
    return world


def test_bcrs_without_a_ratio_holds_the_slowest_back_until_all_end_together() -> None:
    world = evenly()
    first = {name: world.heard(name, do.TrainRound)[0] for name in ("a", "b")}
    assert {m.ratio for m in first.values()} == {BASE}, "no line was measured yet"
    second = {name: world.heard(name, do.TrainRound)[1] for name in ("a", "b")}
    assert second["a"].ratio == 1.0, "no more than all it has"
    assert 1.0 < second["b"].ratio < BASE
    lines = {name: selection._uplink(world.state, name) for name in ("a", "b")}
    ends = [lines[name].finish_s(selection.update_bytes(UP, m.ratio)) for name, m in second.items()]
    assert max(ends) / min(ends) - 1.0 == pytest.approx(PLANNED, abs=1e-3)


def test_a_line_is_as_fast_with_small_updates_as_with_large_ones() -> None:
    world = LoneMachine(spec(uplink="bcrs:4", evaluate_every=0))
    world.begin("a", a=0.05)
    for at, n_bytes in enumerate((1_000_000, 50_000, 10_000)):
        upload_s = 0.1 + 8 * n_bytes / 1e6
        world.says("a", update("a", at, upload_bytes=n_bytes, upload_s=upload_s))
        assert world.state.clients["a"].uplink_bps == pytest.approx(1e6)


def test_lines_that_carried_for_a_few_round_trips_only_are_not_waited_for() -> None:
    ratios = {}
    for latency_s in (0.01, 0.1):
        world = LoneMachine(spec(uplink="bcrs", evaluate_every=0))
        world.begin("a", "b", a=latency_s, b=latency_s)
        world.now_s += 1.0
        world.says("a", update("a", 0, upload_bytes=40_000, upload_s=0.5))
        world.says("b", update("b", 0, upload_bytes=40_000, upload_s=1.0))
        ratios[latency_s] = world.heard("b", do.TrainRound)[1].ratio
    assert ratios[0.01] < 0.5 * BASE, "both have to hold hardly anything back to end together"
    assert ratios[0.1] == BASE, "how fast the first is was not seen"


@pytest.mark.parametrize(("late", "planned"), [(0.0, PLANNED), (0.06, 0.09), (0.14, selection.CLOSEST)])
def test_finish_times_that_stray_are_planned_closer(late: float, planned: float) -> None:
    world = evenly()
    begun_s, first_s = world.now_s, 1.0
    assert world.state.spread == pytest.approx(PLANNED, abs=1e-3)
    for name, took_s in (("a", first_s), ("b", first_s * (1.0 + PLANNED + late))):
        world.now_s = begun_s + took_s
        n_bytes = int(selection.update_bytes(UP, world.state.ratios[name][1]))
        upload_s = 8 * n_bytes / world.state.clients[name].uplink_bps
        moved = {"upload_bytes": n_bytes, "upload_s": upload_s, "download_bytes": 0}
        world.says(name, update(name, 1, train_s=0.3, **moved))
    assert world.state.round == 2
    assert 0.0 <= world.state.strayed <= EVEN
    assert world.state.spread == pytest.approx(planned, abs=2e-3)


def test_finish_times_are_planned_as_closely_as_lines_allow() -> None:
    up = (TensorMeta((500, 400), "float32"),)

    def spread(slow_s: float) -> float:
        # With hardly anything the slow one needs so much longer than the fast one with all it has.
        lines = {"fast": Uplink(20e6, compute_s=0.0), "slow": Uplink(20e6, compute_s=0.16 * (1.0 + slow_s))}
        return selection.by_uplink(up, lines, None, 0.05).spread

    assert spread(0.0) == pytest.approx(0.05, abs=2e-3)
    assert spread(0.08) == pytest.approx(PLANNED, abs=2e-3)
    assert spread(0.13) == pytest.approx(EVEN, abs=2e-3)
    assert spread(0.3) > 0.3, "nothing evens that out"


def test_an_upload_counts_by_its_seconds() -> None:
    world = LoneMachine(spec(uplink="bcrs:4", evaluate_every=0))
    world.begin("a", a=0.0)
    for at, (n_bytes, upload_s) in enumerate(((10_000, 0.1), (1_000_000, 1.0), (1_000_000, 2.0))):
        world.now_s += upload_s
        world.says("a", update("a", at, upload_bytes=n_bytes, upload_s=upload_s))
    first, second, third = (0.7 * 0.7 * 0.1, 0.8e6), (0.7 * 1.0, 8e6), (2.0, 4e6)
    seconds = first[0] + second[0] + third[0]
    expected = sum(weight * rate for weight, rate in (first, second, third)) / seconds
    assert world.state.clients["a"].uplink_bps == pytest.approx(expected)


def test_no_claim_of_a_long_upload_outweighs_what_was_seen() -> None:
    world = LoneMachine(spec(uplink="bcrs:4", evaluate_every=0))
    world.begin("a", a=0.0)
    for at, upload_s in enumerate((1e3, 1.0)):
        world.now_s += 1.0
        world.says("a", update("a", at, upload_bytes=1_000_000, upload_s=upload_s))
    assert world.state.clients["a"].uplink_bps > 4e6


def test_bcrs_plans_whole_rounds_the_download_among_them() -> None:
    world = LoneMachine(spec(uplink="bcrs:32", evaluate_every=0))
    world.begin("a", "b", "c")
    moved = {"upload_bytes": 40_000, "upload_s": 0.1, "download_bytes": 50_000}
    for name, down_s in (("a", 0.02), ("b", 0.02), ("c", 1.0)):
        world.says(name, update(name, 0, download_s=down_s, **moved))
    second = {name: world.heard(name, do.TrainRound)[1] for name in "abc"}
    assert second["c"].ratio > 28.0, "the uplinks are alike; it has the least time left to send in"
    assert second["a"].ratio == second["b"].ratio < 10.0
    assert "c" in world.state.pace


def test_a_model_that_a_client_holds_takes_it_no_time() -> None:
    world = LoneMachine(spec(uplink="bcrs:32", evaluate_every=1))
    world.begin("a", "b")
    moved = {"upload_bytes": 40_000, "upload_s": 0.1, "download_bytes": 50_000}
    for name, down_s in (("a", 0.02), ("b", 5.0)):
        world.says(name, update(name, 0, download_s=down_s, **moved))
    world.evaluates("a")
    world.evaluates("b")
    second = {name: world.heard(name, do.TrainRound)[1] for name in "ab"}
    # Both fetched the model when they evaluated it.
    assert all(28.0 < order.ratio <= 32.0 for order in second.values())
    assert world.state.clients["b"].download_s == 5.0
