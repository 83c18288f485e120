"""Assignments that a worker refuses before it loads anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import AtollError, BadFrame, PlanError
from atoll.exchange import Exchange
from atoll.job import Keeping, Recompute, TrainingSpec
from atoll.messages.to_worker import PeerLink
from atoll.microbatch import ScheduleName
from atoll.opdag import Kind, LeafRef, OpNode, OpRef, Source, StateMeta, TensorMeta
from atoll.plan import Plan, Replica, StageSpec, one_replica
from atoll.program import Produced, StageProgram
from worker.stage.assignment import Assignment, _check_kept, check
from worker.transport.contract import Paths

TRAINING = TrainingSpec(1, 4, blocks=2)
STAGES = (StageSpec(0, 2, 0, 0, "w1", 1),)
PROGRAM = StageProgram(0, 1, (), frozenset(), (), (), (), (), (), (), (), None)
PLAN = Plan("job", 1, "", "", "", ScheduleName.GPIPE, 4, one_replica(4, STAGES), blocks=2)
SECOND = Replica((2, 4), (StageSpec(0, 2, 0, 0, "w2", 1),))
CUT = Replica((2, 4), (StageSpec(0, 1, 0, 0, "w2", 1), StageSpec(1, 2, 0, 0, "w3", 1)))
LATE = Replica((2, 4), (StageSpec(1, 2, 0, 0, "w2", 1),))
TWO = replace(PLAN, replicas=(Replica((0, 2), STAGES), SECOND), exchange=Exchange())


def assignment(plan: Plan = PLAN) -> Assignment:
    return Assignment("job", 1, TRAINING, PROGRAM, None, plan, (), {}, {}, 0)


def test_a_stage_goes_on_without_other_replicas_and_under_no_other_plan() -> None:
    second = replace(assignment(TWO), replica=1)
    alone = replace(
        PLAN, version=2, schedule=ScheduleName.ONE_F_ONE_B, replicas=(replace(SECOND, micros=(0, 4)),)
    )
    later = second.reconfigured(alone, (), 3)
    check(later, "w2")
    assert (later.rank, later.replica, later.micros, later.first_step) == (0, 0, range(4), 3)
    assert dict(later.blocks) == {0: range(2), 1: range(2, 4)}
    (stage,) = SECOND.stages
    for wrong in (
        replace(alone, replicas=(Replica((0, 4), STAGES),)),  # of another worker
        replace(alone, replicas=(Replica((0, 4), (replace(stage, stop=3),)),)),
        replace(alone, replicas=(Replica((0, 4), (replace(stage, held=2),)),)),
        replace(alone, blocks=4),
        replace(alone, replicas=(Replica((0, 4), (replace(stage, keeping=Keeping(Recompute.FULL)),)),)),
        replace(
            TWO, version=2, replicas=(TWO.replicas[0], replace(SECOND, stages=(replace(stage, stop=3),)))
        ),
    ):
        with pytest.raises(PlanError, match="other stages"):
            second.reconfigured(wrong, (), 3)


def test_a_stage_that_has_missed_a_plan_goes_on_under_the_next() -> None:
    """A replica came and was lost again: as many as before, without rates, perhaps in another order."""
    rated = replace(TWO, exchange=Exchange(rates=(1.0, 2.0)))
    second = replace(assignment(rated), replica=1)
    later = replace(TWO, version=3)
    assert second.reconfigured(later, (), 3).rank == 1
    other = Replica((2, 4), (replace(STAGES[0], worker="w3"),))
    moved = replace(later, replicas=(replace(SECOND, micros=(0, 2)), other))
    for before in (second, replace(second, plan=TWO)):
        found = before.reconfigured(moved, (PeerLink("w3", Paths()),), 3)
        check(found, "w2")
        assert (found.rank, found.micros, dict(found.blocks)) == (0, range(2), {0: range(2)})


def test_peers_with_local_steps_keep_their_shares() -> None:
    local = replace(TWO, exchange=Exchange("diloco", every=4))
    second = replace(assignment(local), replica=1)
    coded = replace(local, version=2, exchange=Exchange("diloco", every=4, codec="int8_block"))
    assert second.reconfigured(coded, (), 4).replica == 1
    for wrong in (replace(local, exchange=Exchange("diloco", every=8)), replace(TWO, version=2)):
        with pytest.raises(PlanError, match="other stages"):
            second.reconfigured(wrong, (), 4)


def test_a_stage_of_a_plan_is_taken_whatever_its_replica() -> None:
    check(assignment(), "w1")
    check(assignment(TWO), "w1")
    second = replace(assignment(TWO), replica=1)
    check(second, "w2")
    assert (second.rank, second.micros, dict(second.blocks)) == (1, range(2, 4), {1: range(2, 4)})
    with pytest.raises(PlanError, match="replica 2 of a plan of 2"):
        check(replace(second, replica=2), "w2")
    assert assignment().inputs(PROGRAM) == dict[str, TensorMeta]()


@pytest.mark.parametrize(
    ("plan", "error", "why"),
    [
        (
            replace(TWO, exchange=Exchange("wave")),
            PlanError,
            "replicas exchange gradients at every step here, or take local steps, not wave every 1 through",
        ),
        (replace(TWO, exchange=None), PlanError, "2 replicas do not go with exchange None"),
        (replace(PLAN, exchange=Exchange()), PlanError, "1 replicas do not go with exchange"),
        (replace(TWO, exchange=Exchange(rates=(1.0,))), PlanError, "rates of 1 ranks of 2"),
        (replace(TWO, exchange=Exchange(rates=(1.0, 0.0))), PlanError, "both above 0"),
        (replace(TWO, exchange=Exchange(inner=Exchange("mean"))), PlanError, "gradients at every step"),
        (replace(TWO, exchange=Exchange(inner=Exchange(), sites=(0,))), PlanError, "sites of 1 ranks of 2"),
        (replace(TWO, exchange=Exchange(sites=(0, 1))), PlanError, "at 2 sites, and none within a site"),
        (replace(TWO, replicas=(TWO.replicas[0], replace(SECOND, micros=(1, 4)))), PlanError, "begin at 2"),
        (replace(TWO, replicas=(TWO.replicas[0], LATE)), PlanError, "begin at ops"),
        (replace(PLAN, replicas=()), PlanError, "replica 0 of a plan of 0 replicas"),
        (replace(PLAN, replicas=(Replica((0, 2), STAGES),)), PlanError, "end at micro-batch 2"),
        (replace(PLAN, blocks=1), BadFrame, "in 1 blocks, training declares 4 in 2"),
        (replace(PLAN, n_micro=2, replicas=one_replica(2, STAGES)), BadFrame, "plan has 2 micro-batches"),
        (replace(PLAN, replicas=one_replica(4, SECOND.stages)), BadFrame, "belongs to w2, this is w1"),
        (replace(PLAN, version=2), BadFrame, "version 2 assigned as version 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(plan: Plan, error: type[AtollError], why: str) -> None:
    with pytest.raises(error, match=why):
        check(assignment(plan), "w1")


def test_buffers_that_replicas_would_each_write_are_refused() -> None:
    program = replace(PROGRAM, buffers=("mean",))
    states = {"mean": StateMeta(TensorMeta((2,), "float32"), mutated=True)}
    given = replace(assignment(), program=program, states=states, tensors={"mean": "a" * 64})
    check(given, "w1")
    with pytest.raises(PlanError, match="training writes mean"):
        check(replace(given, plan=TWO), "w1")


def test_nothing_leaves_that_follows_from_this_machines_data_alone() -> None:
    meta = TensorMeta((4,), "int64")
    shifted = OpNode("shift", Kind.NON_PARAMETRIC, "t", (LeafRef(Source.INPUT, "x"),), (), (meta,))
    table = LeafRef(Source.PARAMETER, "w")
    embedded = OpNode("embed", Kind.PARAMETRIC, "t", (table, OpRef(0)), (), (meta,))
    stages = (StageSpec(0, 2, 0, 0, "w1", 1), StageSpec(2, 3, 0, 0, "w2", 1))
    plan = replace(PLAN, replicas=one_replica(4, stages))

    def owner(*sent: int) -> Assignment:
        produced = tuple(Produced(op, (1,), False, 1) for op in sent)
        program = replace(PROGRAM, n_stages=2, ops=((0, shifted), (1, embedded)), produced=produced)
        return replace(assignment(plan), program=program, pinned=True)

    _check_kept(owner(1))
    with pytest.raises(PlanError, match=r"op 0 \(shift\) follows from the data of this machine alone"):
        _check_kept(owner(0, 1))
