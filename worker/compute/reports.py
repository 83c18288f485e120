"""The compute process's reports, in the messages that the coordinator reads."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from atoll.messages import from_worker as told
from protos import atoll_control_pb2 as pb
from worker.federated.orders import HostAnswer
from worker.federated.trainer import LOSS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from atoll.held_out import Figures
    from atoll.messages.to_worker import TrainRound
    from worker.federated.orders import Assessment, Update
    from worker.links.codec_use import CodecUse
    from worker.spans import Span
    from worker.stage.reports import LongWait, StepReport

MAX_SPANS_A_MESSAGE = 2000


def step_ready(
    job: str, version: int, report: StepReport, norms_wanted: bool, codecs: Mapping[str, CodecUse]
) -> told.StepReady:
    """A step's result, without what the daemon measures (``session.wire.measured``); ``codecs`` by peer.
    Norms travel only where the gradient is clipped."""
    stage = report.stage
    return told.StepReady(
        job=job,
        version=version,
        step=report.step,
        losses=stage.losses,
        weights=stage.weights,
        square_norms=stage.square_norms if norms_wanted else (),
        forward_s=report.forward_s,
        backward_s=report.backward_s,
        waited_s=report.waited_s,
        links=tuple(
            told.Goodput(peer, 0, 0.0, 0.0, used.dense_bytes, used.encode_s, used.decode_s)
            for peer, used in codecs.items()
        ),
        finite=stage.finite,
        optimizer_s=report.optimizer_s,
        handling_s=report.handling_s,
        digest=told.Digest(stage.digest.hex(), report.inputs.hex()),
        receipts=tuple(
            told.RoundReceipt(
                receipt.round,
                receipt.included,
                receipt.share,
                receipt.sent_bytes,
                receipt.received_bytes,
                receipt.digest,
                receipt.totals,
                number,
            )
            for number, receipt in report.receipts.items()
        ),
    )


def eval_ready(
    job: str, version: int, step: int, found: Figures | None, coded: Figures | None
) -> told.EvalReady:
    """The evaluation after ``step``; only the stage with the loss knows what came of it."""
    loss, metrics = (None, {}) if found is None else (found.loss, found.metrics)
    return told.EvalReady(job, version, step, loss, None if coded is None else coded.loss, metrics)


def wait_fields(wait: LongWait) -> dict[str, object]:
    """Fields of a log line about what a stage has been waiting for."""
    key = wait.key
    return {
        "peer": wait.peer,
        "direction": key.direction.name.lower(),
        "step": key.step,
        "micro": key.micro,
        "edge": key.edge,
        "waited_s": round(wait.waited_s),
    }


def waiting(wait: LongWait) -> pb.FromWorker:
    """The same for the job's log."""
    fields = json.dumps(wait_fields(wait))
    line = pb.WorkerLog(level="warning", event="stage.waits", job=wait.key.job, fields_json=fields)
    return pb.FromWorker(log=line)


def spans(job: str, version: int, stage: int, recorded: Sequence[Span]) -> list[pb.FromWorker]:
    """A timeline in messages of bounded size."""
    found = []
    for at in range(0, len(recorded), MAX_SPANS_A_MESSAGE):
        part = [pb.Span(**asdict(span)) for span in recorded[at : at + MAX_SPANS_A_MESSAGE]]
        found.append(pb.FromWorker(spans=pb.Spans(job=job, plan_version=version, stage=stage, spans=part)))
    return found


def update_ready(order: TrainRound, update: Update) -> told.UpdateReady:
    """A round's answer: its numbers, and where its file is; of a host who is in its sum, and the sum's
    bounds."""
    answer, host, square_loss = update.answer, None, update.square_loss
    if isinstance(answer, HostAnswer):
        rows, sums = answer.rows, answer.sums
        n_samples, steps = sum(r.n_samples for r in rows.values()), sum(r.steps for r in rows.values())
        scalars: Mapping[str, float] = {}
        metrics: Mapping[str, float] = {}
        if rows:
            metrics = {LOSS: math.fsum(r.loss * r.n_samples for r in rows.values()) / n_samples}
            square_loss = math.fsum(r.square_loss * r.n_samples for r in rows.values()) / n_samples
        refused = {who: why[: told.MAX_WHY_CHARS] for who, why in answer.refused.items()}
        bounds = (sums.loads, sums.scalars) if rows else ({}, {})
        host = told.HostRows(rows, refused, *bounds, answer.stateful, order.order)
    else:
        n_samples, steps, scalars, metrics = answer.n_samples, answer.steps, answer.scalars, answer.metrics
    stored = update.stored
    return told.UpdateReady(
        job=order.job,
        round=order.round,
        update="" if stored is None else stored.hash,
        update_bytes=0 if stored is None else stored.size,
        n_samples=n_samples,
        steps=steps,
        scalars=scalars,
        metrics=metrics,
        square_loss=square_loss,
        train_s=update.train_s,
        upload_bytes=update.upload_bytes,
        upload_s=update.upload_s,
        download_bytes=update.download_bytes,
        download_s=update.download_s,
        host=host,
        exchange=order.exchange,
        gateway=order.gateway,
    )


def client_evaluated(job: str, at_round: int, assessment: Assessment) -> told.ClientEvaluated:
    """Report of a round's model on this client's held-out share, or on those of a population's clients."""
    found = assessment.found
    total = sum(each.n_samples for each in found.values())

    def mean(values: Mapping[str, float]) -> float:
        if len(values) == 1:
            return next(iter(values.values()))
        return math.fsum(values[name] * found[name].n_samples for name in found) / total

    names = next(iter(found.values())).metrics
    return told.ClientEvaluated(
        job=job,
        round=at_round,
        n_samples=total,
        loss=mean({who: each.loss for who, each in found.items()}),
        metrics={name: mean({who: each.metrics[name] for who, each in found.items()}) for name in names},
        took_s=assessment.took_s,
        download_bytes=assessment.download_bytes,
        download_s=assessment.download_s,
        rows={who: each for who, each in found.items() if who},
    )
