"""How often snapshots are taken: as often as their cost, the links and the disks allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.job import TrainingSpec
from coordinator.capture.capture import capture
from coordinator.membership.loss_rate import HOUR_S, Losses
from coordinator.planning.costs.snapshots import CODED_MOMENTS, EVERY_S, SLOWED, every_s, sent_bytes
from tests.models import gpt2

MIB = 2**20
USUAL = 3 / (4 * HOUR_S)


def test_what_costs_next_to_nothing_is_done_every_20_s() -> None:
    assert every_s(1.0, 10 * MIB, USUAL) == EVERY_S
    assert every_s(1.0, 10 * MIB, USUAL / 1000) == EVERY_S


def test_a_slow_link_carries_snapshots_half_of_the_time_at_most() -> None:
    """And where losses are rare, Young's interval is what it costs least at."""
    assert every_s(60.0, 10 * MIB, 1.0) == 120.0
    assert every_s(60.0, 10 * MIB, USUAL) == pytest.approx((2 * SLOWED * 60.0 / USUAL) ** 0.5)


def test_a_disk_is_not_worn_out() -> None:
    assert every_s(2.0, 1024 * MIB, USUAL) == pytest.approx(2 * 1024 * MIB / 8e6)


def test_workers_that_are_lost_often_have_snapshots_more_often() -> None:
    losses = Losses()
    for at in range(50):
        losses.came("w", 10.0 * at)  # another process each time
    assert losses.count == 49
    often = losses.per_s(500.0)
    assert often == pytest.approx(50 / (4 * HOUR_S + 500.0))
    assert every_s(1.0, MIB, 3 * often) < every_s(1.0, MIB, USUAL)


def test_a_tied_weight_is_sent_by_the_first_stage_that_has_it_and_the_sum_by_no_cut() -> None:
    example = gpt2()
    dag = capture(example.module, example.example_inputs).train
    n = sum(parameter.numel() for parameter in example.module.parameters())  # the head is the embedding
    middle, training = len(dag.ops) // 2, TrainingSpec(8, 2)
    whole = sent_bytes(dag, training, [[(0, len(dag.ops))]], 1e6)
    cut = sent_bytes(dag, training, [[(0, middle)], [(middle, len(dag.ops))]], 1e6)
    assert whole.by_stage == (12 * n,)
    assert sum(cut.by_stage) == 12 * n
    assert min(cut.by_stage) > 0
    assert whole.still_bytes == cut.still_bytes
    coded = sent_bytes(dag, replace(training, int8_moments=True, checkpoint_every=2), [[(0, middle)]], 1e6)
    assert coded.by_stage[0] == pytest.approx((4 + CODED_MOMENTS) / 12 * cut.by_stage[0], rel=1e-3)
