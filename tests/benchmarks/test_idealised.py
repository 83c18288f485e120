"""Schedules in closed form: they are valid, and take the published times."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from atoll.errors import UsageError
from atoll.microbatch import Work
from benchmarks import idealised
from benchmarks.idealised import (
    OTHERS,
    PRODUCT,
    Schedule,
    Times,
    built,
    chimera,
    lead,
    one_stage,
    rows,
    soonest,
    zb_v,
)
from coordinator.planning.costs.timeline import simulate
from coordinator.planning.costs.workload import StageLoad, Workload
from tests.coordinator.planning.timeline_oracle import step_seconds

WHOLE = Times(20, 40, 20)
UNITS = Times(1, 2, 1)
SIZES = [(2, 2), (4, 2), (4, 4), (4, 8), (4, 20), (6, 12), (8, 8), (8, 24)]
NAMES = [*PRODUCT, *OTHERS]


def some(name: str, n_devices: int, n_micro: int) -> list[Schedule]:
    """Schedules of a name; some sizes are not for interleaved 1F1B."""
    if name == "interleaved" and n_micro % n_devices:
        pytest.skip("interleaved needs whole groups")
    return built(name, n_devices, n_micro)[:: 5 if n_devices * n_micro > 64 else 1]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_action_is_done_once_by_the_device_that_has_its_stage(name: str, size: tuple[int, int]) -> None:
    for found in some(name, *size):
        check_turns(found, size[1])


def check_turns(found: Schedule, n_micro: int) -> None:
    """Every stage's actions are there, once, ascending, on its own device."""
    for device, turns in enumerate(found.turns):
        assert {found.devices[turn.stage] for turn in turns} == {device}
    for stage in range(len(found.devices)):
        done = [(action.work, action.micro) for action in found.actions(stage)]
        late = any(work is Work.WEIGHT for work, _ in done)
        works = (Work.FORWARD, Work.INPUT, Work.WEIGHT) if late else (Work.FORWARD, Work.BACKWARD)
        for work in works:  # ascending: gradients accumulate in one order
            micros = [micro for each, micro in done if each is work]
            assert micros == list(range(n_micro // found.pipelines)), (stage, work)
        assert len(done) == len(works) * n_micro // found.pipelines


@pytest.mark.parametrize("hop_ms", [0, 7])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_begins_before_what_it_needs_or_beside_other_work(
    name: str, size: tuple[int, int], hop_ms: int
) -> None:
    for found in some(name, *size):
        check_spans(found, hop_ms)


def check_spans(found: Schedule, hop_ms: int) -> None:
    """By the timeline's bars: a device does one thing at a time, and never before it has what it needs."""
    timeline = simulate(found.workload(replace(WHOLE, hop_ms=hop_ms)), keep_spans=True)
    computed = [span for span in timeline.spans if span.source == span.target]
    for device in range(len(found.turns)):
        own = [span for span in computed if found.devices[span.source] == device]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
    ends = {(span.kind, span.source, span.micro): span.end_s for span in computed}
    n = found.n_stages
    for span in computed:
        if span.kind == Work.WEIGHT:
            continue  # of which micro-batch they are is not told apart
        stage, first, last = span.source, span.source % n == 0, span.source % n == n - 1
        needs = [] if span.kind == Work.FORWARD else [(Work.FORWARD, stage)]
        if span.kind == Work.FORWARD and not first:
            needs.append((Work.FORWARD, stage - 1))
        if span.kind != Work.FORWARD and not last:
            needs.append((Work(span.kind), stage + 1))
        for work, source in needs:
            apart = found.devices[source] != found.devices[stage]
            assert ends[work, source, span.micro] + apart * hop_ms <= span.start_s


def uneven(work: Workload) -> Workload:
    """The same with stages that differ, so that nothing ends just when something arrives."""
    draw = random.Random(4711)

    def other(load: StageLoad) -> StageLoad:
        return replace(
            load,
            forward_s=load.forward_s * draw.uniform(0.9, 1.1),
            backward_s=load.backward_s * draw.uniform(0.9, 1.1),
            weights_s=load.weights_s * draw.uniform(0.9, 1.1),
        )

    return replace(work, stages=tuple(map(other, work.stages)))


@pytest.mark.parametrize("name", NAMES)
def test_an_independent_simulation_finds_the_same_step(name: str) -> None:
    for n_devices, n_micro in ((4, 8), (8, 8)):
        for found in some(name, n_devices, n_micro):
            work = uneven(found.workload(replace(WHOLE, hop_ms=3)))
            assert simulate(work).step_s == pytest.approx(step_seconds(work), rel=1e-9)


# ---------------------------------------------------------------- published times


@pytest.mark.parametrize(
    ("n_devices", "n_micro", "gpipe", "bidirectional"),
    [(4, 4, 21, 16), (4, 8, 33, 30), (8, 8, 45, 36), (8, 16, 69, 66)],
)
def test_chimera_takes_the_published_steps(
    n_devices: int, n_micro: int, gpipe: float, bidirectional: float
) -> None:
    """Chimera (Li 2021): with N = D it is D F + (2 D - 2) B; N > D by its units, one behind the other."""
    assert idealised.gpipe(n_devices, n_micro).step_ms(UNITS) == gpipe
    assert one_stage(n_devices, n_micro, 1).step_ms(UNITS) == gpipe
    assert chimera(n_devices, n_micro).step_ms(UNITS) == bidirectional


def test_chimera_is_ahead_of_1f1b_on_four_devices_by_what_its_authors_say() -> None:
    ratios = [one_stage(4, n, 1).step_ms(WHOLE) / chimera(4, n).step_ms(WHOLE) for n in (4, 8)]
    assert ratios == pytest.approx([1.31, 1.10], rel=0.05)


def test_chimera_under_delay_is_behind_gpipe() -> None:
    slow = replace(UNITS, hop_ms=2)
    assert idealised.gpipe(8, 16).step_ms(slow) == 97
    assert chimera(8, 16).step_ms(slow) == 128
    assert one_stage(8, 16, 1).step_ms(slow) == 149


@pytest.mark.parametrize("n_devices", [2, 4, 6, 8])
def test_a_unit_of_chimera_has_the_published_bubble_and_memory(n_devices: int) -> None:
    """With F = B the bubble of N = D is (D - 2) slots, and D / 2 + 1 to D micro-batches are held."""
    found = chimera(n_devices, n_devices)
    assert found.step_ms(Times(1, 1, 0)) == 2 * n_devices + n_devices - 2
    assert min(found.most_held()) == n_devices // 2 + 1
    assert max(found.most_held()) == n_devices
    assert found.weights == 2


def test_chimeras_units_of_equal_slots_leave_no_bubble_between_them() -> None:
    for n_micro in (8, 16, 24, 32, 80):
        assert chimera(8, n_micro).step_ms(Times(1, 1, 0)) == 2 * n_micro + 6


@pytest.mark.parametrize(("n_devices", "n_micro"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_zero_bubble_v_holds_as_much_on_every_device_and_waits_for_its_first_forward_alone(
    n_devices: int, n_micro: int
) -> None:
    """Qi 2024: no bubble but the way to the last device, in halves; D micro-batches' activations each."""
    found = zb_v(n_devices, n_micro)
    assert found.most_held() == (float(n_devices),) * n_devices
    assert found.step_ms(UNITS) == 3 * n_micro + (n_devices - 1) / 2
    assert found.weights == 1


def test_interleaved_1f1b_halves_the_bubble() -> None:
    for n_devices, n_micro in ((4, 4), (4, 8), (8, 24)):
        found = idealised.interleaved(n_devices, n_micro)
        assert found.step_ms(UNITS) == 3 * n_micro + 3 * (n_devices - 1) / 2


def test_sizes_that_a_schedule_does_not_have_are_refused_with_numbers() -> None:
    for n_devices, n_micro in ((3, 6), (4, 5), (4, 0)):
        with pytest.raises(UsageError, match="micro-batches"):
            chimera(n_devices, n_micro)
    with pytest.raises(UsageError, match="micro-batches"):
        idealised.replicas(4, 3, 1)
    with pytest.raises(UsageError, match="4 devices do not divide 6"):
        idealised.interleaved(4, 6)


# ---------------------------------------------------------------- the table


def test_turns_that_wait_for_each_other_are_found() -> None:
    """A device that begins with the backward of what it has not computed."""
    found = chimera(4, 4)
    order = found.turns[0]
    wrong = replace(found, turns=((order[-1], *order[:-1]), *found.turns[1:]))
    with pytest.raises(ValueError, match="deadlocks"):
        wrong.step_ms(WHOLE)


def test_a_row_has_the_least_warm_up_that_is_as_fast() -> None:
    step_ms, found = soonest("1f1b", 4, 8, WHOLE)
    assert (step_ms, found.most_held()) == (660, (4, 3, 2, 1))
    slow_ms, deeper = soonest("1f1b", 4, 8, replace(WHOLE, hop_ms=40))
    assert slow_ms < one_stage(4, 8, 1).step_ms(replace(WHOLE, hop_ms=40))
    assert deeper.most_held()[0] > 4


def test_chimera_leads_without_delay_alone() -> None:
    near = lead(rows(WHOLE, 8, 8))
    assert near["ahead"] > 1.05
    assert near["spare_ms"] > 0
    far = lead(rows(replace(WHOLE, hop_ms=10), 8, 8))
    assert far["ahead"] < 1.0
    assert far["spare_ms"] < 0
