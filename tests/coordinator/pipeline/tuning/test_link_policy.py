"""Links followed from noisy transfers: down in 10 steps, up in 30, never for noise alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.compression import ADATOPK, AUTO, Compression
from atoll.job import TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import LinkPrediction, LinkSpec, Plan, Prediction, StageSpec, one_replica
from coordinator.config import Adaptation
from coordinator.pipeline.tuning import link_policy
from coordinator.pipeline.tuning.link_policy import CAPS, Decision, State, Watch
from coordinator.pipeline.tuning.link_rates import Link, Sample, measure, why_off
from coordinator.planning import TUNED
from coordinator.planning.codecs.auto_codecs import specs_for
from coordinator.planning.codecs.ratios import assumed_ratio
from tests.coordinator.planning.codecs.test_ratios import chain, values

PAIR = ("a", "b")
SETTINGS = Adaptation()
DENSE_BYTES = 2_000_000  # a step
COMPUTE_S = 0.4
MICRO = 4


@dataclass
class Wire:
    """One link whose codec gives it what the assumed rate carries within the compute time.

    What is decided holds ``effect_steps`` later, as in life.
    """

    bps: float
    seed: int = 1
    noise: float = 0.0
    overhead_s: float = 0.0  # a message: what small ones are bound by
    compute_s: float = COMPUTE_S
    most_ratio: float = 1000.0
    step: int = 0
    now: float = 0.0
    state: State = field(init=False)
    due: list[tuple[int, float]] = field(default_factory=list)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.state = link_policy.begin({PAIR: self.bps})
        self.assumed = self.bps

    def ratio(self) -> float:
        dense_s = 8 * DENSE_BYTES / self.assumed
        return min(self.most_ratio, max(1.0, dense_s / self.compute_s))

    def run(self, steps: int) -> Wire:
        for _ in range(steps):
            while self.due and self.due[0][0] <= self.step:
                self.assumed = self.due.pop(0)[1]
            ratio = self.ratio()
            n_bytes = int(DENSE_BYTES / ratio)
            seen = self.bps * (1 + self.random.uniform(-self.noise, self.noise))
            busy_s = 8 * n_bytes / seen + MICRO * self.overhead_s
            step_s = max(self.compute_s, busy_s) + 0.02
            self.step += 1
            sample = Sample(n_bytes, busy_s, 0.002, MICRO, ratio > 1.0)
            self.state, decision = link_policy.observe(
                self.state, self.step, step_s, {PAIR: sample}, SETTINGS
            )
            if decision is not None:
                self.decisions.append((self.step, decision))
                self.due.append((self.step + SETTINGS.effect_steps, decision.rates_bps[PAIR]))
                self.state = link_policy.answered(self.state, True, SETTINGS)
            self.ratios.append(ratio)
            self.steps_s.append(step_s)
        return self


@pytest.mark.parametrize("seed", range(8))
def test_a_link_that_falls_to_a_tenth_is_followed_within_ten_steps(seed: int) -> None:
    wire = Wire(50e6, seed, noise=0.15).run(20)
    wire.bps = 5e6
    wire.run(10)
    assert wire.assumed == pytest.approx(5e6, rel=0.2)
    assert wire.ratios[-1] == pytest.approx(8, rel=0.25)
    assert "Mbit/s" in wire.decisions[-1][1].reason
    assert "a > b" in wire.decisions[-1][1].reason


@pytest.mark.parametrize("seed", range(8))
def test_a_link_that_is_fast_again_is_followed_within_thirty_steps(seed: int) -> None:
    wire = Wire(50e6, seed, noise=0.15).run(20)
    wire.bps = 5e6
    wire.run(20)
    wire.bps = 50e6
    wire.run(30)
    assert wire.assumed == pytest.approx(50e6, rel=0.25)
    assert wire.ratios[-1] == 1.0


@pytest.mark.parametrize("overhead_s", [0.003, 0.008])
def test_messages_slowed_by_latency_still_find_that_the_link_got_faster(overhead_s: float) -> None:
    wire = Wire(5e6, 3, noise=0.1, overhead_s=overhead_s).run(20)
    wire.bps = 50e6
    wire.run(30)
    assert wire.ratios[-1] < 1.5


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rate", [2e6, 20e6, 200e6])
def test_noise_of_fifteen_percent_changes_nothing_in_500_steps(seed: int, rate: float) -> None:
    wire = Wire(rate, seed, noise=0.15).run(500)
    assert wire.decisions == []


def test_a_link_whose_messages_are_too_small_to_tell_keeps_its_codec() -> None:
    # 6 KB a message, of which the line's own rate is the smallest part: 3.8 Mbit/s are seen of 50.
    wire = Wire(5e6, compute_s=0.04, overhead_s=0.012)
    wire.bps = 50e6
    assert wire.run(60).decisions == []


def test_a_silent_link_that_becomes_slow_is_noticed_by_the_step_that_suffers() -> None:
    wire = Wire(50e6, compute_s=0.05, overhead_s=0.0).run(1)
    wire.state = link_policy.begin({PAIR: 50e6})
    wire.run(12)
    assert not wire.state.links[PAIR].telling
    wire.bps = 15e6
    wire.run(12)
    assert wire.assumed < 25e6


def test_one_outlier_changes_nothing() -> None:
    wire = Wire(20e6).run(30)
    wire.bps = 2e6
    wire.run(1)
    wire.bps = 20e6
    wire.run(30)
    assert wire.decisions == []


def test_steps_that_carry_little_are_taken_together() -> None:
    link = Link(1e6)
    for _ in range(6):
        link, counted = measure(link, Sample(10_000, 0.1, 0.0), SETTINGS)
        assert not counted
    link, counted = measure(link, Sample(10_000, 0.1, 0.0), SETTINGS)
    assert counted
    assert link.rate_bps == pytest.approx(800e3)


def test_what_only_waited_for_an_end_without_processor_time_is_no_slower_line() -> None:
    link = Link(200e6)
    for _ in range(5):  # 10 Mbit/s on the whole, but a quarter of it as fast as ever
        link, counted = measure(link, Sample(1_250_000, 1.0, 0.003, 16, True, 190e6), SETTINGS)
        assert counted
    assert link.rate_bps == pytest.approx(190e6)
    assert why_off(link, Sample(1_250_000, 1.0, 0.003), "", SETTINGS, counted=True) == ""
    for _ in range(5):  # now nothing is quick any more
        link, _ = measure(link, Sample(1_250_000, 1.0, 0.003, 16, True, 11e6), SETTINGS)
    assert link.rate_bps == pytest.approx(11e6)
    reason = why_off(link, Sample(1_250_000, 1.0, 0.003), "", SETTINGS, counted=True)
    assert reason == "measured 11 Mbit/s, chosen for 200 Mbit/s"


def test_quick_bursts_do_not_make_a_line_faster_than_it_was_thought() -> None:
    link, _ = measure(Link(10e6), Sample(1_250_000, 2.0, 0.003, 16, True, 900e6), SETTINGS)
    assert link.rate_bps == pytest.approx(10e6)
    link, _ = measure(Link(1e6), Sample(1_250_000, 2.0, 0.003, 16, True, 900e6), SETTINGS)
    assert link.rate_bps == pytest.approx(5e6), "the line did carry that"


def test_quick_bytes_of_steps_that_carry_little_are_remembered_until_they_count() -> None:
    link = Link(8e6)
    for quickest in (8e6, *[1e6] * 6):
        link, counted = measure(link, Sample(10_000, 0.1, 0.0, quickest_bps=quickest), SETTINGS)
    assert counted
    assert link.rate_bps == pytest.approx(8e6)


def test_the_newest_figure_of_every_link_goes_into_a_decision_about_one() -> None:
    other = ("b", "a")
    state = link_policy.begin({PAIR: 50e6, other: 50e6})
    decision = None
    for step in range(1, 10):
        slow = Sample(1_000_000, 8 / 5, 0.0, 4, True)
        steady = Sample(1_000_000, 8 / 45, 0.0, 4, True)
        state, decision = link_policy.observe(state, step, 2.0, {PAIR: slow, other: steady}, SETTINGS)
        if decision is not None:
            break
    assert decision is not None
    assert decision.rates_bps[PAIR] == pytest.approx(5e6)
    assert decision.rates_bps[other] == pytest.approx(45e6, rel=0.05)
    assert set(decision.reasons) == {PAIR}


# ---------------------------------------------------------------- the guard


def test_the_guard_lowers_the_ratio_when_codecs_hide_a_loss() -> None:
    state = link_policy.begin({PAIR: 5e6})
    state, decision = link_policy.evaluated(state, 10, 4.01, 4.0, 32.0, SETTINGS)
    assert decision is None
    state, decision = link_policy.evaluated(state, 20, 4.12, 4.0, 32.0, SETTINGS)
    assert decision is not None
    assert decision.cap == pytest.approx(32 * 0.7)
    assert "without codecs 4.12" in decision.reason
    assert "3.0%" in decision.reason
    assert state.cap == decision.cap


def test_the_guard_acts_on_a_gap_that_keeps_growing_before_it_is_large() -> None:
    state, decision = link_policy.begin({PAIR: 5e6}), None
    for step, loss in ((10, 4.02), (20, 4.04), (30, 4.06)):
        assert decision is None
        state, decision = link_policy.evaluated(state, step, loss, 4.0, 10.0, SETTINGS)
    assert decision is not None
    assert "and grows" in decision.reason


def test_a_cap_reaches_every_later_decision_and_ends_at_one() -> None:
    state, cap = link_policy.begin({PAIR: 50e6}), 32.0
    for step in range(10, 200, 10):
        state, decision = link_policy.evaluated(state, step, 5.0, 4.0, cap, SETTINGS)
        if decision is None:
            break
        assert decision.cap is not None
        cap = decision.cap
    assert cap == 1.0
    for step in range(300, 330):
        sample = Sample(1_000_000, 8 / 5, 0.0, 4, True)
        state, decision = link_policy.observe(state, step, 2.0, {PAIR: sample}, SETTINGS)
        if decision is not None:
            assert decision.cap == 1.0
            return
    pytest.fail("a link at a tenth of its rate was not noticed")


@pytest.mark.parametrize(
    ("mode", "ratio", "caps"),
    [
        (AUTO, 32.0, [22.4, 15.68, 10.976, 8.0, 3.9, 1.95, 1.0]),
        (AUTO, assumed_ratio(Compression("int8_block")), [1.95, 1.0]),
        (AUTO, assumed_ratio(Compression("fp16")), [1.0]),
        (AUTO, assumed_ratio(Compression("bf16")), [1.0]),
        (ADATOPK, 12.0, [8.4, 1.95, 1.0]),
        (ADATOPK, 4.0, [1.95, 1.0]),
    ],
)
def test_the_guard_goes_down_to_what_the_next_milder_codec_reaches(
    mode: str, ratio: float, caps: list[float]
) -> None:
    state, found = link_policy.begin({PAIR: 5e6}), []
    for step in range(10, 200, 10):
        state, decision = link_policy.evaluated(state, step, 5.0, 4.0, ratio, SETTINGS, CAPS[mode])
        if decision is None:
            break
        assert decision.cap is not None
        found.append(decision.cap)
        ratio = decision.cap
    assert found == pytest.approx(caps)
    assert ratio == 1.0


def test_the_last_cap_says_that_nothing_may_lose_precision() -> None:
    _, decision = link_policy.evaluated(link_policy.begin({PAIR: 5e6}), 10, 5.0, 4.0, 2.0, SETTINGS)
    assert decision is not None
    assert decision.reason.endswith("nothing that loses precision any more")


def test_a_cap_never_rises_again() -> None:
    state = link_policy.begin({PAIR: 5e6}, cap=1.95)
    _, decision = link_policy.evaluated(state, 10, 5.0, 4.0, 32.0, SETTINGS)
    assert decision is not None
    assert decision.cap == 1.95


def codecs_under(compress: str) -> list[str]:
    """What the planner makes of a link that is far too slow, both ways."""
    thin = chain(1.0, tensors=values((64, 2048)))

    def judge(specs: tuple[LinkSpec, ...]) -> float:
        by_pair = {(spec.source, spec.target): spec for spec in specs}
        return max(one.coded_s(by_pair[one.pair]) if specs else one.dense_s for one in thin)

    return [spec.codec for spec in specs_for(thin, Compression.parse(compress), 1e-3, judge)]


def test_each_cap_below_8_gets_the_planner_to_the_codec_that_it_is_for() -> None:
    assert CAPS[AUTO][0] == CAPS[ADATOPK][0] == TUNED.fine_ratios[0]
    found = [codecs_under(f"auto:{cap:g}") for cap in CAPS[AUTO][:-1]]
    assert found == [["eden", "eden"], ["int8_block", "int8_block"], ["fp16", "bf16"]]
    assert codecs_under("auto:5.6") == ["topk", "topk"]  # why no cap lies in between


def watched(*gaps: float) -> list[bool]:
    """Whether anything is said at each of these gaps."""
    watch, said = Watch(), []
    for gap in gaps:
        watch, wrong = link_policy.watched(watch, 4.0 * (1 + gap), 4.0, SETTINGS)
        said.append(bool(wrong))
    return said


def test_a_codec_by_name_is_told_of_once_until_its_gap_falls() -> None:
    assert watched(0.01, 0.03, 0.05, 0.03, 0.015, 0.03) == [False, True, False, False, False, False]
    assert watched(0.03, 0.009, 0.03) == [True, False, True]
    assert watched(0.005, 0.012, 0.015) == [False, False, True]  # it grows
    watch, wrong = link_policy.watched(Watch(), float("nan"), 4.0, SETTINGS)
    assert (watch, wrong) == (Watch(), "")


# ---------------------------------------------------------------- when the guard looks


def planned(slowdown: float = 0.0) -> Plan:
    """Two stages; dense, all that the link carries forward in a step takes ``slowdown`` steps."""
    stages = tuple(StageSpec(i, i + 1, i, i + 1, worker, 1) for i, worker in enumerate(PAIR))
    ahead = LinkPrediction("a", "b", 1000, 0.1 * slowdown, dense_bytes_per_step=10_000)
    back = LinkPrediction("b", "a", 1000, 100.0, dense_bytes_per_step=10_000)
    prediction = Prediction(1.0, 0.5, "latency", "", links=(ahead, back))
    return Plan("j", 1, "", "", "even", ScheduleName.GPIPE, 8, one_replica(8, stages), prediction=prediction)


def every(steps: int, slowdown: float = 0.0, eval_batches: int = 1) -> int:
    training = TrainingSpec(steps=steps, n_micro=8, compress="auto", eval_batches=eval_batches)
    return link_policy.look_every(training, planned(slowdown))


def test_the_guard_looks_twenty_times_and_at_most_every_twenty_steps() -> None:
    assert [every(steps) for steps in (30, 100, 400, 410, 500, 10_000)] == [20, 20, 20, 21, 25, 500]


def test_looks_that_would_cost_a_tenth_of_the_time_become_rarer_down_to_four() -> None:
    training = TrainingSpec(steps=1000, n_micro=8, compress="auto", eval_batches=16)
    assert link_policy.look_steps(training, planned(4.0)) == pytest.approx(2 * (2 / 3 + 4.0))
    assert every(1000, 4.0, 16) == 100  # 9.3 of 100 steps
    assert every(1000, 100.0, 16) == 200
    assert every(80, 100.0, 16) == 20
    assert every(160, 100.0, 16) == 40


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(0, 1e3), st.floats(0, 30), st.booleans()), max_size=60
    )
)
def test_whatever_is_reported_rates_stay_positive_and_finite(
    reports: list[tuple[int, float, float, bool]],
) -> None:
    state = link_policy.begin({PAIR: 1e6})
    for step, (n_bytes, busy_s, rtt_s, compressed) in enumerate(reports):
        sample = Sample(n_bytes, busy_s, rtt_s, 4, compressed)
        state, decision = link_policy.observe(state, step, 0.5, {PAIR: sample}, SETTINGS)
        if decision is not None:
            assert all(1e2 < bps < 1e14 for bps in decision.rates_bps.values())
