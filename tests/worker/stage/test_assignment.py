"""Assignments that a worker refuses before it loads anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import AtollError, BadFrame, PlanError
from atoll.exchange import Exchange
from atoll.job import TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.opdag import TensorMeta
from atoll.plan import Plan, Replica, StageSpec, one_replica
from atoll.program import StageProgram
from worker.stage.assignment import Assignment, check

TRAINING = TrainingSpec(1, 4, blocks=2)
STAGES = (StageSpec(0, 2, 0, 0, "w1", 1),)
PROGRAM = StageProgram(0, 1, (), frozenset(), (), (), (), (), (), (), (), None)
PLAN = Plan("job", 1, "", "", "", ScheduleName.GPIPE, 4, one_replica(4, STAGES), blocks=2)
SECOND = Replica((2, 4), (StageSpec(0, 2, 0, 0, "w2", 1),))


def assignment(plan: Plan = PLAN) -> Assignment:
    return Assignment("job", 1, TRAINING, PROGRAM, None, plan, (), {}, {}, 0)


def test_a_stage_of_a_plan_of_one_replica_is_taken() -> None:
    check(assignment(), "w1")
    assert assignment().inputs(PROGRAM) == dict[str, TensorMeta]()


@pytest.mark.parametrize(
    ("plan", "error", "why"),
    [
        (
            replace(PLAN, replicas=(Replica((0, 2), STAGES), SECOND), exchange=Exchange()),
            PlanError,
            "a plan of 2 replicas; this version runs plans of one",
        ),
        (replace(PLAN, replicas=()), PlanError, "a plan of 0 replicas"),
        (replace(PLAN, replicas=(Replica((0, 2), STAGES),)), BadFrame, r"micro-batches \(0, 2\)"),
        (replace(PLAN, blocks=1), BadFrame, "in 1 blocks, training declares 4 in 2"),
        (replace(PLAN, n_micro=2, replicas=one_replica(2, STAGES)), BadFrame, "plan has 2 micro-batches"),
        (replace(PLAN, replicas=one_replica(4, SECOND.stages)), BadFrame, "belongs to w2, this is w1"),
        (replace(PLAN, version=2), BadFrame, "version 2 assigned as version 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(plan: Plan, error: type[AtollError], why: str) -> None:
    with pytest.raises(error, match=why):
        check(assignment(plan), "w1")
