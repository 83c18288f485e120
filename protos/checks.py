"""What must hold among the fields of a graph, a program, a plan or a job that a peer sent, beyond the bounds
of each. Every check raises BadFrame with what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from atoll.bounded import MAX_OPS, MAX_TENSOR_BYTES
from atoll.dataset_spec import DataField, Layout
from atoll.errors import BadFrame
from atoll.exchange import Exchange
from atoll.job import JobSpec
from atoll.opdag import (
    DTYPE_BYTES,
    Autocast,
    OpDag,
    OpNode,
    Source,
    TensorMeta,
    leaf_refs,
    op_refs,
)
from atoll.plan import Plan, Replica, StageSpec
from atoll.program import Produced, Received, StageProgram, TiedParameter
from atoll.rows import same_form, same_programs
from protos.bounds import blob_hash, within


def check_meta(meta: TensorMeta) -> None:
    """A known dtype, and no more bytes than a tensor may have."""
    if meta.dtype not in DTYPE_BYTES:
        raise BadFrame(f"tensor dtype {meta.dtype[:64]!r} is unknown; known are {', '.join(DTYPE_BYTES)}")
    n_bytes = prod(meta.shape) * DTYPE_BYTES[meta.dtype]
    # A zero elsewhere must not hide an absurd extent.
    if n_bytes > MAX_TENSOR_BYTES or any(extent > MAX_TENSOR_BYTES for extent in meta.shape):
        raise BadFrame(f"tensor of shape {meta.shape}: {n_bytes} bytes > {MAX_TENSOR_BYTES}")


def check_autocast(autocast: Autocast) -> None:
    """A known dtype."""
    if autocast.dtype not in DTYPE_BYTES:
        raise BadFrame(f"autocast dtype {autocast.dtype[:64]!r} is unknown")


def check_node(node: OpNode) -> None:
    """What is cheap to run again, and what few bits stand for, is of what is saved."""
    within("bytes_repeatable", node.bytes_repeatable, 0, node.bytes_saved)
    within("bytes_few", node.bytes_few, 0, node.bytes_saved)
    within("elements_few", node.elements_few, 0, node.bytes_few)


# ---------------------------------------------------------------- graphs


def check_dag(dag: OpDag) -> None:
    """Every position and name that it mentions exists, references point backwards, and its tail is the same
    graph with other shapes."""
    if dag.tail is not None and (dag.training or dag.tail.tail is not None):
        raise BadFrame("an op-DAG with a tail that only an evaluation has, once")
    if not dag.ops:
        raise BadFrame("an op-DAG without ops")
    last = len(dag.ops) - 1
    within("position of the loss", dag.loss, 0, last)
    within("position of the weight", dag.weight or 0, 0, last)
    for begin, end in dag.unsplittable:
        within("end of an unsplittable range", end, 1, last + 1)
        within("begin of an unsplittable range", begin, 0, end - 1)
    for op in dag.constant_ops:
        within("constant op", op, 0, last)
    for metric, op in dag.metrics.items():
        within(f"position of metric {metric[:64]!r}", op, 0, last)
    _check_references(dag)
    if dag.tail is not None and not same_form(dag, dag.tail):
        raise BadFrame("an op-DAG's tail is another graph")


def _check_references(dag: OpDag) -> None:
    leaves: dict[Source, Iterable[str]] = {
        Source.INPUT: dag.inputs.keys(),
        Source.PARAMETER: dag.parameters.keys(),
        Source.BUFFER: dag.buffers.keys(),
        Source.CONSTANT: dag.constants.keys(),
    }
    for position, node in enumerate(dag.ops):
        for op in op_refs(node):
            if op >= position:
                raise BadFrame(f"op {position} ({node.name}) reads op {op}, which does not come before it")
        for leaf in leaf_refs(node):
            if leaf.name not in leaves[leaf.source]:
                raise BadFrame(f"op {position} ({node.name}) reads unknown {leaf.source.value} {leaf.name!r}")
    known = dag.parameters.keys() | dag.buffers.keys() | dag.constants.keys()
    for alias, name in dag.aliases.items():
        if name not in known:
            raise BadFrame(f"alias {alias!r} names unknown tensor {name!r}")
    told = {f"metric {metric!r}": op for metric, op in dag.metrics.items()}
    if dag.weight is not None:
        told["the loss's weight"] = dag.weight
    for what, op in told.items():
        if dag.ops[op].is_tuple or [meta.elements for meta in dag.ops[op].outputs] != [1]:
            raise BadFrame(f"{what} is op {op} ({dag.ops[op].name}), which is not a scalar")


# ---------------------------------------------------------------- programs


def check_program(program: StageProgram) -> None:
    """Positions ascend, references name earlier ops, received values or declared leaves, and every neighbour
    is another stage of the plan."""
    stage, n_stages, tail = program.stage, program.n_stages, program.tail
    within("stage", stage, 0, n_stages - 1)
    if tail is not None and tail.tail is not None:
        raise BadFrame("a program's tail has a tail")
    if tail is not None and not (0 < tail.rows != program.rows > 0 and same_programs(program, tail)):
        raise BadFrame(f"the tail of stage {stage} is not the same program with other rows")
    for received in program.received:
        _check_received(received, stage)
    for produced in program.produced:
        _check_produced(produced, stage, n_stages)
    for tied in program.tied:
        _check_tied(tied, stage, n_stages)
    _check_positions(program)
    if not {t.name for t in program.tied} <= set(program.parameters):
        raise BadFrame(f"stage {stage} ties a parameter that it does not hold")


def _check_received(received: Received, stage: int) -> None:
    if stage == 0:
        raise BadFrame("stage 0 receives no value, since no stage comes before it")
    within("position of a received value", received.op, 0, MAX_OPS)
    within("source stage of a value", received.source, 0, stage - 1)
    if received.grad_from is not None:
        within("stage a gradient comes from", received.grad_from, stage + 1, MAX_OPS)
    within("stage a gradient goes to", received.grad_to, received.source, stage - 1)


def _check_produced(value: Produced, stage: int, n_stages: int) -> None:
    targets = value.targets
    if not targets or list(targets) != sorted(set(targets)) or targets[0] <= stage or targets[-1] >= n_stages:
        raise BadFrame(f"value {value.op} of stage {stage} goes to stages {targets[:8]} of {n_stages}")
    if value.grad_from != targets[0]:
        raise BadFrame(f"gradient of value {value.op} comes from {value.grad_from}, not {targets[0]}")


def _check_tied(tied: TiedParameter, stage: int, n_stages: int) -> None:
    holders = tied.holders
    if list(holders) != sorted(set(holders)) or stage not in holders or holders[-1] >= n_stages:
        raise BadFrame(f"tied parameter {tied.name[:64]!r} of stage {stage} is held by {holders[:8]}")


def _check_positions(program: StageProgram) -> None:
    positions = [op for op, _ in program.ops]
    if positions != sorted(set(positions)) or positions[-1:] > [MAX_OPS]:
        raise BadFrame(f"op positions of stage {program.stage} do not ascend")
    here = set(positions)
    if not program.constant_ops <= here:
        raise BadFrame(f"constant ops {sorted(program.constant_ops - here)[:8]} are not in the stage")
    known = {r.op for r in program.received}
    if len(known) != len(program.received) or known & here:
        raise BadFrame(f"stage {program.stage} receives a value twice or one that it computes")
    leaves = {
        Source.INPUT: set(program.inputs),
        Source.PARAMETER: set(program.parameters),
        Source.BUFFER: set(program.buffers),
        Source.CONSTANT: set(program.constants),
    }
    for position, node in program.ops:
        _check_reads(position, node, known, leaves)
        known.add(position)
    for produced in program.produced:
        if produced.op not in here:
            raise BadFrame(f"produced value {produced.op} is not computed by stage {program.stage}")
    if program.loss is not None and program.loss not in here:
        raise BadFrame(f"loss at op {program.loss} is not computed by stage {program.stage}")
    if program.weight is not None and (program.loss is None or program.weight not in here):
        raise BadFrame(f"the loss's weight at op {program.weight} is not with the loss")
    if len({metric for metric, _ in program.metrics}) < len(program.metrics):
        raise BadFrame("a metric's name repeats")
    for metric, op in program.metrics:
        if op not in here:
            raise BadFrame(f"metric {metric!r} at op {op} is not computed by stage {program.stage}")


def _check_reads(position: int, node: OpNode, known: set[int], leaves: dict[Source, set[str]]) -> None:
    for op in op_refs(node):
        if op not in known:
            raise BadFrame(f"op {position} ({node.name}) reads op {op}, neither computed before nor received")
    for leaf in leaf_refs(node):
        if leaf.name not in leaves[leaf.source]:
            raise BadFrame(f"op {position} ({node.name}) reads undeclared {leaf.source.value} {leaf.name!r}")


# ---------------------------------------------------------------- plans and jobs


def check_stage(stage: StageSpec) -> None:
    """Both intervals of each piece go forward, and what it keeps is decided."""
    if stage.keeping.open:
        raise BadFrame("a stage that leaves open what it keeps")
    for piece in stage.pieces:
        within("stop of a stage", piece.stop, 0, MAX_OPS)
        within("start of a stage", piece.start, 0, piece.stop)
        within("eval_stop of a stage", piece.eval_stop, 0, MAX_OPS)
        within("eval_start of a stage", piece.eval_start, 0, piece.eval_stop)


def check_replica(replica: Replica) -> None:
    """Its links name pieces that it has."""
    last = sum(len(stage.pieces) for stage in replica.stages) - 1
    for link in replica.links:
        within("source of a link", link.source, 0, last)
        within("target of a link", link.target, 0, last)


def check_plan(plan: Plan) -> None:
    """Its replicas and blocks are of its micro-batches; ``atoll.plan.validate`` checks it against its DAG."""
    within("blocks", plan.blocks, 1, plan.n_micro)
    for replica in plan.replicas:
        start, stop = replica.micros
        within("stop of a replica", stop, 1, plan.n_micro)
        within("start of a replica", start, 0, stop - 1)
        check_replica(replica)


def check_exchange(exchange: Exchange) -> None:
    """At most one within another; ``atoll.exchange.check_exchange`` judges the rest."""
    if exchange.inner is not None and exchange.inner.inner is not None:
        raise BadFrame("an exchange within the inner exchange")


def check_field(field: DataField) -> None:
    """Windows have a length."""
    within("window length", field.length, int(field.layout is Layout.WINDOWS), 2**32)


def check_job(spec: JobSpec) -> None:
    """Training data is here, with one worker or with the clients, and an evaluation has a graph."""
    fields, samples = len(spec.data.fields), spec.data.n_samples
    if spec.data.pinned is not None:
        if fields or spec.federated is not None:
            raise BadFrame("data that stay with a worker, and others as well")
    elif spec.federated is None:
        within("n_samples", samples, 1, samples)
    elif fields or samples:
        raise BadFrame(f"a federated job with {fields} fields of training data; clients hold theirs")
    if spec.eval_data is not None:
        within("n_samples of the evaluation", spec.eval_data.n_samples, 1, spec.eval_data.n_samples)
        blob_hash("eval_dag_hash", spec.eval_dag_hash)


CHECKS: Mapping[type, Callable[[Any], None]] = {
    TensorMeta: check_meta,
    Autocast: check_autocast,
    OpNode: check_node,
    OpDag: check_dag,
    StageProgram: check_program,
    StageSpec: check_stage,
    Plan: check_plan,
    Exchange: check_exchange,
    DataField: check_field,
    JobSpec: check_job,
}
