"""Whose figures stand out: from seeded noise nobody's, from a change of one worker's that worker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.microbatch import ScheduleName
from atoll.plan import Plan, StageSpec, one_replica
from coordinator.messages.events import Goodput, StepReady
from coordinator.messages.facts import Checkpoint
from coordinator.messages.jobs import JobState, Phase, Running
from coordinator.pipeline.health import anomalies
from coordinator.pipeline.health.anomalies import (
    FIRST_STEPS,
    LIMIT,
    WINDOW_STEPS,
    WINDOWS,
    Alarm,
    Key,
    Kind,
    Watched,
    odd,
    score,
)
from tests.sim.scripted import HASH, spec

MB = 10**6
PERSISTS = WINDOWS * WINDOW_STEPS

Figures = Mapping[Key, float]


def computing(*seconds: float) -> dict[Key, float]:
    return {Key(Kind.COMPUTE, f"w{at}"): value for at, value in enumerate(seconds)}


positive = st.floats(1e-3, 1e3)


@given(positive, st.lists(positive, max_size=6), st.floats(0.05, 5.0), positive)
def test_a_score_grows_with_its_value_and_is_never_above_0_for_what_is_usual(
    value: float, peers: list[float], spread: float, more: float
) -> None:
    assert score(value + more, peers, spread) >= score(value, peers, spread)
    assert score(1.0, peers, spread) <= 0.0
    assert score(max(peers, default=1.0), peers, spread) <= 0.0 or len(peers) > 1


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=5), positive)
def test_no_liar_makes_others_odd(honest: list[float], liar: float) -> None:
    """Its figure among theirs, whatever it is: a worker's that became quicker, or the slow one's."""
    found = odd(computing(*honest, liar), {})
    assert found <= {Key(Kind.COMPUTE, f"w{len(honest)}")}


@given(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=6), st.floats(3.0, 1e3), positive)
def test_no_liar_hides_another(honest: list[float], slow: float, liar: float) -> None:
    assert Key(Kind.COMPUTE, "w0") in odd(computing(slow, *honest, liar), {})


@given(st.integers(1, 6), st.floats(1.0, 50.0), st.sampled_from(Kind))
def test_what_changes_for_all_is_nobodys(workers: int, factor: float, kind: Kind) -> None:
    values = {Key(kind, f"w{at}"): factor for at in range(workers)}
    assert odd(values, {}) == (
        set(values) if workers == 1 and score(factor, [], spread(kind)) > LIMIT else set()
    )


def spread(kind: Kind) -> float:
    return anomalies.LEAST_SPREAD[kind]


def test_a_figure_that_always_swings_has_to_swing_further() -> None:
    values = computing(3.0, 1.0, 1.0)
    key = Key(Kind.COMPUTE, "w0")
    assert odd(values, {key: 0.1}) == {key}
    assert odd(values, {key: 0.5}) == set()


# ---------------------------------------------------------------- over time


def report(worker: int, compute_s: float = 0.5, **changes: float | tuple[Goodput, ...]) -> StepReady:
    fields = {"forward_s": compute_s, **changes}
    return replace(StepReady("job-1", 1, 0), **fields)  # type: ignore[arg-type]


def state(step: int, reports: list[StepReady], *, steps: int = 10**6, step_s: float = 2.0) -> JobState:
    stages = tuple(StageSpec(at, at + 1, 0, 0, f"w{at}", 1) for at in range(len(reports)))
    plan = Plan("job-1", 1, HASH, "", "even", ScheduleName.GPIPE, 2, one_replica(2, stages))
    run = Running(reports=dict(enumerate(reports)), lineage=((1, 0),), step_times_s=(step_s,) * 5)
    first = Checkpoint(0, {})
    return JobState(
        "job-1", spec(steps=steps), first, 0.0, Phase.TRAINING, version=1, step=step, plan=plan, run=run
    )


def watched(steps: int, reports: Callable[[int], list[StepReady]], seen: Watched | None = None) -> Watched:
    """Have a job commit so many more steps."""
    seen = seen or Watched(1)
    first = seen._steps
    for step in range(first, first + steps):
        seen.committed(state(step + 1, reports(step)))
    return seen


QUIET = FIRST_STEPS + 4 * WINDOW_STEPS


def changed(
    worker: int, at_step: int = QUIET, workers: int = 3, **after: float
) -> Callable[[int], list[StepReady]]:
    """Return figures that swing by a tenth, and from a step on are other ones for one worker."""
    random = Random(4711)

    def reports(step: int) -> list[StepReady]:
        usual: dict[str, float] = {"compute_s": 0.5, "loss": 2.0}
        found = []
        for rank in range(workers):
            now = {**usual, **(after if rank == worker and step >= at_step else {})}
            noisy = {what: value * random.uniform(0.9, 1.1) for what, value in now.items()}
            norms, losses = (noisy.pop("norm", 3.0) ** 2,), (noisy.pop("loss"),)
            found.append(replace(report(rank, **noisy), square_norms=norms, losses=losses))
        return found

    return reports


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_noise_alarms_nobody(seed: int, workers: int) -> None:
    random = Random(seed)

    def reports(step: int) -> list[StepReady]:
        return [report(at, random.uniform(0.8, 1.2) * (at + 1)) for at in range(workers)]

    seen = Watched(1)
    for _ in range(12):
        watched(WINDOW_STEPS, reports, seen)
        assert seen.alarms == ()


@pytest.mark.parametrize(
    ("kind", "after", "words"),
    [
        (Kind.COMPUTE, {"compute_s": 2.0}, "slow: computes"),
        (Kind.NORM, {"norm": 60.0}, "odd gradient: its norm is"),
        (Kind.LOSS, {"loss": 40.0}, "odd loss: reports"),
    ],
)
def test_what_grew_for_one_worker_is_named_at_once_and_persists_after_three_windows(
    kind: Kind, after: dict[str, float], words: str
) -> None:
    reports = changed(1, **after)
    seen = watched(QUIET, reports)
    assert seen.alarms == ()
    watched(WINDOW_STEPS, reports, seen)
    (alarm,) = seen.alarms
    assert (alarm.key, alarm.windows, alarm.first_step) == (Key(kind, "w1"), 1, QUIET)
    assert alarm.words().startswith(words)
    assert alarm.words().endswith(f"since step {QUIET + 1}")
    assert anomalies.culprit(seen.alarms) is None
    watched(PERSISTS - WINDOW_STEPS, reports, seen)
    assert seen.alarms[0].persists
    assert (anomalies.culprit(seen.alarms) is None) is (kind is Kind.LOSS)


def test_what_stays_odd_is_never_taken_for_usual_and_what_recovers_is_forgotten() -> None:
    reports = changed(1, compute_s=2.0)
    seen = watched(QUIET + 100 * WINDOW_STEPS, reports)
    assert seen.alarms[0].windows == 100
    watched(WINDOW_STEPS, changed(-1), seen)
    assert seen.alarms == ()
    watched(WINDOW_STEPS, reports, seen)
    assert seen.alarms[0].windows == 1


def test_a_worker_that_is_named_for_an_odd_window_now_and_then_does_not_persist() -> None:
    def reports(step: int) -> list[StepReady]:
        bad = step >= QUIET and (step - FIRST_STEPS) // WINDOW_STEPS % 3 != 0
        return [report(0), report(1, 2.0 if bad else 0.5), report(2)]

    seen = watched(QUIET, reports)
    for _ in range(30):
        watched(WINDOW_STEPS, reports, seen)
        assert anomalies.culprit(seen.alarms) is None


# ---------------------------------------------------------------- links


def linked(slow: set[tuple[str, str]]) -> Callable[[int], list[StepReady]]:
    """Return reports of a chain w0 - w1 - w2 - w3 at 80 Mbit/s, and a tenth of it over the ``slow`` links."""
    pairs = [("w0", "w1"), ("w1", "w2"), ("w2", "w3")]
    pairs += [(b, a) for a, b in pairs]

    def reports(step: int) -> list[StepReady]:
        found = []
        for at in range(4):
            took = {b: 1.0 if step >= QUIET and (a, b) in slow else 0.1 for a, b in pairs if a == f"w{at}"}
            links = tuple(Goodput(peer, MB, busy_s, 0.01) for peer, busy_s in took.items())
            found.append(report(at, links=links))
        return found

    return reports


@pytest.mark.parametrize(
    ("slow", "blamed"),
    [
        ({("w1", "w2")}, "w1"),
        ({("w1", "w2"), ("w1", "w0")}, "w1"),
        ({("w1", "w2"), ("w3", "w2")}, "w2"),
        ({("w0", "w1"), ("w1", "w0")}, "w0"),
    ],
)
def test_of_a_slow_links_ends_the_one_is_blamed_that_more_slow_links_share(
    slow: set[tuple[str, str]], blamed: str
) -> None:
    seen = watched(QUIET + PERSISTS, linked(slow))
    assert {(alarm.key.worker, alarm.key.peer) for alarm in seen.alarms} == slow
    alarm = anomalies.culprit(seen.alarms)
    assert alarm is not None
    assert anomalies.blamed(alarm, seen.alarms) == blamed
    assert "slow link from" in alarm.words()
    assert "8 Mbit/s, usual are 80" in alarm.words()


def test_small_messages_tell_nothing_of_a_link() -> None:
    tiny = report(0, links=(Goodput("w1", 1000, 10.0, 0.01),))
    assert not any(key.kind is Kind.LINK for key in anomalies.figures("w0", tiny))


# ---------------------------------------------------------------- what it is worth


@pytest.mark.parametrize(
    ("steps", "step_s", "worth"), [(1000, 3.0, True), (1000, 2.0, False), (150, 3.0, False)]
)
def test_a_slow_worker_is_replaced_where_that_gains_more_time_than_it_costs(
    steps: int, step_s: float, worth: bool
) -> None:
    """A step took 2 s; a new plan costs a minute and the steps since the checkpoint."""
    seen = watched(QUIET + PERSISTS, changed(1, compute_s=2.0))
    (alarm,) = seen.alarms
    now = state(QUIET + PERSISTS, [], steps=steps, step_s=step_s)
    assert seen.worth(alarm, now) is worth


def test_a_gradient_that_jumps_is_always_worth_a_plan() -> None:
    alarm = Alarm(Key(Kind.NORM, "w1"), 60.0, 3.0, WINDOWS, 0)
    assert Watched(1).worth(alarm, state(9, [], steps=10))
