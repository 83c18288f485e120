"""Federated jobs that asked for this machine's data, and its owner's word on each.

    STATE/consent/requests.json   job -> terms, what would leave in words, the owner's word, updates sent

An acceptance is of a job's terms, by their digest: the same job with other terms asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.federated import ConsentWord as Word
from protos.locked_json import changing, read_object
from worker.config import make_state_dir
from worker.data.policy import Policy, Terms, Verdict, judge
from worker.data.registry import load_dataset

FOLDER, FILE = "consent", "requests.json"
MAX_FILE_BYTES = 16 << 20
MAX_REQUESTS = 512  # remembered; the oldest that are over are forgotten
MAX_FACTS, MAX_FACT_CHARS = 32, 2000
MAX_REASON_CHARS = 300

Change = Callable[["Request"], "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """A job that named a data set of this machine."""

    terms: Terms
    facts: tuple[tuple[str, str], ...]  # what would leave, for people: a heading and its text each
    asked_s: float  # wall clock, the first time under these terms
    decided: Word | None = None  # this owner's word: GIVEN or REFUSED
    reason: str = ""  # of that
    decided_s: float = 0.0
    word: Word = Word.AWAITED  # as the coordinator heard it last
    why: str = ""
    over: str = ""  # why the job is no longer this machine's business; empty while it is
    updates: int = 0  # distinct ones that were sent
    last_update: str = ""  # hash of the newest

    @property
    def job(self) -> str:
        return self.terms.job


class ConsentStore:
    """The ``consent`` folder of one worker's state folder; the command and the daemon take turns."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._path = state_dir / FOLDER / FILE

    def known(self) -> list[Request]:
        """Every request, the newest first."""
        return sorted(self._read().values(), key=lambda request: request.asked_s, reverse=True)

    def policy(self, data: str) -> Policy:
        """Policy of a registered data set. Raises UsageError where there is none, StorageError."""
        return load_dataset(self._state_dir, data).policy

    def asked(self, terms: Terms, facts: tuple[tuple[str, str], ...], now_s: float) -> Request:
        """Judge a job that names a data set, and remember it. Raises UsageError for no such set,
        StorageError."""
        policy = self.policy(terms.data)
        with self._changing() as found:
            known = found.get(terms.job)
            if known is None:
                known = Request(terms, _bounded(facts), now_s)
            elif known.terms.digest != terms.digest:
                # What was sent stays counted: other terms begin no new account.
                known = Request(
                    terms, _bounded(facts), now_s, updates=known.updates, last_update=known.last_update
                )
            found[terms.job] = _judged(replace(known, terms=terms, over=""), policy)
            return found[terms.job]

    def judged_again(self) -> list[Request]:
        """Every request that is not over, after the owner's word or a policy changed."""
        with self._changing() as found:
            for job, request in found.items():
                if not request.over:
                    found[job] = self._judged_now(request)
            return [request for request in found.values() if not request.over]

    def decide(self, job: str, word: Word, reason: str, now_s: float) -> Request:
        """Put down the owner's word on a job. UsageError for a job that never asked."""

        def change(request: Request) -> Request:
            decided = replace(request, decided=word, reason=reason[:MAX_REASON_CHARS], decided_s=now_s)
            return self._judged_now(decided)

        return self._change(job, change)

    def close(self, job: str, why: str) -> None:
        """The job is no longer this machine's business; one that never asked is none anyway."""
        if job in self._read():
            self._change(job, lambda request: replace(request, over=why[:MAX_REASON_CHARS] or "over"))

    def spend(self, job: str, update: str) -> None:
        """Count an update that is about to be sent, by its hash; the same one again is not another.

        UsageError for more than the policy allows to one job, and for a job that was not accepted.
        """

        def change(request: Request) -> Request:
            if request.word is not Word.GIVEN:
                raise UsageError(f"job {job} may not send updates: {request.why}")
            if request.last_update == update:
                return request
            most = self.policy(request.terms.data).max_rounds
            if most and request.updates >= most:
                raise UsageError(
                    f"{request.updates} updates of job {job} were sent, the data owner allows {most} "
                    "(`atoll-worker data policy --max-rounds`)"
                )
            return replace(request, updates=request.updates + 1, last_update=update)

        self._change(job, change)

    def _judged_now(self, request: Request) -> Request:
        try:
            return _judged(request, self.policy(request.terms.data))
        except UsageError as error:  # it was removed
            return replace(request, word=Word.REFUSED, why=str(error)[:MAX_REASON_CHARS])

    def _change(self, job: str, change: Change) -> Request:
        with self._changing() as found:
            if job not in found:
                waiting = ", ".join(sorted(found)) or "none"
                raise UsageError(
                    f"job {job[:80]!r} has not asked for data of this machine; these have: {waiting}"
                )
            found[job] = change(found[job])
            return found[job]

    def _read(self) -> dict[str, Request]:
        return _requests(read_object(self._path, MAX_FILE_BYTES))

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Request]]:
        make_state_dir(self._state_dir)
        with changing(self._path, MAX_FILE_BYTES) as items:
            found = _requests(items)
            yield found
            kept = sorted(found.values(), key=lambda r: (not r.over, r.asked_s), reverse=True)[:MAX_REQUESTS]
            items.clear()
            items.update({request.job: asdict(request) for request in kept})


def _judged(request: Request, policy: Policy) -> Request:
    verdict: Verdict = judge(policy, request.terms, request.decided, request.reason)
    return replace(request, word=verdict.word, why=verdict.reason)


def _bounded(facts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((heading[:60], text[:MAX_FACT_CHARS]) for heading, text in facts[:MAX_FACTS])


def _requests(items: Mapping[str, Any]) -> dict[str, Request]:
    """Nothing is accepted by a file that cannot be read."""
    try:
        return {job: _request(item) for job, item in items.items()}
    except (KeyError, ValueError, TypeError):
        return {}


def _request(item: Mapping[str, Any]) -> Request:
    values = dict(item)
    terms = Terms(**values.pop("terms"))
    facts = tuple((str(heading), str(text)) for heading, text in values.pop("facts"))
    decided = values.pop("decided")
    word = Word(values.pop("word"))
    return Request(terms, facts, decided=None if decided is None else Word(decided), word=word, **values)
