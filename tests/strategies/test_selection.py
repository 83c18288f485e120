"""Who takes part, and at which ratio: selectors and BCRS."""

from __future__ import annotations

from collections import Counter
from math import log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from strategies.bandwidth_aware import BandwidthAware
from strategies.bcrs import PLANNED, Uplink, bcrs, even_base
from strategies.oort import Oort, OortState, Seen
from strategies.power_of_choice import PowerOfChoice
from strategies.selection import (
    UNKNOWN_S,
    Candidate,
    Outcome,
    Selector,
    candidates_of,
    draw,
    generator,
    smoothed,
)
from strategies.selectors import SELECTORS

TEN = {f"c{i}": Candidate(n_samples=10 * (i + 1), seconds=1.0 + i) for i in range(10)}
ALL = [kind() for kind in SELECTORS.values()]
every_selector = pytest.mark.parametrize("selector", ALL, ids=lambda selector: selector.name)


@every_selector
def test_a_choice_follows_from_seed_and_round_whatever_the_order_of_candidates(
    selector: Selector,
) -> None:
    losses = {name: float(len(name) + at % 3) for at, name in enumerate(TEN)}
    turned = dict(reversed(TEN.items()))
    seen = set()
    for at_round in range(20):
        one, _ = selector.choose(selector.init(), TEN, 4, at_round, 7, losses)
        two, _ = selector.choose(selector.init(), turned, 4, at_round, 7, losses)
        assert one == two == tuple(sorted(set(one)))
        assert len(one) == 4
        assert set(one) <= set(TEN)
        seen.add(one)
    assert len(seen) > 1


@every_selector
def test_with_too_few_candidates_all_take_part(selector: Selector) -> None:
    few = {name: TEN[name] for name in ("c3", "c1")}
    assert selector.choose(selector.init(), few, 5, 0, 0, {})[0] == ("c1", "c3")
    assert selector.choose(selector.init(), {}, 5, 0, 0, {})[0] == ()


def test_a_draw_is_by_weight_without_replacement() -> None:
    source = np.random.default_rng(0)
    counts = Counter(name for _ in range(4000) for name in draw({"a": 1.0, "b": 3.0, "c": 0.0}, 1, source))
    assert counts["b"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert counts["c"] == 0
    assert draw({"a": 1.0, "b": 0.0}, 2, source) == ("a", "b")


def test_power_of_choice_keeps_the_highest_losses_of_those_it_asked() -> None:
    selector = PowerOfChoice(factor=2.0)
    asked = selector.ask(TEN, 3, 5, 1)
    assert len(asked) == 6
    losses = {name: float(at) for at, name in enumerate(asked)} | {"c0": 100.0 if "c0" not in asked else 0.0}
    assert selector.choose(None, TEN, 3, 5, 1, losses)[0] == tuple(sorted(asked[-3:]))
    broken = {**losses, asked[-1]: float("nan")}
    assert selector.choose(None, TEN, 3, 5, 1, broken)[0] == tuple(sorted(asked[-4:-1]))


@settings(max_examples=25, deadline=None)
@given(
    seconds=st.lists(st.floats(0.1, 1000.0), min_size=2, max_size=12),
    count=st.integers(1, 5),
    wait=st.integers(1, 8),
    seed=st.integers(0, 100),
)
def test_bandwidth_aware_leaves_nobody_out_for_longer_than_its_bound(
    seconds: list[float], count: int, wait: int, seed: int
) -> None:
    candidates = {f"c{at}": Candidate(seconds=s) for at, s in enumerate(seconds)}
    selector, bound = BandwidthAware(max_wait=wait), max(wait, -(-len(seconds) // count))
    state, last = selector.init(), dict.fromkeys(candidates, -1)
    for at_round in range(4 * bound):
        chosen, state = selector.choose(state, candidates, count, at_round, seed)
        assert len(chosen) == min(count, len(seconds))
        last.update(dict.fromkeys(chosen, at_round))
        assert max(at_round - was for was in last.values()) < bound


def test_bandwidth_aware_prefers_fast_clients_within_its_bound() -> None:
    selector, state, counts = BandwidthAware(max_wait=20, power=2.0), {}, Counter[str]()
    for at_round in range(200):
        chosen, state = selector.choose(state, TEN, 2, at_round, 3)
        counts.update(chosen)
    assert counts["c0"] > 3 * counts["c9"] >= 3 * (200 // 20)


def test_oort_scores_are_their_formula() -> None:
    known = {
        "a": Seen(utility=4.0, at_round=2, seconds=1.0),
        "b": Seen(utility=2.0, at_round=8, seconds=4.0),
        "c": Seen(utility=3.0, at_round=8, seconds=2.0),
    }
    found = Oort().scores(known, percentile=50.0, now=10)
    top = float(np.quantile([4.0, 2.0, 3.0], 0.9))
    stale = [sqrt(0.1 * log(10) / at) for at in (2, 8, 8)]
    assert found["a"] == pytest.approx(1.0 + stale[0])
    assert found["b"] == pytest.approx((0.0 + stale[1]) * (2.0 / 4.0) ** 2)
    assert found["c"] == pytest.approx((3.0 - 2.0) / (top - 2.0) + stale[2])


def test_oort_explores_much_at_first_and_less_later() -> None:
    selector = Oort()
    seen = {f"c{i}": Seen(1.0 + i, 1, 1.0) for i in range(5)}
    candidates = {f"c{i}": Candidate() for i in range(30)}
    state = OortState(seen)
    early = selector.choose(state, candidates, 10, 0, 0)[0]
    late = selector.choose(state, candidates, 10, 200, 0)[0]
    assert sum(name not in seen for name in early) == 9
    assert sum(name not in seen for name in late) == 5  # all five known ones
    many = OortState({f"c{i}": Seen(1.0 + i, 1, 1.0) for i in range(20)})
    assert sum(name not in many.seen for name in selector.choose(many, candidates, 10, 200, 0)[0]) == 3


def test_oort_gives_time_when_utility_stands_still_and_takes_it_when_it_jumps() -> None:
    selector, state = Oort(), OortState()
    for at_round in range(40):
        state = selector.learn(state, at_round, {"a": Outcome(1.0, 10, 1.0)})
    assert state.percentile == 35.0
    for at_round in range(40, 60):
        state = selector.learn(state, at_round, {"a": Outcome(49.0, 10, 1.0)})
    assert state.percentile == 30.0
    assert selector.learn(state, 61, {"b": Outcome(float("nan"), 1, 1.0)}).seen.keys() == {"a"}


def test_who_was_not_measured_yet_is_taken_for_a_middling_one() -> None:
    samples = {"a": 10, "b": 20, "c": 30}
    found = candidates_of(samples, {"a": 10.0, "b": 0.0, "gone": 2.0, "gone too": 9.0})
    assert found == {"a": Candidate(10, 10.0), "b": Candidate(20, 9.0), "c": Candidate(30, 9.0)}
    assert {c.seconds for c in candidates_of(samples, {}).values()} == {UNKNOWN_S}
    assert smoothed(0.0, 5.0) == 5.0
    assert smoothed(1.0, 2.0) == pytest.approx(1.3)


def test_draws_of_two_uses_differ() -> None:
    assert generator(1, 2).random() != generator(1, 2, 1).random()
    with pytest.raises(UsageError, match="0 samples"):
        Candidate(n_samples=0)


LINKS = {f"c{i}": Uplink((1.0 + 2.0 * i) * 1e6, latency_s=0.02 * i) for i in range(10)}


def test_with_bcrs_all_finish_with_the_slowest_and_nobody_is_sparser_than_asked() -> None:
    found = bcrs(LINKS, dense_bytes=10e6, ratio=50.0)
    assert found.slowest == "c0"
    assert found.ratios["c0"] == 50.0
    assert found.bench_s == pytest.approx(8 * 10e6 / 50.0 / 1e6)
    for name, link in LINKS.items():
        assert 1.0 <= found.ratios[name] <= 50.0
        assert found.finish_s[name] == pytest.approx(found.bench_s, rel=1e-6)
        share = (found.bench_s - link.latency_s) * link.bandwidth_bps / 8 / 10e6
        assert 1 / found.ratios[name] == pytest.approx(share, rel=1e-6)
    assert "c0 50x" in found.reason


def test_bcrs_is_the_papers_formula_with_eight_bytes_a_kept_element() -> None:
    volume, kept = 4e6, 0.02

    def wire(ratio: float) -> float:  # "ratio" as one over the kept share
        return 2 * volume / ratio

    found = bcrs(LINKS, volume, 1 / kept, wire)
    bench = max(link.latency_s + 2 * volume * kept / (link.bandwidth_bps / 8) for link in LINKS.values())
    for name, link in LINKS.items():
        share = np.clip((bench - link.latency_s) * link.bandwidth_bps / 8 / (2 * volume), kept, 1.0)
        assert 1 / found.ratios[name] == pytest.approx(share, rel=1e-6)


def test_bcrs_sends_everything_where_that_is_in_time_and_counts_computation() -> None:
    links = {"slow": Uplink(1e6), "fast": Uplink(1e9), "busy": Uplink(1e6, compute_s=0.5)}
    found = bcrs(links, 1e6, 10.0)
    assert found.slowest == "busy"
    assert found.ratios["fast"] == 1.0
    assert found.ratios["slow"] == pytest.approx(8.0 / found.bench_s, rel=1e-6)
    assert found.whole == ("fast",)
    assert found.spread > 100.0
    assert "1 have time for all of it, the first is done at 0.008 s" in found.reason
    for bad in ({}, {"a": Uplink(0.0)}):
        with pytest.raises(UsageError, match="bcrs"):
            bcrs(bad, 1e6, 10.0)
    with pytest.raises(UsageError, match=r"ratio 0\.5"):
        bcrs(links, 1e6, 0.5)


def test_an_even_base_is_the_least_with_which_all_end_together() -> None:
    links = {f"c{i}": Uplink(2.0**i * 1e6, 0.01, 0.05 * i) for i in range(5)}
    base = even_base(links, 4e6)
    assert base is not None
    assert bcrs(links, 4e6, base).spread <= PLANNED * (1.0 + 1e-6)
    assert bcrs(links, 4e6, 0.95 * base).spread > PLANNED
    assert even_base({"a": Uplink(1e6), "b": Uplink(1e6)}, 4e6) == 1.0


def test_no_base_evens_out_a_download_that_takes_longer_than_all_the_rest() -> None:
    links = {"far": Uplink(1e6, compute_s=2.0), "near": Uplink(20e6, compute_s=0.1)}
    assert even_base(links, 1e6) is None
    found = bcrs(links, 1e6, 20.0)
    assert found.whole == ("near",)
    assert found.finish_s["near"] == pytest.approx(0.5)


@given(
    st.lists(st.tuples(st.floats(1e5, 1e8), st.floats(0.0, 2.0)), min_size=2, max_size=6),
    st.floats(1.0, 200.0),
)
def test_who_holds_something_back_ends_with_the_slowest(
    lines: list[tuple[float, float]], ratio: float
) -> None:
    links = {f"c{at}": Uplink(rate, compute_s=before) for at, (rate, before) in enumerate(lines)}
    found = bcrs(links, 1e6, ratio)
    for name in links:
        assert found.finish_s[name] <= found.bench_s * (1 + 1e-6)
        if name not in found.whole:
            assert found.finish_s[name] == pytest.approx(found.bench_s, rel=1e-6)
