"""Where a job's inputs stay with one worker, it computes all that reads them, and others what is between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import PlanError, UsageError
from atoll.job import TrainingSpec
from atoll.opdag import LeafRef, OpDag, Source
from atoll.plan import Plan, validate
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.search.op_fence import Effort
from coordinator.planning.search.pins import check_pinned, pinned_ops
from tests.coordinator.planning.dags import gpt_like
from tests.coordinator.planning.fleets import same_links
from tests.coordinator.planning.search.test_ring import TIED, TRAINING, homes, step_s

PLAIN = gpt_like(4, tokens=64, vocab=16_000, tied=False)


def labelled(dag: OpDag) -> OpDag:
    """The same with a loss that reads labels."""
    loss = dag.ops[dag.loss]
    ops = list(dag.ops)
    ops[dag.loss] = replace(loss, args=(*loss.args, LeafRef(Source.INPUT, "labels")))
    return replace(dag, ops=tuple(ops), inputs={"labels": dag.inputs["tokens"], **dag.inputs})


def planned(dag: OpDag, pinned: str, mib: float = 130, n: int = 4, **more: object) -> Plan:
    request = PlanRequest("job", 1, dag, None, TRAINING, homes(n, mib), standbys=0, pinned=pinned)
    plan = make_plan(replace(request, **more))  # type: ignore[arg-type]
    validate(plan, dag, TRAINING)
    return plan


def workers_of(plan: Plan, ops: tuple[int, ...]) -> set[str]:
    (replica,) = plan.replicas
    pieces = list(zip(replica.workers, replica.pieces, strict=True))
    return {worker for worker, one in pieces for at in ops if one.piece.start <= at < one.piece.stop}


@pytest.mark.parametrize("dag", [labelled(PLAIN), labelled(TIED)])
@pytest.mark.parametrize("owner", ["w0", "w2"])
def test_all_that_reads_data_is_the_owners_and_others_help(dag: OpDag, owner: str) -> None:
    plan = planned(dag, owner)
    assert workers_of(plan, pinned_ops(dag)) == {owner}
    assert len(plan.stages) > 1
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in plan.prediction.stages)  # type: ignore[union-attr]


def test_pins_cost_what_they_cost_and_no_more() -> None:
    """A tied model is a ring anyway: any of equal machines may as well be its owner."""
    free = planned(labelled(TIED), "")
    assert step_s(planned(labelled(TIED), "w3")) <= 1.02 * step_s(free)


def test_the_owner_is_alone_where_it_is_fastest_and_none_is_nearby() -> None:
    plan = planned(labelled(PLAIN), "w1", fleet=same_links(homes(3, 4000).devices, 1e6, 0.2))
    assert [stage.worker for stage in plan.stages] == ["w1"]


def test_of_a_large_fleet_the_owner_is_always_looked_at() -> None:
    effort = Effort(candidates=4, few=3)
    request = PlanRequest("job", 1, labelled(PLAIN), None, TRAINING, homes(12, 130), standbys=0)
    plan = make_plan(replace(request, pinned="w11"), effort)
    assert workers_of(plan, pinned_ops(request.dag)) == {"w11"}


def test_a_given_cut_begins_with_the_owner() -> None:
    dag = labelled(PLAIN)
    cut = dag.cuttable()
    first, last = cut[2], cut[-1]
    plan = planned(dag, "w2", mib=4000, partitioner=f"cut:{first},{last}:0,1,0")
    assert [stage.worker for stage in plan.stages] == ["w2", "w0"]
    with pytest.raises(PlanError, match="device 0 has the data"):
        planned(dag, "w2", mib=4000, partitioner=f"cut:{first},{last}")


def test_what_cannot_be_is_said() -> None:
    dag = labelled(PLAIN)
    with pytest.raises(PlanError, match="worker w9 holds the job's data"):
        planned(dag, "w9")
    with pytest.raises(UsageError, match="even gives a device one interval"):
        planned(dag, "w1", partitioner="even")
    for training in (TrainingSpec(1, 4, replicas="2"), TrainingSpec(1, 4, exchange="diloco")):
        with pytest.raises(UsageError, match="one pipeline around it"):
            check_pinned(training)
    check_pinned(TRAINING)
