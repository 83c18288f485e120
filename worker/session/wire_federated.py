"""A federated job's messages: the coordinator's orders to events, a client's answers to pb2.

Every reader raises BadFrame, or UsageError of the types' own checks, for what breaks a bound.
"""

from __future__ import annotations

from atoll.compression import MAX_RATIO
from protos import atoll_control_pb2 as pb
from protos import bounds, convert
from protos.bounds import DEFAULT_LIMITS
from worker.federated.orders import Assessment, EvaluateOrder, Joining, ModelRef, TrainOrder, Update
from worker.session import events

MAX_ROUND = (1 << 31) - 1  # a round's steps have keys of 64 bits
MAX_BATCH = 1 << 24


def invited(m: pb.Participate) -> events.Participate:
    """A federated job that wants this worker."""
    joining = Joining(
        job=bounds.name("job", m.job, DEFAULT_LIMITS),
        version=m.version,
        training=convert.from_proto(m.training),
        federated=convert.from_proto(m.federated),
        program=convert.from_proto(m.program),
        eval_program=convert.from_proto(m.eval_program) if m.HasField("eval_program") else None,
        states=convert.state_from_proto(m.metas, DEFAULT_LIMITS),
        tensors={
            bounds.name("tensor", t.name, DEFAULT_LIMITS): bounds.blob_hash("blob", t.blob)
            for t in bounds.count("tensors", list(m.tensors), DEFAULT_LIMITS.items)
        },
        batch=bounds.within("batch", m.batch, 1, MAX_BATCH),
    )
    return events.Participate(joining.job, joining.version, joining)


def train_asked(m: pb.TrainRound) -> events.TrainRound:
    """A round to train."""
    at_round = bounds.within("round", m.round, 0, MAX_ROUND)
    codec = bounds.name("codec", m.codec, DEFAULT_LIMITS)
    ratio = bounds.number("ratio", m.ratio, 1.0, MAX_RATIO)
    return events.TrainRound(m.job, at_round, TrainOrder(at_round, _model(m.model), codec, ratio, m.seed))


def evaluation_asked(m: pb.EvaluateRound) -> events.EvaluateRound:
    """A model to evaluate."""
    at_round = bounds.within("round", m.round, 0, MAX_ROUND)
    return events.EvaluateRound(m.job, at_round, EvaluateOrder(at_round, _model(m.model)))


def _model(m: pb.Model) -> ModelRef:
    full = bounds.blob_hash("model", m.full.hash)
    if not m.HasField("delta"):
        return ModelRef(full)
    return ModelRef(full, bounds.blob_hash("delta", m.delta.hash), bounds.blob_hash("base", m.base))


def update_ready(job: str, at_round: int, update: Update) -> pb.FromWorker:
    """A round's answer: its numbers, and where its file is."""
    answer = update.answer
    return pb.FromWorker(
        update_ready=pb.UpdateReady(
            job=job,
            round=at_round,
            update=pb.BlobRef(hash=update.stored.hash, size=update.stored.size),
            n_samples=answer.n_samples,
            steps=answer.steps,
            scalars=answer.scalars,
            metrics=answer.metrics,
            square_loss=update.square_loss,
            train_s=update.train_s,
            upload_bytes=update.upload_bytes,
            upload_s=update.upload_s,
            download_bytes=update.download_bytes,
            download_s=update.download_s,
        )
    )


def client_evaluated(job: str, at_round: int, assessment: Assessment) -> pb.FromWorker:
    """Report of a round's model on this client's held-out share."""
    return pb.FromWorker(
        client_evaluated=pb.ClientEvaluated(
            job=job,
            round=at_round,
            n_samples=assessment.found.n_samples,
            loss=assessment.found.loss,
            metrics=assessment.found.metrics,
            took_s=assessment.took_s,
            download_bytes=assessment.download_bytes,
            download_s=assessment.download_s,
        )
    )
