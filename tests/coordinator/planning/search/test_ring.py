"""Models that use a large parameter in several places are planned with all of its uses on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.job import TrainingSpec
from atoll.opdag import Kind, LeafRef, OpDag, Source, StateMeta, TensorMeta, leaf_refs
from atoll.plan import Plan, validate
from coordinator.planning.costs.fleet import Device, Fleet
from coordinator.planning.peers.replicas import best_plan
from coordinator.planning.planner import PlanRequest, make_plan
from tests.coordinator.planning.dags import gpt_like, op
from tests.coordinator.planning.fleets import same_links

MIB = 1 << 20
TRAINING = TrainingSpec(10, 4)
TIED = gpt_like(4, tokens=64, vocab=16_000)  # a table of 16 MiB, values of 64 KiB at boundaries


def homes(n: int, mib: float) -> Fleet:
    devices = [Device(f"w{at}", round(mib * MIB), gflops={"": 20.0}, memory_gbps=5.0) for at in range(n)]
    return same_links(devices, 100e6, 0.02)


def planned(dag: OpDag, fleet: Fleet, training: TrainingSpec = TRAINING, **more: object) -> Plan:
    plan = make_plan(PlanRequest("job", 1, dag, None, training, fleet, **more))  # type: ignore[arg-type]
    validate(plan, dag, training)
    return plan


def holders(plan: Plan, dag: OpDag, name: str) -> set[str]:
    uses = [at for at, node in enumerate(dag.ops) if any(ref.name == name for ref in leaf_refs(node))]
    assert len(uses) > 1
    (replica,) = plan.replicas
    pieces = zip(replica.workers, (one.piece for one in replica.pieces), strict=True)
    return {worker for worker, piece in pieces for use in uses if piece.start <= use < piece.stop}


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.parametrize("mib", [110, 120, 140])
def test_the_table_of_a_tied_model_stays_on_one_device(mib: int) -> None:
    ring = planned(TIED, homes(6, mib), standbys=0)
    assert len(holders(ring, TIED, "wte")) == 1
    assert len(ring.stages) >= 2
    assert ring.prediction is not None
    assert step_s(ring) <= 1.25 * ring.prediction.lower_bound_s
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in ring.prediction.stages)
    apart = planned(TIED, homes(6, mib), standbys=0, partitioner="one_piece")
    assert [stage.further for stage in apart.stages] == [()] * len(apart.stages)
    assert step_s(apart) >= 4 * step_s(ring)


def test_a_model_that_ties_nothing_and_one_that_ties_little_have_one_piece_a_device() -> None:
    for dag in (gpt_like(4, tokens=64, vocab=16_000, tied=False), gpt_like(4, tokens=512)):
        plan = planned(dag, homes(3, 150), standbys=0)
        assert [stage.further for stage in plan.stages] == [()] * len(plan.stages)


def test_all_uses_are_on_one_device_wherever_they_are() -> None:
    """As of a table of encoder, decoder and head."""
    layers = gpt_like(4, tokens=64, vocab=16_000).ops
    middle = len(layers) // 2
    dag = with_use(TIED, middle, "wte")
    plan = planned(dag, homes(6, 130), standbys=0)
    assert len(holders(plan, dag, "wte")) == 1
    owner = next(stage for stage in plan.stages if len(stage.pieces) == 3)
    assert {owner.worker} == holders(plan, dag, "wte")


def test_several_tied_groups_are_each_on_one_device() -> None:
    first, second = len(TIED.ops) // 3, 2 * len(TIED.ops) // 3
    dag = with_use(with_use(TIED, first, "other", 2_000_000), second + 1, "other", 2_000_000)
    plan = planned(dag, homes(6, 180), standbys=0)
    assert len(holders(plan, dag, "wte")) == len(holders(plan, dag, "other")) == 1


def test_replicas_of_a_tied_model_are_rings() -> None:
    training = replace(TRAINING, n_micro=8, blocks=2, replicas="2")
    request = PlanRequest("job", 1, TIED, None, training, homes(6, 200), standbys=0)
    plan = best_plan(request)
    validate(plan, TIED, training)
    assert len(plan.replicas) == 2
    assert all(any(stage.further for stage in replica.stages) for replica in plan.replicas)


def with_use(dag: OpDag, at: int, name: str, elements: int = 0) -> OpDag:
    """Put an op that uses a parameter before op ``at``, between what it reads and it."""
    width = dag.ops[at - 1].outputs[0].shape[0]
    new = op(at, (at - 1,), parameter=name, elements=width, flops=10_000_000)

    def moved(ref: object) -> object:
        if isinstance(ref, LeafRef):
            return ref
        return replace(ref, op=ref.op + (ref.op >= at))  # type: ignore[type-var, attr-defined]

    later = (replace(node, args=tuple(moved(ref) for ref in node.args)) for node in dag.ops[at:])  # type: ignore[misc]
    parameters = dict(dag.parameters)
    if elements:
        parameters.setdefault(name, StateMeta(TensorMeta((elements,), "float32"), requires_grad=True))
    ops = (*dag.ops[:at], new, *later)
    read = {ref.op for node in ops for ref in node.args if not isinstance(ref, LeafRef)}  # type: ignore[union-attr]
    if at not in read:  # what nobody reads would be no part of the loss
        last = ops[-1]
        assert last.kind is Kind.LOSS
        ops = (*ops[:-1], replace(last, args=(*last.args, replace(last.args[0], op=at))))  # type: ignore[type-var, call-arg]
    assert all(ref.source is Source.PARAMETER or ref.name == "tokens" for n in ops for ref in leaf_refs(n))
    return replace(dag, ops=ops, parameters=parameters, loss=len(ops) - 1)


def test_who_is_left_out_of_a_ring_is_said_what_a_step_would_take_with_it() -> None:
    plan = planned(TIED, homes(6, 120), standbys=0)
    assert plan.left_out
    assert all("a step with it" in why or "would slow the step" in why for _, why in plan.left_out)
