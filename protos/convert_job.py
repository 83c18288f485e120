"""Declared training, data and jobs between pb2 and atoll's types; what arrives is bounded."""

from __future__ import annotations

from atoll.dataset_spec import DataField, DataSpec, Layout
from atoll.errors import BadFrame, UsageError
from atoll.exchange import EXACT
from atoll.job import (
    MAX_STANDBYS,
    JobSpec,
    Optimizer,
    OptimizerName,
    ParamGroup,
    Precision,
    Recompute,
    Schedule,
    ScheduleKind,
    TrainingSpec,
)
from protos import atoll_job_pb2 as pb
from protos import bounds
from protos.bounds import Limits
from protos.convert_federated import federated_from_proto, federated_to_proto
from protos.text_limits import clean

_MAX_SAMPLES = 2**48  # keeps every index within 64 bits
_MAX_STEPS = 10**9


def group_to_proto(group: ParamGroup) -> pb.ParamGroup:
    """Convert a parameter group."""
    message = pb.ParamGroup(patterns=group.patterns, lr_scale=group.lr_scale, frozen=group.frozen)
    if group.weight_decay is not None:
        message.weight_decay = group.weight_decay
    return message


def group_from_proto(message: pb.ParamGroup, limits: Limits) -> ParamGroup:
    """Read a parameter group."""
    patterns = bounds.count("patterns of a parameter group", message.patterns, limits.args)
    return ParamGroup(
        patterns=tuple(bounds.name("pattern", pattern, limits) for pattern in patterns),
        lr_scale=bounds.number("lr_scale", message.lr_scale),
        weight_decay=(
            bounds.number("weight_decay", message.weight_decay) if message.HasField("weight_decay") else None
        ),
        frozen=message.frozen,
    )


def optimizer_to_proto(optimizer: Optimizer) -> pb.Optimizer:
    """The declared optimizer."""
    message = pb.Optimizer(
        name=optimizer.name.value,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        beta1=optimizer.betas[0],
        beta2=optimizer.betas[1],
        eps=optimizer.eps,
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
        groups=[group_to_proto(group) for group in optimizer.groups],
    )
    if optimizer.clip_norm is not None:
        message.clip_norm = optimizer.clip_norm
    return message


def optimizer_from_proto(message: pb.Optimizer, limits: Limits) -> Optimizer:
    """The declared optimizer; every hyper-parameter is finite and in its range."""
    groups = bounds.count("parameter groups", message.groups, limits.args)
    return Optimizer(
        name=bounds.one_of("optimizer", message.name, OptimizerName),
        lr=bounds.number("lr", message.lr),
        weight_decay=bounds.number("weight_decay", message.weight_decay),
        betas=(
            bounds.number("beta1", message.beta1, 0.0, 1.0),
            bounds.number("beta2", message.beta2, 0.0, 1.0),
        ),
        eps=bounds.number("eps", message.eps),
        momentum=bounds.number("momentum", message.momentum),
        nesterov=message.nesterov,
        groups=tuple(group_from_proto(group, limits) for group in groups),
        clip_norm=bounds.number("clip_norm", message.clip_norm) if message.HasField("clip_norm") else None,
    )


def training_to_proto(training: TrainingSpec) -> pb.TrainingSpec:
    """Convert what every stage must know to train; UsageError for a seed outside 64 unsigned bits."""
    _check_seed("seed", training.seed)
    schedule = training.schedule
    return pb.TrainingSpec(
        steps=training.steps,
        n_micro=training.n_micro,
        seed=training.seed,
        optimizer=optimizer_to_proto(training.optimizer),
        schedule=pb.Schedule(
            kind=schedule.kind.value, warmup_steps=schedule.warmup_steps, final=schedule.final
        ),
        precision=training.precision.value,
        recompute=training.recompute.value,
        eval_every=training.eval_every,
        eval_batches=training.eval_batches,
        checkpoint_every=training.checkpoint_every,
        compress=training.compress,
        blocks=training.blocks,
        average_buffers=training.average_buffers,
        replicas=training.replicas,
        exchange=training.exchange,
        local_steps=training.local_steps,
        spot_checks=training.spot_checks,
    )


def training_from_proto(message: pb.TrainingSpec, limits: Limits) -> TrainingSpec:
    """Read what every stage must know to train; TrainingSpec's own ranges raise UsageError."""
    return TrainingSpec(
        steps=message.steps,
        n_micro=message.n_micro,
        seed=message.seed,
        optimizer=optimizer_from_proto(message.optimizer, limits),
        schedule=Schedule(
            kind=bounds.one_of("schedule", message.schedule.kind, ScheduleKind),
            warmup_steps=bounds.within("warmup_steps", message.schedule.warmup_steps, 0, _MAX_STEPS),
            final=bounds.number("final", message.schedule.final),
        ),
        precision=bounds.one_of("precision", message.precision, Precision),
        recompute=bounds.one_of("recompute", message.recompute or "off", Recompute),
        eval_every=message.eval_every,
        eval_batches=message.eval_batches,
        checkpoint_every=message.checkpoint_every,
        compress=message.compress or "off",
        blocks=message.blocks or 1,
        average_buffers=message.average_buffers,
        replicas=bounds.text("replicas", message.replicas, limits.name_chars) or "1",
        exchange=bounds.text("exchange", message.exchange, limits.name_chars) or EXACT,
        local_steps=message.local_steps,
        spot_checks=bounds.number("spot_checks", message.spot_checks, 0.0, 1.0),
    )


def data_to_proto(data: DataSpec) -> pb.DataSpec:
    """Materialised data; UsageError for a seed outside 64 unsigned bits."""
    message = pb.DataSpec(
        fields=[
            pb.DataField(
                input=f.input,
                blob=f.blob,
                layout=f.layout.value,
                length=f.length,
                stride=f.stride,
                offset=f.offset,
            )
            for f in data.fields
        ],
        n_samples=data.n_samples,
        batch=data.batch,
    )
    if data.shuffle_seed is not None:
        _check_seed("shuffle_seed", data.shuffle_seed)
        message.shuffle_seed = data.shuffle_seed
    return message


def data_from_proto(message: pb.DataSpec, limits: Limits, *, elsewhere: bool = False) -> DataSpec:
    """Materialised data; blobs are hashes, windows lie within 48-bit offsets.

    ``elsewhere``: the clients hold it, so that there are no fields and no samples here.
    """
    if elsewhere and (message.fields or message.n_samples):
        raise BadFrame(
            f"a federated job with {len(message.fields)} fields of training data; clients hold theirs"
        )
    fields = []
    for f in bounds.count("data fields", message.fields, limits.args):
        layout = bounds.one_of("layout", f.layout, Layout)
        fields.append(
            DataField(
                input=bounds.name("input", f.input, limits),
                blob=bounds.blob_hash("data blob", f.blob),
                layout=layout,
                length=bounds.within("window length", f.length, int(layout is Layout.WINDOWS), 2**32),
                stride=bounds.within("window stride", f.stride, 0, _MAX_SAMPLES),
                offset=bounds.within("window offset", f.offset, 0, _MAX_SAMPLES),
            )
        )
    return DataSpec(
        fields=tuple(fields),
        n_samples=bounds.within("n_samples", message.n_samples, int(not elsewhere), _MAX_SAMPLES),
        batch=bounds.within("batch", message.batch, 1, 2**24),
        shuffle_seed=message.shuffle_seed if message.HasField("shuffle_seed") else None,
    )


def job_to_proto(spec: JobSpec) -> pb.JobSpec:
    """A submitted job."""
    message = pb.JobSpec(
        name=spec.name,
        training=training_to_proto(spec.training),
        dag_hash=spec.dag_hash,
        eval_dag_hash=spec.eval_dag_hash,
        tensors=[pb.TensorBlob(name=name, blob=spec.tensors[name]) for name in sorted(spec.tensors)],
        data=data_to_proto(spec.data),
        partitioner=spec.partitioner,
        schedule=spec.schedule,
        resume_of=spec.resume_of,
        owner=spec.owner,
        hidden=sorted(spec.hidden),
    )
    if spec.standbys is not None:
        message.standbys = spec.standbys
    if spec.eval_data is not None:
        message.eval_data.CopyFrom(data_to_proto(spec.eval_data))
    if spec.federated is not None:
        message.federated.CopyFrom(federated_to_proto(spec.federated))
    return message


def job_from_proto(message: pb.JobSpec, limits: Limits) -> JobSpec:
    """A submitted job; ``eval_dag_hash`` may be empty when there is no evaluation data."""
    tensors: dict[str, str] = {}
    for t in bounds.count("tensors", message.tensors, limits.items):
        name = bounds.name("tensor name", t.name, limits)
        if name in tensors:
            raise BadFrame(f"tensor {name!r} is given twice")
        tensors[name] = bounds.blob_hash(f"blob of {name!r}", t.blob)
    has_eval = message.HasField("eval_data")
    eval_hash = message.eval_dag_hash
    if eval_hash or has_eval:
        bounds.blob_hash("eval_dag_hash", eval_hash)
    federated = federated_from_proto(message.federated, limits) if message.HasField("federated") else None
    return JobSpec(
        # For people only; cleaned and not refused, since a journal of an older version may hold any.
        name=clean(bounds.text("job name", message.name, limits.name_chars), limits.name_chars) or "job",
        training=training_from_proto(message.training, limits),
        dag_hash=bounds.blob_hash("dag_hash", message.dag_hash),
        eval_dag_hash=eval_hash,
        tensors=tensors,
        data=data_from_proto(message.data, limits, elsewhere=federated is not None),
        eval_data=data_from_proto(message.eval_data, limits) if has_eval else None,
        partitioner=bounds.name("partitioner", message.partitioner, limits),
        schedule=bounds.name("schedule", message.schedule, limits),
        resume_of=bounds.text("resume_of", message.resume_of, limits.name_chars),
        owner=bounds.text("owner", message.owner, limits.name_chars),
        hidden=tuple(
            bounds.text("hidden tensor", name, limits.name_chars)
            for name in bounds.count("hidden tensors", message.hidden, limits.items)
        ),
        federated=federated,
        standbys=(
            bounds.within("standbys", message.standbys, 0, MAX_STANDBYS)
            if message.HasField("standbys")
            else None
        ),
    )


def _check_seed(what: str, seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise UsageError(f"{what} = {seed}; give a number from 0 to 2**64 - 1")
