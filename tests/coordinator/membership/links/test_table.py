import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership.links.table import LinkTable, infer_shared, judge_link, judge_step, judge_timing
from coordinator.planning.costs.fleet import Uplink


def test_the_first_probe_is_taken_whole_and_later_ones_by_half():
    table = LinkTable()
    assert table.probed("a", "b", 10e6, 0.080) is None
    assert table.probed("a", "b", 20e6, 0.040) is None
    link = table.get("a", "b")
    assert link.bandwidth_bps == pytest.approx(15e6)
    assert link.latency_s == pytest.approx(0.030)


def test_each_direction_has_its_own_estimate_and_stands_in_for_the_other():
    table = LinkTable()
    table.probed("a", "b", 10e6, 0.02)
    assert table.get("b", "a") == table.get("a", "b")
    table.probed("b", "a", 50e6, 0.02)
    assert table.get("b", "a").bandwidth_bps == 50e6
    assert table.get("a", "c") is None


def test_goodput_moves_the_rate_slowly_and_little_traffic_only_the_latency():
    table = LinkTable()
    table.probed("a", "b", 10e6, 0.02)
    table.carried("a", "b", 2_500_000, 1.0, 0.02)
    assert table.get("a", "b").bandwidth_bps == pytest.approx(11e6)
    table.carried("a", "b", 1000, 1.0, 0.12)
    assert table.get("a", "b").bandwidth_bps == pytest.approx(11e6)
    assert table.get("a", "b").latency_s == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("bandwidth", "rtt"),
    [(0, 0.1), (-1e6, 0.1), (1e15, 0.1), (math.nan, 0.1), (1e6, -0.1), (1e6, 1e6), (1e6, math.nan)],
)
def test_impossible_links_are_refused_with_the_reason_and_change_nothing(bandwidth, rtt):
    table = LinkTable()
    reason = table.probed("w1", "w2", bandwidth, rtt)
    assert reason is not None
    assert "w1 reports" in reason
    assert table.get("w1", "w2") is None


@given(st.floats(), st.floats(), st.integers(), st.floats())
def test_no_report_makes_an_unusable_estimate(bandwidth, rtt, n_bytes, busy):
    table = LinkTable()
    table.probed("a", "b", bandwidth, rtt)
    table.carried("a", "b", n_bytes, busy, rtt)
    link = table.get("a", "b")
    assert link is None or judge_link("a", "b", link.bandwidth_bps, 2 * link.latency_s) is None


def test_a_worker_that_is_too_fast_to_be_true_is_recognised():
    assert judge_timing("w1", "aten.mm.default", 0.001, int(1e9)) is None
    assert "TFLOP/s" in judge_timing("w1", "aten.mm.default", 1e-6, int(1e13))
    assert "possible are" in judge_timing("w1", "aten.mm.default", -1.0, 10)
    assert judge_step("w1", 1.0, 1.2) is None
    assert "busy seconds" in judge_step("w1", 10.0, 1.0)
    assert "busy seconds" in judge_step("w1", math.nan, 1.0)


def test_a_worker_that_left_is_forgotten():
    table = LinkTable()
    table.probed("a", "b", 1e6, 0.1)
    table.probed("b", "c", 1e6, 0.1)
    table.forget("a")
    assert list(table.estimates) == [("b", "c")]


def test_flows_that_reach_their_rate_only_one_at_a_time_share_an_uplink():
    solo = {("a", "x"): 10e6, ("a", "y"): 10e6}
    (uplink,) = infer_shared(solo, [{("a", "x"): 5e6, ("a", "y"): 5e6}], {})
    assert uplink.members == ("a",)
    assert uplink.up_bps == 10e6
    assert uplink.down_bps == math.inf


def test_flows_that_hinder_each_other_share_what_one_had_alone() -> None:
    solo = {("a", "x"): 8e6, ("b", "y"): 7.9e6, ("c", "x"): 8.2e6}
    sites = {"a": "home", "b": "home", "c": "home", "x": "", "y": ""}
    (uplink,) = infer_shared(solo, [{("a", "x"): 3e6, ("b", "y"): 2.5e6}], sites)
    assert (uplink.members, uplink.up_bps) == (("a", "b", "c"), 8e6)
    # Another flow out of it is far faster: what the two shared is somewhere else.
    (uplink,) = infer_shared({**solo, ("c", "z"): 80e6}, [{("a", "x"): 3e6, ("b", "y"): 2.5e6}], sites)
    assert uplink.up_bps == 80e6


def test_flows_inside_a_site_say_nothing_of_its_line_to_the_outside() -> None:
    sites = {"a": "one", "b": "one", "c": "one", "x": "two", "y": "two"}
    solo = {("a", "x"): 8e6, ("b", "y"): 8e6, ("a", "c"): 198e6, ("b", "c"): 199e6}
    together = [{("a", "x"): 4e6, ("b", "y"): 4e6}, {("a", "c"): 54e6, ("b", "c"): 80e6}]
    for order in (together, together[::-1]):
        found = {line.members: (line.up_bps, line.down_bps) for line in infer_shared(solo, order, sites)}
        assert found["a", "b", "c"][0] == 8e6
        assert found["c",] == (math.inf, 199e6)


def test_flows_that_do_not_disturb_each_other_share_nothing():
    solo = {("a", "x"): 10e6, ("b", "y"): 10e6}
    assert infer_shared(solo, [{("a", "x"): 9.5e6, ("b", "y"): 9.8e6}], {}) == ()


def test_a_site_shares_what_its_members_reach_together_or_else_the_best_alone():
    sites = {"a": "home", "b": "home", "x": ""}
    solo = {("a", "x"): 10e6, ("b", "x"): 8e6, ("x", "a"): 30e6, ("a", "b"): 1e9}
    (guessed,) = infer_shared(solo, [], sites)
    assert guessed.name == "home"
    assert guessed.members == ("a", "b")
    assert (guessed.up_bps, guessed.down_bps) == (10e6, 30e6)


def test_a_rate_that_the_quickest_bytes_contradict_is_no_other_line():
    table = LinkTable()
    table.probed("a", "b", 200e6, 0.003)
    assert table.carried("a", "b", 1_250_000, 1.0, 0.003, 150e6) is None
    assert table.get("a", "b").bandwidth_bps == 200e6
    table.carried("a", "b", 1_250_000, 1.0, 0.003, 20e6)
    assert table.get("a", "b").bandwidth_bps == pytest.approx(182e6)
    for impossible in (math.nan, math.inf, -1.0):
        assert "quickest" in table.carried("a", "b", 1_250_000, 1.0, 0.003, impossible)


def test_messages_that_take_longer_than_foretold_are_drag_not_another_rate():
    table = LinkTable()
    table.probed("a", "b", 10e6, 0.02)
    table.carried("a", "b", 1_000_000, 1.0, 0.02)  # 8 Mbit/s
    assert table.get("a", "b").bandwidth_bps == 10e6
    for seconds in (1.02, 1.06):
        table.dragged(("a", "b"), 1.0, 1.0, seconds)
    assert table.drags()["a", "b"] == pytest.approx(1.04)
    table.dragged(("c", "d"), 1.0, 1.0, 1.08)
    assert table.usual_drag() == pytest.approx(1.06), "a pair that has not trained: the median"
    # The plan knew a drag of 1.04 and was right: nothing changes.
    table.dragged(("a", "b"), 1.04, 2.0, 2.0)
    assert table.drags()["a", "b"] == pytest.approx(1.04)


@given(st.floats(), st.floats(), st.floats(1.0, 1.1))
def test_drag_stays_in_its_range_whatever_is_reported(predicted, measured, planned):
    table = LinkTable()
    table.dragged(("a", "b"), planned, predicted, measured)
    assert all(1.0 <= drag <= 1.1 for drag in table.drags().values())


def test_a_rate_that_is_less_than_a_quarter_is_another_line():
    table = LinkTable()
    table.probed("a", "b", 10e6, 0.02)
    table.carried("a", "b", 250_000, 1.0, 0.02)
    assert table.get("a", "b").bandwidth_bps == pytest.approx(9.2e6)


def test_a_shared_line_is_dragged_as_little_as_the_best_pair_on_it():
    table = LinkTable()
    table.dragged(("a", "x"), 1.0, 1.0, 1.05)
    table.dragged(("b", "x"), 1.0, 1.0, 1.6)
    line = table.dragged_line(Uplink("home", ("a", "b"), 12e6, 48e6))
    assert (line.up_bps, line.down_bps) == (pytest.approx(12e6 / 1.05), 48e6)
