"""A federated job's messages: the coordinator's orders to events, a client's answers to pb2.

Every reader raises BadFrame for what breaks a bound.
"""

from __future__ import annotations

from protos import atoll_control_pb2 as pb
from protos import bounds
from protos.bounds import DEFAULT_LIMITS
from worker.federated.orders import Assessment, Update
from worker.session import events

MAX_ROUND = (1 << 31) - 1  # a round's steps have keys of 64 bits


def invited(m: pb.Participate) -> events.Participate:
    """A federated job that wants this worker; the compute process alone looks into the message."""
    return events.Participate(bounds.name("job", m.job, DEFAULT_LIMITS), m.version, m)


def train_asked(m: pb.TrainRound) -> events.TrainRound:
    """A round to train."""
    return events.TrainRound(m.job, bounds.within("round", m.round, 0, MAX_ROUND), m)


def evaluation_asked(m: pb.EvaluateRound) -> events.EvaluateRound:
    """A model to evaluate."""
    return events.EvaluateRound(m.job, bounds.within("round", m.round, 0, MAX_ROUND), m)


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
