"""What the compute process is asked to do, decoded: assignments, federated jobs, rounds, ops to time.

Only here does anybody look into the graphs that strangers send. Every reader raises BadFrame, or
UsageError of the types' own checks, for what breaks a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.bounded import MAX_ITEMS
from atoll.errors import BadFrame
from atoll.job import Precision
from atoll.messages.to_worker import Replay
from atoll.opdag import leaf_refs
from atoll.plan import Plan
from protos import atoll_control_pb2 as pb
from protos import bounds, coding, convert
from worker.machine.op_probe import OpProbe
from worker.session import wire
from worker.stage.assignment import Assignment, PeerLink

MAX_BATCH = 1 << 24


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """A plan under which the stage that is held goes on from ``step`` on, and its neighbours there."""

    plan: Plan
    links: tuple[PeerLink, ...]
    step: int
    standby: bool = False
    store: bool = False  # as it is


@dataclass(frozen=True, slots=True)
class OpsRequest:
    """Ops to time, as ``worker.machine.op_timing`` takes them."""

    request: int
    probes: tuple[OpProbe, ...]
    precision: Precision


def assignment(m: pb.Assign) -> Assignment:
    """A stage of a plan."""
    job = bounds.name("job", m.job)
    plan = convert.from_proto(m.plan)
    rank = bounds.within("rank", m.rank, 0, len(plan.places) - 1)
    return Assignment(
        job=job,
        version=m.plan_version,
        training=convert.from_proto(m.training),
        program=convert.from_proto(m.program),
        eval_program=convert.from_proto(m.eval_program) if m.HasField("eval_program") else None,
        plan=plan,
        replica=plan.places[rank].replica,
        links=wire.neighbours(m),
        tensors=_tensors(m),
        states=convert.state_from_proto(m.metas),
        first_step=m.first_step,
        replay=coding.read(Replay, m.replay) if m.HasField("replay") else None,
        standby=m.replay.standby,
    )


def reconfiguration(m: pb.Reconfigure) -> Reconfiguration:
    """Other workers for some stages of the plan."""
    plan = convert.from_proto(m.plan)
    if (plan.job, plan.version) != (m.job, m.plan_version):
        raise BadFrame(f"plan of {plan.job} version {plan.version} said to be version {m.plan_version}")
    return Reconfiguration(plan, wire.neighbours(m), m.step, m.standby, m.store)


def ops_request(m: pb.ProbeOps) -> OpsRequest:
    """Ops to time."""
    precision = bounds.one_of("precision", m.precision or "fp32", Precision)
    return OpsRequest(m.request, tuple(_op_probe(op) for op in m.ops), precision)


def _op_probe(m: pb.ProbeOp) -> OpProbe:
    node = convert.from_proto(m.op)
    leaves = convert.metas_from_proto(m.leaves)
    missing = [leaf.name for leaf in leaf_refs(node) if leaf.name not in leaves]
    if missing:
        raise BadFrame(f"op {node.target} to time lacks the shape of {missing[:3]}")
    return OpProbe(
        bounds.name("signature", m.signature),
        node,
        tuple(convert.from_proto(meta) for meta in m.op_inputs),
        tuple(leaves[leaf.name] for leaf in leaf_refs(node)),
    )


def _tensors(m: pb.Assign) -> dict[str, str]:
    return {
        bounds.name("tensor", t.name): bounds.blob_hash("blob", t.blob)
        for t in bounds.count("tensors", list(m.tensors), MAX_ITEMS)
    }
