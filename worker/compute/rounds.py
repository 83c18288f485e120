"""A federated job in the compute process: joined, its rounds trained and evaluated, failures reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import structlog

from atoll.errors import AtollError
from atoll.messages import from_worker as told
from atoll.messages import to_worker as asked
from protos import coding
from strategies.clipping import Clipping
from worker.cancel import Cancel, Cancelled
from worker.compute import reports
from worker.federated.orders import HostAnswer
from worker.federated.participation import Participation
from worker.federated.trainer import LOSS
from worker.session import events

if TYPE_CHECKING:
    from protos import atoll_compute_pb2 as compute_pb
    from worker.compute.tasks import Task, Tasks
    from worker.context import ComputeContext

log = structlog.get_logger()

Order = events.TrainRound | events.EvaluateRound | events.SecureOrder | events.RoundTaken


class Explained(Protocol):
    """The reason of a failure, in words that the job's owner can act on."""

    def __call__(self, error: Exception, *, private: bool = False) -> str: ...


class Rounds:
    """Takes part in one federated job at a time."""

    def __init__(
        self,
        context: ComputeContext,
        tasks: Tasks,
        post: Callable[[events.Report], None],
        explained: Explained,
        free: Callable[[], None],
    ) -> None:
        """``free``: lets go of whatever job the process holds, before another is joined."""
        self._context, self._tasks, self._post = context, tasks, post
        self._explained, self._free = explained, free
        self._part: Participation | None = None

    @property
    def joined(self) -> bool:
        """Whether a federated job is loaded."""
        return self._part is not None

    def do(self, order: Order) -> None:
        """Queue what the coordinator orders of a client."""
        match order:
            case events.TrainRound(job, at_round):
                self._submit(job, at_round, "train", lambda c: self._train(order, c))
            case events.EvaluateRound(job, at_round):
                self._submit(job, at_round, "evaluate", lambda c: self._evaluate(order, c))
            case events.SecureOrder(job, at_round):
                self._submit(job, at_round, "train", lambda c: self._post(self._participation.secure(order)))
            case events.RoundTaken():
                self._tasks.submit(lambda c: self._settle(order))

    def join(self, message: compute_pb.ComputeJoin) -> None:
        """Queue the loading of a federated job."""
        self._submit(message.invitation.job, 0, "load", lambda c: self._join(message, c))

    def drop(self) -> None:
        """Let go of the job."""
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def _submit(self, job: str, at_round: int, during: str, task: Task) -> None:
        """Queue a ``task``; its failures are reported to the session."""

        def failed(reason: str) -> None:
            self._post(events.ClientFailed(job, at_round, reason, during))

        def run(cancel: Cancel) -> None:
            try:
                cancel.check()
                task(cancel)
            except Cancelled:
                raise
            except AtollError as error:
                failed(str(error))
            except Exception as error:  # any op may fail in its own way
                log.error("turn.broke", job=job, round=at_round, during=during, exc_info=True)
                failed(self._explained(error, private=True))

        self._tasks.submit(run)

    def _join(self, invitation: compute_pb.ComputeJoin, cancel: Cancel) -> None:
        started_s = time.perf_counter()
        self._free()
        work = coding.read(asked.Participate, invitation.invitation)
        clipping = Clipping(invitation.clip, invitation.noise)
        self._part = Participation(
            work, self._context, cancel, invitation.noise_key, clipping, invitation.statistics
        )
        took_s, members = time.perf_counter() - started_s, self._part.members
        log.info("job.joined", job=work.job, data=work.federated.data, took_s=round(took_s, 3))
        loaded = (work.job, work.version, took_s, members.hash, members.usable)
        self._post(told.Loaded(*loaded, gateways=tuple(invitation.gateways)))

    def _train(self, order: events.TrainRound, cancel: Cancel) -> None:
        update = self._participation.train(order, cancel)
        log.info(
            "round.trained",
            job=order.job,
            round=order.round,
            loss=None if isinstance(update.answer, HostAnswer) else update.answer.metrics[LOSS],
            clients=len(order.clients) or None,
            train_s=round(update.train_s, 3),
            upload_bytes=update.upload_bytes,
        )
        self._post(reports.update_ready(order, update))

    def _evaluate(self, order: events.EvaluateRound, cancel: Cancel) -> None:
        found = self._participation.evaluate(order, cancel)
        self._post(reports.client_evaluated(order.job, order.round, found))

    def _settle(self, verdict: events.RoundTaken) -> None:
        """Keep or drop an update's state; never cancelled, since the verdict holds whatever comes next."""
        if self._part is None or self._part.joining.job != verdict.job:
            return
        try:
            self._part.settle(verdict.round, verdict.taken, verdict.clients, verdict.order)
        except AtollError as error:
            log.error("round.not_kept", job=verdict.job, round=verdict.round, reason=str(error))

    @property
    def _participation(self) -> Participation:
        if self._part is None:
            raise RuntimeError("no federated job is loaded")
        return self._part
