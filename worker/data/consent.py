"""Federated jobs that asked for this machine's data, its owner's word on each, and what each was sent.

An acceptance is of a job's terms, by their digest: the same job with other terms asks again. A refusal is of
the job by its name, whatever terms it states; and no rule of a policy accepts by itself what has the graph or
the submitter of a refused job. Nothing that was decided, counted or sent is ever forgotten here; of jobs
that only asked the newest are remembered (``worker.data.consent_file`` has the database).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from atoll.errors import BadFrame, StorageError, UsageError
from atoll.federated import ConsentWord as Word
from worker.data.consent_file import NOTHING_LEAVES, ConsentFile
from worker.data.policy import Policy, Terms, Verdict, judge, most_evaluations, most_updates
from worker.data.registry import load_dataset

MAX_ASKING = 512  # jobs that only asked; the oldest that are over go first, then the oldest
MAX_KEPT = 50_000  # jobs that were decided on or sent something; beyond, no further job is taken up
MAX_JOB_BYTES = 200  # of a job's name; a coordinator makes 40 characters and a number
MAX_FACTS, MAX_FACT_CHARS = 32, 600
MAX_REASON_CHARS = 300
NAMES_SHOWN = 6

Change = Callable[["Request"], "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """A job that named a data set of this machine."""

    terms: Terms
    facts: tuple[tuple[str, str], ...]  # what would leave, for people: a heading and its text each
    asked_s: float  # wall clock, the first time under these terms
    decided: Word | None = None  # this owner's word: GIVEN, of these terms, or REFUSED, of the name
    reason: str = ""  # of that
    decided_s: float = 0.0
    word: Word = Word.AWAITED  # as the coordinator heard it last
    why: str = ""
    over: str = ""  # why the job is no longer this machine's business; empty while it is
    updates: int = 0  # distinct ones that were sent
    last_update: str = ""  # hash of the newest
    evaluations: int = 0  # that were ordered and not refused
    sent_bytes: int = 0  # of updates, repeated ones too
    shown: str = ""  # which terms its owner saw last

    @property
    def job(self) -> str:
        return self.terms.job

    @property
    def stated(self) -> str:
        """Terms that a word is of: what the job states, and where and on what it would train."""
        return f"{self.terms.digest} {self.terms.place}"


_TERMS = tuple(field.name for field in fields(Terms))
_OWN = tuple(field.name for field in fields(Request) if field.name != "terms")
_COLUMNS = (*_TERMS, *_OWN)
_PUT = (
    f"INSERT INTO requests ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608
    f"ON CONFLICT (job) DO UPDATE SET {', '.join(f'{c} = excluded.{c}' for c in _COLUMNS)}"
)
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM requests"  # noqa: S608 - names of ours
_KEPT = "(decided IS NOT NULL OR updates > 0 OR evaluations > 0)"

_FORGET = (  # all but the newest that only asked, those that are over first
    "DELETE FROM requests WHERE seq IN (SELECT seq FROM requests "  # noqa: S608
    f"WHERE NOT {_KEPT} ORDER BY over = '' DESC, seq DESC LIMIT -1 OFFSET ?)"
)
_STRIP = (  # of what is remembered for good only the newest keep the words
    "UPDATE requests SET facts = '[]' "  # noqa: S608
    f"WHERE facts != '[]' AND seq <= (SELECT max(seq) FROM requests) - ? AND {_KEPT}"
)


class ConsentStore:
    """The ``consent`` folder of one worker's state folder; the command and the daemon take turns."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._file = ConsentFile(state_dir, _fill)

    def known(self) -> list[Request]:
        """Every request, the newest first. Raises StorageError where the file cannot be read."""
        with self._file.reading() as database:
            return [] if database is None else self._all(database, "ORDER BY seq DESC")

    def policy(self, data: str) -> Policy:
        """Policy of a registered data set. Raises UsageError where there is none, StorageError."""
        return load_dataset(self._state_dir, data).policy

    def asked(self, terms: Terms, facts: tuple[tuple[str, str], ...], now_s: float) -> Request:
        """Judge a job that names a data set, and remember it. Raises UsageError for no such set, BadFrame
        for a name that is too long, StorageError."""
        if (size := len(terms.job.encode())) > MAX_JOB_BYTES:
            raise BadFrame(f"a job's name of {size} bytes; at most {MAX_JOB_BYTES} are accepted")
        policy = self.policy(terms.data)
        with self._file.changing() as database:
            known = self._one(database, terms.job)
            if known is None:
                _make_room(database)
                known = Request(terms, _bounded(facts), now_s)
            elif _other(known.terms, terms):
                # What was sent stays counted: other terms begin no new account. So does a refusal.
                refused = known.decided is Word.REFUSED
                known = replace(
                    known,
                    facts=_bounded(facts),
                    asked_s=now_s,
                    decided=known.decided if refused else None,
                    reason=known.reason if refused else "",
                )
            found = self._judged(database, replace(known, terms=terms, over=""), policy)
            _put(database, found)
            database.execute(
                "UPDATE requests SET seq = (SELECT max(seq) + 1 FROM requests) WHERE job = ?", (terms.job,)
            )
            return found

    def judged_again(self) -> list[Request]:
        """Every request that is not over, the newest first, after the owner's word or a policy changed."""
        policies: dict[str, Policy | UsageError] = {}
        with self._file.reading() as database:
            if database is None:
                return []
            found = []
            for before in self._all(database, "WHERE over = '' ORDER BY seq DESC"):
                after = self._judged_now(database, before, policies)
                if after != before:
                    _put(database, after)
                found.append(after)
            return found

    def mark_shown(self, requests: Sequence[Request]) -> None:
        """Remember which terms their owner has seen. Raises StorageError."""
        with self._file.reading() as database:
            if database is not None:
                rows = [(request.stated, request.job) for request in requests]
                database.executemany("UPDATE requests SET shown = ? WHERE job = ?", rows)

    def decide(self, job: str, word: Word, reason: str, now_s: float) -> Request:
        """Put down the owner's word on a job. UsageError for a job that never asked, and for an acceptance
        after other terms than those that it saw have come."""

        def change(request: Request) -> Request:
            if word is Word.GIVEN and request.shown not in ("", request.stated):
                raise UsageError(
                    f"job {request.job[:80]!r} states other terms than those that were shown; look at them "
                    "(`atoll-worker jobs`), then accept"
                )
            return replace(request, decided=word, reason=reason[:MAX_REASON_CHARS], decided_s=now_s)

        with self._file.changing() as database:
            return self._change(database, job, change)

    def close(self, job: str, why: str) -> None:
        """The job is no longer this machine's business; one that never asked is none anyway."""
        with self._file.reading() as database:
            if database is not None:
                reason = why[:MAX_REASON_CHARS] or "over"
                database.execute("UPDATE requests SET over = ? WHERE job = ?", (reason, job))

    def spend(self, job: str, update: str) -> None:
        """Count an update that is about to be sent, by its hash; the same one again is not another.

        UsageError for more than the policy and the accepted terms allow, and for a job that is not accepted
        now.
        """

        def change(request: Request) -> Request:
            self._check_given(request, "send updates")
            if request.last_update == update:
                return request
            most, why = most_updates(self.policy(request.terms.data), request.terms)
            if request.updates >= most:
                raise UsageError(f"{request.updates} updates of job {job} were sent, {why}")
            return replace(request, updates=request.updates + 1, last_update=update)

        with self._file.changing() as database:
            self._change(database, job, change)

    def evaluates(self, job: str) -> None:
        """Count an evaluation that was ordered. Raises as ``spend``."""

        def change(request: Request) -> Request:
            self._check_given(request, "have anything evaluated")
            most, why = most_evaluations(self.policy(request.terms.data), request.terms)
            if request.evaluations >= most:
                raise UsageError(f"{request.evaluations} evaluations of job {job} were made, {why}")
            return replace(request, evaluations=request.evaluations + 1)

        with self._file.changing() as database:
            self._change(database, job, change)

    def sent(self, job: str, nbytes: int) -> None:
        """Add to the bytes of a job's updates that were sent."""
        with self._file.changing() as database:
            statement = "UPDATE requests SET sent_bytes = sent_bytes + ? WHERE job = ?"
            database.execute(statement, (max(0, nbytes), job))

    # ---------------------------------------------------------------- rows

    def _check_given(self, request: Request, what: str) -> None:
        if request.word is not Word.GIVEN:
            raise UsageError(f"job {request.job} may not {what}: {request.why}")

    def _change(self, database: sqlite3.Connection, job: str, change: Change) -> Request:
        """Change one request, judged by the policy as it is now before and after."""
        found = self._one(database, job)
        if found is None:
            names = [str(row[0]) for row in database.execute("SELECT job FROM requests ORDER BY seq DESC")]
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            waiting = ", ".join(names[:NAMES_SHOWN]) or "none"
            raise UsageError(
                f"job {job[:80]!r} has not asked for data of this machine; these have: {waiting}{more}"
            )
        after = self._judged_now(database, change(self._judged_now(database, found, {})), {})
        if after != found:
            _put(database, after)
        return after

    def _judged_now(
        self, database: sqlite3.Connection, request: Request, policies: dict[str, Policy | UsageError]
    ) -> Request:
        data = request.terms.data
        if data not in policies:
            try:
                policies[data] = self.policy(data)
            except UsageError as error:  # it was removed
                policies[data] = error
        policy = policies[data]
        if isinstance(policy, UsageError):
            return replace(request, word=Word.REFUSED, why=str(policy)[:MAX_REASON_CHARS])
        return self._judged(database, request, policy)

    def _judged(self, database: sqlite3.Connection, request: Request, policy: Policy) -> Request:
        terms = request.terms
        akin = database.execute(
            "SELECT job FROM requests WHERE decided = 'refused' AND job != ? AND (graph = ? OR owner = ?) "
            "ORDER BY seq DESC LIMIT 1",
            (terms.job, terms.graph, terms.owner),
        ).fetchone()
        found: Verdict = judge(policy, terms, request.decided, request.reason, str(akin[0]) if akin else "")
        return replace(request, word=found.word, why=found.reason)

    def _one(self, database: sqlite3.Connection, job: str) -> Request | None:
        found = self._all(database, "WHERE job = ?", job)
        return found[0] if found else None

    def _all(self, database: sqlite3.Connection, where: str, *given: str) -> list[Request]:
        try:
            return [_request(row) for row in database.execute(f"{_SELECT} {where}", given)]
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"{self._file.path} is damaged ({str(error)[:100]}); {NOTHING_LEAVES}: restore a backup"
            ) from None


def _other(known: Terms, terms: Terms) -> bool:
    """Return whether a word on ``known`` is none on ``terms``. Versions up to 0.6.0 noted no place."""
    return known.digest != terms.digest or known.place not in ("", terms.place)


def _make_room(database: sqlite3.Connection) -> None:
    """Forget the oldest that only asked. UsageError when too many were decided on to remember one more."""
    (kept,) = database.execute(f"SELECT count(*) FROM requests WHERE {_KEPT}").fetchone()  # noqa: S608
    if kept >= MAX_KEPT:
        raise UsageError(
            f"this data owner remembers {kept} jobs that were decided on or sent updates; it takes up no more"
        )
    database.execute(_FORGET, (MAX_ASKING - 1,))
    database.execute(_STRIP, (MAX_ASKING,))


def _put(database: sqlite3.Connection, request: Request) -> None:
    terms = [getattr(request.terms, name) for name in _TERMS]
    own = [getattr(request, name) for name in _OWN]
    own[_OWN.index("facts")] = json.dumps(request.facts)
    database.execute(_PUT, (*terms, *own))


def _request(row: tuple[Any, ...]) -> Request:
    terms, own = row[: len(_TERMS)], dict(zip(_OWN, row[len(_TERMS) :], strict=True))
    facts = tuple((str(heading), str(text)) for heading, text in json.loads(own.pop("facts")))
    decided = own.pop("decided")
    word = Word(own.pop("word"))
    return Request(Terms(*terms), facts, decided=None if decided is None else Word(decided), word=word, **own)


def _bounded(facts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    def cut(text: str) -> str:
        return text if len(text) <= MAX_FACT_CHARS else f"{text[:MAX_FACT_CHARS]} ... (cut)"

    return tuple((heading[:60], cut(text)) for heading, text in facts[:MAX_FACTS])


def _fill(database: sqlite3.Connection, items: Mapping[str, Any]) -> None:
    """Put in what the JSON file of versions up to 0.6.0 holds, the oldest first."""
    for item in sorted(items.values(), key=lambda item: float(item["asked_s"])):
        values = dict(item)
        terms = Terms(**values.pop("terms"))
        facts = tuple((str(heading), str(text)) for heading, text in values.pop("facts"))
        decided, word = values.pop("decided"), Word(values.pop("word"))
        _put(
            database,
            Request(
                terms,
                _bounded(facts),
                decided=None if decided is None else Word(decided),
                word=word,
                **values,
            ),
        )
