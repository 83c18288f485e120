"""What losses make of a step: idle workers, snapshots and links decide what one costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.job import CHECKPOINT_EVERY_S, TrainingSpec
from coordinator.planning.costs.fleet import Device, Fleet, LinkEstimate
from coordinator.planning.costs.losses import (
    NOTICE_S,
    PLANNED_WITHIN_S,
    STORING_SHARE,
    LossCosts,
    Rank,
    loss_costs,
)
from coordinator.planning.costs.timeline import LinkUse
from tests.coordinator.planning.fleets import same_links

MIB = 2**20
LONG = TrainingSpec(100_000, 8)
PART = 10 * MIB
PART_S = 8 * PART / 1e8
LINKS = (LinkUse(0, 1, MIB, 0.2), LinkUse(1, 0, MIB, 0.2), LinkUse(1, 2, MIB, 0.2), LinkUse(2, 1, MIB, 0.2))


def fleet(mbit: float = 1000.0, coordinator_mbit: float = 100.0) -> Fleet:
    line = LinkEstimate(1e6 * coordinator_mbit, 0.01)
    return same_links([Device(f"w{at}", 4096 * MIB, coordinator=line) for at in range(4)], 1e6 * mbit)


def costs(
    takers: int = 0,
    links: tuple[LinkUse, ...] = LINKS,
    training: TrainingSpec = LONG,
    machines: Fleet | None = None,
    n: int = 3,
) -> LossCosts:
    ranks = [Rank(at, PART, 0.5, takers) for at in range(n)]
    return loss_costs(1.0, ranks, links, machines or fleet(), training)


def test_where_nobody_is_idle_all_go_back_to_a_snapshot_and_plan_anew() -> None:
    found = costs()
    assert found.again is not None
    assert found.loss_s == pytest.approx(NOTICE_S + PLANNED_WITHIN_S + 2 * PART_S + found.again.usual_s)
    lost_per_s = 3 * found.losses_per_s
    assert found.expected_s == pytest.approx((1 + found.snapshots) * (1 + lost_per_s * found.loss_s))
    assert 0.0 < found.snapshots < 0.01


def test_behind_thin_links_a_loss_goes_back_to_a_checkpoint_and_no_snapshot_is_in_the_way() -> None:
    """10 MiB on 1 Mbit/s take half an hour of what training leaves."""
    found = costs(machines=fleet(mbit=1.0))
    assert found.again is not None
    assert not found.again.kept
    assert found.snapshots == 0.0
    assert found.again.snapshot_s > 900.0
    age_s = CHECKPOINT_EVERY_S / 2 + PART_S
    assert found.loss_s == pytest.approx(NOTICE_S + PLANNED_WITHIN_S + 2 * PART_S + age_s)
    assert "a checkpoint every 300 s, whole after 1 s; no snapshots: one takes" in found.again.words
    quick = costs()
    assert quick.again is not None
    assert quick.again.kept
    assert "a snapshot every" in quick.again.words


def test_checkpoints_as_often_as_snapshots_leave_nothing_for_these() -> None:
    often = costs(training=replace(LONG, checkpoint_every=10)).again
    assert often is not None
    assert not often.kept
    assert often.usual_s < 10.0


def test_who_is_idle_repeats_one_stage_since_the_checkpoint_and_one_rank_has_a_standby() -> None:
    found = costs(takers=1)
    cold_s = NOTICE_S + PART_S + 0.5 * (CHECKPOINT_EVERY_S / 2 + PART_S)
    assert found.again is None
    assert found.snapshots == 0.0
    assert found.loss_s == pytest.approx((NOTICE_S + 1.0 + 2 * cold_s) / 3)
    assert costs(takers=3).loss_s == pytest.approx(NOTICE_S + 1.0)


def test_nobody_stands_by_where_the_neighbours_lines_are_busy() -> None:
    busy = tuple(replace(link, busy_s=0.8) for link in LINKS)
    found = costs(takers=3, links=busy)
    cold_s = (
        NOTICE_S + PART_S + 0.8 * (CHECKPOINT_EVERY_S / 2 + PART_S)
    )  # messages take longer than computing
    assert found.loss_s == pytest.approx(cold_s)


def test_behind_a_slow_line_a_checkpoint_is_older() -> None:
    found = costs(takers=1, machines=fleet(coordinator_mbit=1.0))
    part_s = 100 * PART_S
    cold_s = NOTICE_S + part_s + 0.5 * (STORING_SHARE * part_s / 2 + part_s)
    assert found.loss_s == pytest.approx((NOTICE_S + 1.0 + 2 * cold_s) / 3)


def test_of_a_short_job_no_more_than_half_is_done_again() -> None:
    short = costs(training=TrainingSpec(4, 8))
    assert short.loss_s == pytest.approx(NOTICE_S + PLANNED_WITHIN_S + 2 * PART_S + 2.0)


def test_the_more_workers_and_the_more_often_they_are_lost_the_more_losses_cost() -> None:
    rare = replace(fleet(), losses_per_s=1e-9)
    assert costs(machines=rare).expected_s == pytest.approx(1.0, rel=1e-2)
    often = replace(fleet(), losses_per_s=1e-3)
    assert costs(machines=often).expected_s > 1.05 * costs().expected_s
    assert costs(n=3).expected_s > costs(n=2).expected_s


def test_one_machine_that_is_lost_goes_back_to_its_checkpoint() -> None:
    alone = costs(n=1, links=())
    age_s = CHECKPOINT_EVERY_S / 2 + PART_S
    assert alone.again is None
    assert alone.loss_s == pytest.approx(NOTICE_S + PLANNED_WITHIN_S + 2 * PART_S + age_s)
