"""Learning rates by step are those of transformers' schedules, step for step."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from transformers import get_scheduler

from atoll import Schedule, ScheduleKind

STEPS = 17


def of_transformers(name: str, warmup: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, warmup, STEPS)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has nothing to do here
            scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ScheduleKind.CONSTANT, "constant_with_warmup"),
        (ScheduleKind.LINEAR, "linear"),
        (ScheduleKind.COSINE, "cosine"),
    ],
)
def test_a_schedule_from_zero_is_that_of_transformers(kind: ScheduleKind, name: str, warmup: int) -> None:
    schedule = Schedule(kind, warmup_steps=warmup, final=0.0, from_zero=True)
    found = [schedule.factor(step, STEPS) for step in range(STEPS)]
    assert found == pytest.approx(of_transformers(name, warmup), abs=1e-12)


def of_torch(make: Callable[[torch.optim.Optimizer], LRScheduler]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler, found = make(optimizer), []
    for step in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if step < STEPS - 1:
                scheduler.step()
    return found


@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_a_schedule_of_steps_is_torchs(gamma: float) -> None:
    schedule = Schedule(ScheduleKind.STEP, every=5, gamma=gamma)
    found = [schedule.factor(step, STEPS) for step in range(STEPS)]
    assert found == pytest.approx(of_torch(lambda o: StepLR(o, 5, gamma)), rel=1e-12)
    warm = Schedule(ScheduleKind.STEP, warmup_steps=3, every=5, gamma=gamma)
    assert [warm.factor(step, STEPS) for step in range(3, STEPS)] == found[:-3]


@pytest.mark.parametrize(("warmup", "share"), [(0, 0.3), (4, 4 / STEPS), (1, 1 / STEPS)])
def test_one_cycle_is_torchs(warmup: int, share: float) -> None:
    schedule = Schedule(ScheduleKind.ONE_CYCLE, warmup_steps=warmup, final=4e-6)
    found = [schedule.factor(step, STEPS) for step in range(STEPS)]
    if warmup == 1:  # torch divides by zero
        assert found[0] == 1.0
        assert found == sorted(found, reverse=True)
        return
    wanted = of_torch(lambda o: OneCycleLR(o, 1.0, total_steps=STEPS, pct_start=share))
    assert found == pytest.approx(wanted, abs=1e-12)


def test_a_schedule_of_no_steps_from_a_peer_divides_by_nothing() -> None:
    for kind in ScheduleKind:
        assert 0.0 <= Schedule(kind, warmup_steps=0).factor(0, 1) <= 1.0
        assert 0.0 <= Schedule(kind, warmup_steps=9).factor(3, 3) <= 1.0


def test_a_schedule_by_itself_begins_with_a_share_and_ends_above_zero() -> None:
    schedule = Schedule(ScheduleKind.LINEAR, warmup_steps=2)
    found = [schedule.factor(step, 7) for step in range(7)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28])
