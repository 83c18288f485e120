"""A federated job's messages: the coordinator's orders to events, a client's answers to pb2.

Every reader raises BadFrame for what breaks a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from protos import atoll_control_pb2 as pb
from protos import bounds
from protos.text_limits import clean
from worker.federated.orders import Assessment, HostAnswer, TrainOrder, Update
from worker.session import events

LOSS = "loss"
MAX_REASON_CHARS = 2000
MAX_WHY_CHARS = 200  # a client
MAX_KEY_CHARS = 64
MAX_ROUND = (1 << 31) - 1  # a round's steps have keys of 64 bits


def invited(m: pb.Participate) -> events.Participate:
    """A federated job that wants this worker; the compute process alone looks into the message."""
    return events.Participate(bounds.name("job", m.job), m.version, m)


def train_asked(m: pb.TrainRound) -> events.TrainRound:
    """A round to train."""
    return events.TrainRound(
        m.job, bounds.within("round", m.round, 0, MAX_ROUND), m, clean(m.order, MAX_KEY_CHARS)
    )


def evaluation_asked(m: pb.EvaluateRound) -> events.EvaluateRound:
    """A model to evaluate."""
    return events.EvaluateRound(m.job, bounds.within("round", m.round, 0, MAX_ROUND), m)


def update_ready(job: str, order: TrainOrder, update: Update) -> pb.FromWorker:
    """A round's answer: its numbers, and where its file is."""
    answer = update.answer
    message = pb.UpdateReady(
        job=job,
        round=order.round,
        order=order.order,
        square_loss=update.square_loss,
        train_s=update.train_s,
        upload_bytes=update.upload_bytes,
        upload_s=update.upload_s,
        download_bytes=update.download_bytes,
        download_s=update.download_s,
    )
    if update.stored is not None:
        message.update.CopyFrom(pb.BlobRef(hash=update.stored.hash, size=update.stored.size))
    if isinstance(answer, HostAnswer):
        _add_rows(message, answer)
    else:
        message.n_samples, message.steps = answer.n_samples, answer.steps
        message.scalars.update(answer.scalars)
        message.metrics.update(answer.metrics)
    return pb.FromWorker(update_ready=message)


def _add_rows(message: pb.UpdateReady, answer: HostAnswer) -> None:
    """A host's answer: who is in its sum, and the sum's bounds."""
    rows = answer.rows
    message.n_samples, message.steps = sum(r.n_samples for r in rows), sum(r.steps for r in rows)
    if rows:
        losses = (
            math.fsum(r.loss * r.n_samples for r in rows),
            math.fsum(r.square_loss * r.n_samples for r in rows),
        )
        message.metrics[LOSS] = losses[0] / message.n_samples
        message.square_loss = losses[1] / message.n_samples
        message.loads.update(answer.sums.loads)
        message.sums.update(answer.sums.scalars)
    message.rows.extend(pb.ClientRow(**asdict(row)) for row in rows)
    message.refused.update({who: why[:MAX_WHY_CHARS] for who, why in answer.refused.items()})
    message.stateful = answer.stateful


def client_evaluated(job: str, at_round: int, assessment: Assessment) -> pb.FromWorker:
    """Report of a round's model on this client's held-out share, or on those of a population's clients."""
    found = assessment.found
    total = sum(each.n_samples for each in found.values())

    def mean(values: Mapping[str, float]) -> float:
        if len(values) == 1:
            return next(iter(values.values()))
        return math.fsum(values[name] * found[name].n_samples for name in found) / total

    names = next(iter(found.values())).metrics
    return pb.FromWorker(
        client_evaluated=pb.ClientEvaluated(
            job=job,
            round=at_round,
            n_samples=total,
            loss=mean({who: each.loss for who, each in found.items()}),
            metrics={name: mean({who: each.metrics[name] for who, each in found.items()}) for name in names},
            took_s=assessment.took_s,
            download_bytes=assessment.download_bytes,
            download_s=assessment.download_s,
            rows=[
                pb.EvaluatedRow(client=who, n_samples=each.n_samples, loss=each.loss, metrics=each.metrics)
                for who, each in found.items()
                if who
            ],
        )
    )
