"""The daemon's side of consent: judges invitations, remembers them, counts and logs what leaves.

Nothing of a federated job is loaded before ``judge`` has found that this machine's policy or owner accepts
it, and no update leaves that the policy does not allow; the coordinator hears the word, and who gave it why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import structlog

from atoll.errors import AtollError, UsageError
from atoll.federated import SITE
from atoll.federated import ConsentWord as Word
from atoll.messages.from_worker import ConsentSaid
from protos import atoll_compute_pb2 as compute_pb
from protos import atoll_control_pb2 as pb
from protos.devices import machine_of
from strategies.privacy.samples import BUDGET_DELTA, epsilon
from worker.data.consent import ConsentStore, Request
from worker.data.departures import FACTS, MESSAGE, NUMBERED, UPDATE, UPDATE_BEGINS, DepartureLog
from worker.data.pinned_terms import AskedPinned
from worker.data.registry import load_dataset
from worker.federated.kept.folders import noise_key
from worker.federated.owner.terms import Asked
from worker.federated.samples.ledger import Charged, SampleLedger, account_words, exceeded

if TYPE_CHECKING:
    from pathlib import Path

    from worker.blobs import BlobFile
    from worker.federated.owner.terms import Fact

log = structlog.get_logger()

MAX_REPEATED = 64  # words that are said again after a reconnection, the newest first
LOGGED = NUMBERED | {"loaded", "client_failed", "secure_answer", "consent", "log", "spans"}
"""Messages to the coordinator that are logged when they are about a federated job; with numbers: always."""
MAX_JOBS = 4096  # whose messages are logged, more than are remembered


class _Account(NamedTuple):
    facts: tuple[Fact, ...]
    over: str  # why the job may not have the data


class Consent:
    """What one machine's owner allows; from any thread."""

    def __init__(
        self, state_dir: Path, clock: Callable[[], float] = time.time, coordinator: str = ""
    ) -> None:
        """``coordinator``: the address of the one that is joined; another one's jobs need a word of their
        own, whatever they are called."""
        self._state_dir, self._clock, self._coordinator = state_dir, clock, coordinator
        self._store = ConsentStore(state_dir)
        self._log = DepartureLog(state_dir, clock)
        self._jobs: set[str] = set()
        self._ledger = SampleLedger(state_dir)
        self._charged: dict[str, Charged] = {}  # by job with sample_privacy
        try:
            self._remember()
        except AtollError as error:  # every use of it says so again: nothing leaves
            log.error("consent.unreadable", reason=str(error))

    def _remember(self) -> None:
        self._jobs = {request.job for request in self._store.known()}

    def judge(self, m: pb.Participate | pb.Assign) -> ConsentSaid | None:
        """Remember an invitation, to train or to compute a stage around data of this machine; None where the
        job may run here, else what the coordinator is sent.

        Raises BadFrame or UsageError for one that cannot be judged, StorageError.
        """
        asked = AskedPinned(m) if isinstance(m, pb.Assign) else Asked(m)
        job, data = m.job, asked.data
        found = load_dataset(self._state_dir, data)
        terms = asked.terms(found.n_samples, f"{self._coordinator} {found.sha256}")
        account = self._account(job, asked, found.policy.epsilon, found.n_samples)
        facts = (*asked.facts(found.n_samples), *account.facts)
        request = self._store.asked(terms, facts, self._clock())
        if len(self._jobs) >= MAX_JOBS:
            self._remember()
        self._jobs.add(job)
        if account.over:
            log.warning("consent.budget", job=job, data=data, reason=account.over)
            raise UsageError(account.over)
        if request.word is Word.GIVEN:
            log.info("consent.given", job=job, data=request.terms.data, reason=request.why)
            return None
        remedy = "`atoll-worker jobs` shows what would leave" if request.word is Word.AWAITED else ""
        log.warning(
            "consent." + request.word, job=job, data=request.terms.data, reason=request.why, see=remedy
        )
        return _said(request)

    def _account(self, job: str, asked: Asked | AskedPinned, budget: float, n_samples: int) -> _Account:
        """What single samples of the data set have spent in other jobs, and would with this one."""
        charge = asked.charge(n_samples) if isinstance(asked, Asked) else None
        if charge is None or not isinstance(asked, Asked):
            self._charged.pop(job, None)
            why = f"the owner of {asked.data} bounds what single samples may spend, epsilon {budget:g}; this"
            return _Account((), f"{why} job states no bound: Federated(sample_privacy=...)" if budget else "")
        self._charged[job] = Charged(asked.data, charge, asked.training.steps)
        others = self._ledger.spent(asked.data, job)
        before = epsilon(others, BUDGET_DELTA)
        after = epsilon([*others, charge.times(asked.training.steps)], BUDGET_DELTA)
        over = exceeded(after, budget, "this job") if budget and after > budget else ""
        return _Account((("spent by samples", account_words(before, after, budget)),), over)

    def changed(self) -> list[ConsentSaid]:
        """What to tell the coordinator after the owner's word or a policy has changed, and after a
        reconnection: of the newest requests that are not over. Raises StorageError."""
        return [_said(request) for request in self._store.judged_again()[:MAX_REPEATED]]

    def close(self, job: str, reason: str) -> None:
        """The coordinator let this machine go, or the job has ended."""
        try:
            self._store.close(job, reason)
        except AtollError as error:
            log.error("consent.unwritable", reason=str(error))

    def joining(self, invitation: pb.Participate) -> compute_pb.ComputeJoin:
        """The invitation for who computes, with what the data set's owner demands and allows of every update.

        Raises UsageError, StorageError.
        """
        policy = self._store.policy(invitation.federated.data)
        return compute_pb.ComputeJoin(
            invitation=invitation,
            noise_key=noise_key(self._state_dir),
            clip=policy.clip,
            noise=policy.noise,
            statistics=policy.statistics,
            gateways=policy.gateways,
        )

    def evaluates(self, job: str) -> None:
        """Count an evaluation before it begins. Raises UsageError for one too many and for a job that is not
        accepted now, StorageError."""
        self._store.evaluates(job)

    def discloses(self, data: str, gateway: str, worker: str) -> None:
        """Raise UsageError unless ``gateway``, of the same site as ``worker``, may see updates of a data set:
        another device of this machine may."""
        allowed = self._store.policy(data).gateways
        if machine_of(gateway) != machine_of(worker) and {SITE, gateway}.isdisjoint(allowed):
            raise UsageError(
                f"the data owner lets no gateway {gateway} see updates (`atoll-worker data policy {data} "
                "--gateway site`)"
            )

    @contextmanager
    def departing(
        self, job: str, files: Sequence[BlobFile], left: Callable[[], int], borrower: str = ""
    ) -> Iterator[None]:
        """Around an update's upload: counted against the policy, and logged however it ends.

        ``left()``: bytes handed to the connection so far, or lent to ``borrower``. Raises UsageError for what
        may not leave, StorageError where it cannot be logged.
        """
        to = {"to": borrower} if borrower else {}
        charged = self._charged.get(job)
        for file in files:
            if charged is not None:
                self._ledger.charge(job, charged, file.hash, self._store.policy(charged.data).epsilon)
            self._store.spend(job, file.hash)
            self._log.note(job, UPDATE_BEGINS, 0, blob=file.hash, size=file.size, **to)
        try:
            yield
        finally:
            self._log.note(job, UPDATE, left(), blobs=[file.hash for file in files], **to)
            self._store.sent(job, left())

    def sends(self, message: pb.FromWorker) -> bool:
        """Log a message about a federated job, or the facts of the registered data, before it is sent.

        False for what must not be sent so: numbers about the data, or its facts, that cannot be logged.
        """
        kind = message.WhichOneof("body")
        try:
            if kind == "introduction" and message.introduction.datasets:
                facts = message.introduction.datasets
                names = [found.name for found in facts]
                self._log.note("", FACTS, sum(found.ByteSize() for found in facts), data=names)
            elif kind in LOGGED and ((body := getattr(message, kind)).job in self._jobs or kind in NUMBERED):
                at_round = getattr(body, "round", None)
                self._log.note(body.job, MESSAGE, message.ByteSize(), message=kind, round=at_round)
        except AtollError as error:
            log.error("departure.unlogged", kind=kind, reason=str(error))
            return kind not in NUMBERED and kind != "introduction"
        return True


def _said(request: Request) -> ConsentSaid:
    return ConsentSaid(request.job, request.word, request.why, request.terms.graph)
