"""Plans and stage programs between pb2 and atoll's types; what arrives is bounded and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.compression import MAX_RATIO
from atoll.errors import BadFrame
from atoll.exchange import BUCKET_BYTES, MOST_PEERS, Exchange, PairTable
from atoll.job import Recompute
from atoll.microbatch import ScheduleName
from atoll.opdag import OpNode, Source, leaf_refs, op_refs
from atoll.plan import (
    LinkPrediction,
    LinkSpec,
    Mask,
    Plan,
    Prediction,
    Replica,
    StagePrediction,
    StageSpec,
    one_replica,
)
from atoll.program import Produced, Received, StageProgram, TiedParameter
from atoll.rows import same_programs
from protos import atoll_job_pb2 as pb
from protos import bounds
from protos.bounds import Limits
from protos.convert_graph import (
    meta_from_proto,
    meta_to_proto,
    metrics_from_proto,
    node_from_proto,
    node_to_proto,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_U32 = 2**32 - 1
_MAX_PERIOD = 10**6  # steps
_MAX_TERMS = 32
_MAX_BUCKET = 1 << 30  # bytes
_MAX_SCALE = 1e3  # of a stage's memory


def prediction_to_proto(prediction: Prediction) -> pb.Prediction:
    """Convert the timeline's prediction for a plan."""
    message = pb.Prediction(
        step_s=prediction.step_s,
        lower_bound_s=prediction.lower_bound_s,
        bottleneck=prediction.bottleneck,
        reason=prediction.reason,
        stages=[
            pb.StagePrediction(
                worker=s.worker,
                compute_s=s.compute_s,
                busy_share=s.busy_share,
                memory_bytes=s.memory_bytes,
                memory_limit_bytes=s.memory_limit_bytes,
                codec_s=s.codec_s,
                handling_s=s.handling_s,
                gradient_bytes=s.gradient_bytes,
                tied_gradient_bytes=s.tied_gradient_bytes,
                memory_scale=s.memory_scale,
                memory_terms=[pb.MemoryTerm(name=name, bytes=size) for name, size in s.memory_terms],
            )
            for s in prediction.stages
        ],
        links=[
            pb.LinkPrediction(
                source=link.source,
                target=link.target,
                bytes_per_step=link.bytes_per_step,
                busy_s=link.busy_s,
                dense_bytes_per_step=link.dense_bytes_per_step,
                under_way_s=link.under_way_s,
            )
            for link in prediction.links
        ],
        commit_s=prediction.commit_s,
        single_machine=prediction.single_machine,
        notes=prediction.notes,
    )
    if prediction.single_machine_s is not None:
        message.single_machine_s = prediction.single_machine_s
    return message


def prediction_from_proto(message: pb.Prediction, limits: Limits) -> Prediction:
    """Read the timeline's prediction for a plan; for people, so its figures are not judged."""

    def words(what: str, value: str) -> str:
        return bounds.text(what, value, limits.text_chars)

    return Prediction(
        step_s=message.step_s,
        lower_bound_s=message.lower_bound_s,
        bottleneck=words("bottleneck", message.bottleneck),
        reason=words("reason", message.reason),
        stages=tuple(
            StagePrediction(
                worker=words("worker", s.worker),
                compute_s=s.compute_s,
                busy_share=s.busy_share,
                memory_bytes=s.memory_bytes,
                memory_limit_bytes=s.memory_limit_bytes,
                codec_s=s.codec_s,
                handling_s=s.handling_s,
                gradient_bytes=s.gradient_bytes,
                tied_gradient_bytes=s.tied_gradient_bytes,
                memory_scale=bounds.number("memory scale", s.memory_scale, 0.0, _MAX_SCALE) or 1.0,
                memory_terms=tuple(
                    (words("memory term", term.name), term.bytes)
                    for term in bounds.count("memory terms", s.memory_terms, _MAX_TERMS)
                ),
            )
            for s in bounds.count("predicted stages", message.stages, limits.stages)
        ),
        links=tuple(
            LinkPrediction(
                words("worker", p.source),
                words("worker", p.target),
                p.bytes_per_step,
                p.busy_s,
                p.dense_bytes_per_step,
                bounds.number("seconds under way", p.under_way_s),
            )
            for p in bounds.count("predicted links", message.links, limits.items)
        ),
        commit_s=message.commit_s,
        single_machine_s=message.single_machine_s if message.HasField("single_machine_s") else None,
        single_machine=words("single machine", message.single_machine),
        notes=tuple(words("note", note) for note in bounds.count("notes", message.notes, limits.args)),
    )


def plan_to_proto(plan: Plan) -> pb.Plan:
    """Convert a versioned plan with its prediction."""
    message = pb.Plan(
        job=plan.job,
        version=plan.version,
        dag_hash=plan.dag_hash,
        eval_dag_hash=plan.eval_dag_hash,
        partitioner=plan.partitioner,
        schedule=plan.schedule.value,
        recompute=plan.recompute.value,
        n_micro=plan.n_micro,
        blocks=plan.blocks,
        left_out=[pb.LeftOut(worker=worker, why=why) for worker, why in plan.left_out],
        absent=sorted(plan.absent),
    )
    if len(plan.replicas) == 1:
        message.stages.extend(_stage_to_proto(stage) for stage in plan.stages)
        message.links.extend(link_to_proto(link) for link in plan.links)
    else:
        message.replicas.extend(_replica_to_proto(replica) for replica in plan.replicas)
    if plan.exchange is not None:
        message.exchange.CopyFrom(_exchange_to_proto(plan.exchange))
    if plan.prediction is not None:
        message.prediction.CopyFrom(prediction_to_proto(plan.prediction))
    return message


def plan_from_proto(message: pb.Plan, limits: Limits) -> Plan:
    """Read a versioned plan; ``atoll.plan.validate`` checks it against its DAG."""
    n_micro = bounds.within("n_micro", message.n_micro, 1, 4096)
    return Plan(
        job=bounds.name("job", message.job, limits),
        version=message.version,
        dag_hash=_optional_hash("dag_hash", message.dag_hash),
        eval_dag_hash=_optional_hash("eval_dag_hash", message.eval_dag_hash),
        partitioner=bounds.name("partitioner", message.partitioner, limits),
        schedule=bounds.one_of("schedule", message.schedule, ScheduleName),
        n_micro=n_micro,
        recompute=_decided(message.recompute),
        blocks=bounds.within("blocks", message.blocks or 1, 1, n_micro),
        replicas=_replicas_from_proto(message, n_micro, limits),
        exchange=exchange_of(message, limits),
        absent=frozenset(bounds.count("absent ranks", message.absent, limits.stages)),
        left_out=tuple(
            (bounds.name("worker", o.worker, limits), bounds.text("why", o.why, limits.text_chars))
            for o in bounds.count("workers left out", message.left_out, limits.items)
        ),
        prediction=(
            prediction_from_proto(message.prediction, limits) if message.HasField("prediction") else None
        ),
    )


def exchange_of(message: pb.Plan, limits: Limits) -> Exchange | None:
    """Read a plan's exchange alone."""
    return _exchange_from_proto(message.exchange, limits) if message.HasField("exchange") else None


def _decided(recompute: str) -> Recompute:
    """Read what a plan recomputes; BadFrame where that is left open."""
    found = bounds.one_of("recompute", recompute or "off", Recompute)
    if found is Recompute.AUTO:
        raise BadFrame("a plan that leaves open what to recompute")
    return found


def link_to_proto(link: LinkSpec) -> pb.LinkSpec:
    """Convert the codecs of the tensors from one stage to another."""
    return pb.LinkSpec(
        source=link.source,
        target=link.target,
        codec=link.codec,
        ratio=link.ratio,
        mask=link.mask,
        reason=link.reason,
    )


def link_from_proto(message: pb.LinkSpec, n_stages: int, limits: Limits) -> LinkSpec:
    """UsageError for a stage that the plan does not have, or a ratio below 1 or not finite."""
    return LinkSpec(
        source=bounds.within("source stage of a link", message.source, 0, n_stages - 1),
        target=bounds.within("target stage of a link", message.target, 0, n_stages - 1),
        codec=bounds.name("codec", message.codec, limits),
        ratio=bounds.number("compression ratio", message.ratio, low=1.0, high=MAX_RATIO),
        mask=bounds.one_of("mask", message.mask, Mask),
        reason=bounds.text("reason", message.reason, limits.text_chars),
    )


def _replica_to_proto(replica: Replica) -> pb.Replica:
    start, stop = replica.micros
    return pb.Replica(
        start=start,
        stop=stop,
        stages=[_stage_to_proto(stage) for stage in replica.stages],
        links=[link_to_proto(link) for link in replica.links],
    )


def _replicas_from_proto(message: pb.Plan, n_micro: int, limits: Limits) -> tuple[Replica, ...]:
    """Read the pipeline of a plan that has one, or the replicas of one that has several."""
    if not message.replicas:
        return one_replica(n_micro, *_pipeline_from_proto(message.stages, message.links, limits))
    if message.stages or message.links or len(message.replicas) == 1:
        raise BadFrame(f"a plan of {len(message.replicas)} replicas in the form of another number")
    bounds.count("stages", [s for r in message.replicas for s in r.stages], limits.stages)
    found = []
    for replica in message.replicas:
        stop = bounds.within("stop of a replica", replica.stop, 1, n_micro)
        start = bounds.within("start of a replica", replica.start, 0, stop - 1)
        found.append(Replica((start, stop), *_pipeline_from_proto(replica.stages, replica.links, limits)))
    return tuple(found)


def _exchange_to_proto(exchange: Exchange) -> pb.Exchange:
    message = pb.Exchange(
        rule=exchange.rule,
        every=exchange.every,
        codec=exchange.codec,
        ratio=exchange.ratio,
        fragments=exchange.fragments,
        delay=exchange.delay,
        quorum=exchange.quorum,
        deadline_s=exchange.deadline_s,
        bucket_bytes=exchange.bucket_bytes,
        rates=exchange.rates,
        sites=exchange.sites,
        pair_rates=exchange.pairs.rates if exchange.pairs else (),
        pair_threshold=exchange.pairs.threshold if exchange.pairs else 0.0,
    )
    if exchange.inner is not None:
        message.inner.CopyFrom(_exchange_to_proto(exchange.inner))
    return message


def _exchange_from_proto(message: pb.Exchange, limits: Limits, *, inner: bool = False) -> Exchange:
    """BadFrame for an exchange within an inner one; ``atoll.exchange.check_exchange`` judges the rest."""
    if inner and message.HasField("inner"):
        raise BadFrame("an exchange within the inner exchange")
    return Exchange(
        rule=bounds.name("exchange", message.rule, limits),
        every=bounds.within("steps between exchanges", message.every, 1, _MAX_PERIOD),
        codec=bounds.name("codec", message.codec, limits),
        ratio=bounds.number("compression ratio", message.ratio, low=1.0, high=MAX_RATIO),
        fragments=bounds.within("fragments", message.fragments, 1, _MAX_PERIOD),
        delay=bounds.within("delay", message.delay, 0, _MAX_PERIOD),
        quorum=bounds.number("quorum", message.quorum, low=0.0, high=1.0),
        deadline_s=bounds.number("deadline", message.deadline_s, low=0.0),
        inner=_exchange_from_proto(message.inner, limits, inner=True) if message.HasField("inner") else None,
        bucket_bytes=bounds.within("bytes of a bucket", message.bucket_bytes or BUCKET_BYTES, 1, _MAX_BUCKET),
        rates=tuple(
            bounds.number("rate of a rank", rate, low=0.0)
            for rate in bounds.count("rates of ranks", message.rates, limits.stages)
        ),
        sites=tuple(bounds.count("sites of ranks", message.sites, limits.stages)),
        pairs=_pairs_from_proto(message) if message.pair_rates else None,
    )


def _pairs_from_proto(message: pb.Exchange) -> PairTable:
    rates = bounds.count("rates of pairs", message.pair_rates, MOST_PEERS**2)
    return PairTable(
        tuple(bounds.number("rate of a pair", rate, low=0.0) for rate in rates),
        bounds.number("threshold of pairs", message.pair_threshold, low=0.0),
    )


def _pipeline_from_proto(
    stages: Sequence[pb.StageSpec], links: Sequence[pb.LinkSpec], limits: Limits
) -> tuple[tuple[StageSpec, ...], tuple[LinkSpec, ...]]:
    count = len(bounds.count("stages", stages, limits.stages))
    return (
        tuple(_stage_from_proto(stage, limits) for stage in stages),
        tuple(link_from_proto(link, count, limits) for link in bounds.count("links", links, limits.items)),
    )


def _stage_to_proto(stage: StageSpec) -> pb.StageSpec:
    return pb.StageSpec(
        start=stage.start,
        stop=stage.stop,
        eval_start=stage.eval_start,
        eval_stop=stage.eval_stop,
        workers=[stage.worker],
        warmup=stage.warmup,
        held=stage.held,
    )


def _stage_from_proto(message: pb.StageSpec, limits: Limits) -> StageSpec:
    if len(message.workers) != 1:
        raise BadFrame(f"a stage with {len(message.workers)} workers, not one")
    stop = bounds.within("stop of a stage", message.stop, 0, limits.ops)
    eval_stop = bounds.within("eval_stop of a stage", message.eval_stop, 0, limits.ops)
    return StageSpec(
        start=bounds.within("start of a stage", message.start, 0, stop),
        stop=stop,
        eval_start=bounds.within("eval_start of a stage", message.eval_start, 0, eval_stop),
        eval_stop=eval_stop,
        worker=bounds.name("worker", message.workers[0], limits),
        warmup=bounds.within("warmup", message.warmup, 0, 4096),
        held=bounds.within("held", message.held, 0, 4096),
    )


def program_to_proto(program: StageProgram) -> pb.StageProgram:
    """Convert a stage's share of the DAG."""
    message = pb.StageProgram(
        stage=program.stage,
        n_stages=program.n_stages,
        ops=[pb.PlacedOp(position=op, node=node_to_proto(node)) for op, node in program.ops],
        constant_ops=sorted(program.constant_ops),
        received=[_received_to_proto(r) for r in program.received],
        produced=[
            pb.Produced(op=p.op, targets=p.targets, requires_grad=p.requires_grad, grad_from=p.grad_from)
            for p in program.produced
        ],
        inputs=program.inputs,
        parameters=program.parameters,
        buffers=program.buffers,
        constants=program.constants,
        tied=[pb.Tied(name=t.name, holders=t.holders, index=t.index) for t in program.tied],
        metrics=[pb.NamedOp(name=name, op=op) for name, op in program.metrics],
        weight=program.weight,
        rows=program.rows,
    )
    if program.tail is not None:
        message.tail.CopyFrom(program_to_proto(program.tail))
    if program.loss is not None:
        message.loss = program.loss
    return message


def program_from_proto(message: pb.StageProgram, limits: Limits) -> StageProgram:
    """Read a stage's share of the DAG; positions ascend, references name earlier ops, received values or
    declared leaves, and every neighbour is another stage of the plan."""
    n_stages = bounds.within("n_stages", message.n_stages, 1, limits.stages)
    stage = bounds.within("stage", message.stage, 0, n_stages - 1)
    program = StageProgram(
        stage=stage,
        n_stages=n_stages,
        ops=tuple(
            (bounds.within("op position", p.position, 0, limits.ops), node_from_proto(p.node, limits))
            for p in bounds.count("ops", message.ops, limits.ops)
        ),
        constant_ops=frozenset(bounds.count("constant ops", message.constant_ops, limits.ops)),
        received=tuple(
            _received_from_proto(r, stage, limits)
            for r in bounds.count("received values", message.received, limits.items)
        ),
        produced=tuple(
            _produced_from_proto(p, stage, n_stages)
            for p in bounds.count("produced values", message.produced, limits.items)
        ),
        inputs=_names("inputs", message.inputs, limits),
        parameters=_names("parameters", message.parameters, limits),
        buffers=_names("buffers", message.buffers, limits),
        constants=_names("constants", message.constants, limits),
        tied=tuple(_tied_from_proto(t, stage, n_stages, limits) for t in message.tied),
        loss=message.loss if message.HasField("loss") else None,
        metrics=tuple(sorted(metrics_from_proto(message.metrics, _U32 + 1, limits).items())),
        weight=message.weight if message.HasField("weight") else None,
        rows=bounds.within("rows of a micro-batch", message.rows, 0, limits.tensor_bytes),
        tail=_tail_from_proto(message, limits),
    )
    _check_program(program)
    return program


def _received_to_proto(received: Received) -> pb.Received:
    message = pb.Received(
        op=received.op,
        source=received.source,
        requires_grad=received.requires_grad,
        grad_to=received.grad_to,
        meta=meta_to_proto(received.meta),
    )
    if received.grad_from is not None:
        message.grad_from = received.grad_from
    return message


def _received_from_proto(message: pb.Received, stage: int, limits: Limits) -> Received:
    if stage == 0:
        raise BadFrame("stage 0 receives no value, since no stage comes before it")
    source = bounds.within("source stage of a value", message.source, 0, stage - 1)
    grad_from = None
    if message.HasField("grad_from"):
        grad_from = bounds.within("stage a gradient comes from", message.grad_from, stage + 1, limits.stages)
    return Received(
        op=bounds.within("position of a received value", message.op, 0, limits.ops),
        source=source,
        requires_grad=message.requires_grad,
        grad_from=grad_from,
        grad_to=bounds.within("stage a gradient goes to", message.grad_to, source, stage - 1),
        meta=meta_from_proto(message.meta, limits),
    )


def _produced_from_proto(message: pb.Produced, stage: int, n_stages: int) -> Produced:
    targets = tuple(bounds.count("targets of a value", message.targets, n_stages))
    if not targets or list(targets) != sorted(set(targets)) or targets[0] <= stage or targets[-1] >= n_stages:
        raise BadFrame(f"value {message.op} of stage {stage} goes to stages {targets} of {n_stages}")
    if message.grad_from != targets[0]:
        raise BadFrame(f"gradient of value {message.op} comes from {message.grad_from}, not {targets[0]}")
    return Produced(message.op, targets, message.requires_grad, message.grad_from)


def _tied_from_proto(message: pb.Tied, stage: int, n_stages: int, limits: Limits) -> TiedParameter:
    holders = tuple(bounds.count("holders of a tied parameter", message.holders, n_stages))
    if list(holders) != sorted(set(holders)) or stage not in holders or holders[-1] >= n_stages:
        raise BadFrame(f"tied parameter {message.name[:64]!r} of stage {stage} is held by {holders}")
    index = bounds.within("index of a tied parameter", message.index, 0, limits.items)
    return TiedParameter(bounds.name("tied parameter", message.name, limits), holders, index)


def _tail_from_proto(message: pb.StageProgram, limits: Limits) -> StageProgram | None:
    if not message.HasField("tail"):
        return None
    if message.tail.HasField("tail"):
        raise BadFrame("a program's tail has a tail")
    return program_from_proto(message.tail, limits)


def _check_program(program: StageProgram) -> None:
    tail = program.tail
    if tail is not None and not (0 < tail.rows != program.rows > 0 and same_programs(program, tail)):
        raise BadFrame(f"the tail of stage {program.stage} is not the same program with other rows")
    positions = [op for op, _ in program.ops]
    if positions != sorted(set(positions)):
        raise BadFrame(f"op positions of stage {program.stage} do not ascend")
    here = set(positions)
    if not program.constant_ops <= here:
        raise BadFrame(f"constant ops {sorted(program.constant_ops - here)[:8]} are not in the stage")
    known = {r.op for r in program.received}
    leaves = {
        Source.INPUT: set(program.inputs),
        Source.PARAMETER: set(program.parameters),
        Source.BUFFER: set(program.buffers),
        Source.CONSTANT: set(program.constants),
    }
    if len(known) != len(program.received) or known & here:
        raise BadFrame(f"stage {program.stage} receives a value twice or one that it computes")
    for position, node in program.ops:
        _check_node(position, node, known, leaves)
        known.add(position)
    for produced in program.produced:
        if produced.op not in here:
            raise BadFrame(f"produced value {produced.op} is not computed by stage {program.stage}")
    if program.loss is not None and program.loss not in here:
        raise BadFrame(f"loss at op {program.loss} is not computed by stage {program.stage}")
    if program.weight is not None and (program.loss is None or program.weight not in here):
        raise BadFrame(f"the loss's weight at op {program.weight} is not with the loss")
    for metric, op in program.metrics:
        if op not in here:
            raise BadFrame(f"metric {metric!r} at op {op} is not computed by stage {program.stage}")
    if not {t.name for t in program.tied} <= leaves[Source.PARAMETER]:
        raise BadFrame(f"stage {program.stage} ties a parameter that it does not hold")


def _check_node(position: int, node: OpNode, known: set[int], leaves: dict[Source, set[str]]) -> None:
    for op in op_refs(node):
        if op not in known:
            raise BadFrame(f"op {position} ({node.name}) reads op {op}, neither computed before nor received")
    for leaf in leaf_refs(node):
        if leaf.name not in leaves[leaf.source]:
            raise BadFrame(f"op {position} ({node.name}) reads undeclared {leaf.source.value} {leaf.name!r}")


def _names(what: str, names: object, limits: Limits) -> tuple[str, ...]:
    found = tuple(bounds.name(what, str(n), limits) for n in bounds.count(what, list(names), limits.items))  # type: ignore[call-overload]
    if len(set(found)) != len(found):
        raise BadFrame(f"{what} repeat a name")
    return found


def _optional_hash(what: str, value: str) -> str:
    return bounds.blob_hash(what, value) if value else value
