"""Learning rates by step are those of transformers' schedules, step for step."""

from __future__ import annotations

import warnings

import pytest
import torch
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


def test_a_schedule_by_itself_begins_with_a_share_and_ends_above_zero() -> None:
    schedule = Schedule(ScheduleKind.LINEAR, warmup_steps=2)
    found = [schedule.factor(step, 7) for step in range(7)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28])
