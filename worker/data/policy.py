"""A data owner's policy for one data set: which jobs may train on it, and what bounds each of them.

Stored with the registered data set and applied on this machine alone; a registration without one asks. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atoll.errors import UsageError
from atoll.federated import SITE
from atoll.federated import ConsentWord as Word

ASK, ANY, OWNER, GRAPH = "ask", "any", "owner", "graph"
HASH = re.compile(r"[0-9a-f]{64}")
GATEWAY = re.compile(rf"{SITE}|w-[0-9a-f]{{16}}(/[1-9][0-9]?)?")
NO_GATEWAY = "none"
MAX_RULES = 64
MAX_OWNER_CHARS = 100
SPARE, SPARE_ROUNDS = 2, 8  # of updates beyond a job's stated rounds: most_updates


def _check_rule(rule: str) -> None:
    kind, mark, value = rule.partition(":")
    if rule in (ASK, ANY):
        return
    if mark and kind == OWNER and 0 < len(value) <= MAX_OWNER_CHARS and value.isprintable():
        return
    if mark and kind == GRAPH and HASH.fullmatch(value):
        return
    raise UsageError(
        f"--accept {rule[:80]!r}; give ask, any, owner:NAME or graph:HASH (64 hexadecimal digits, as "
        "`atoll-worker jobs` shows it)"
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """Terms of a data set's owner. UsageError for a figure out of its range.

    ``accept``: ``ask``, ``any``, ``owner:NAME`` (who submitted the job) or ``graph:HASH``; a job that none of
    them names waits for its owner's consent. The other fields bound every job, accepted or not.
    """

    accept: tuple[str, ...] = (ASK,)
    min_clients: int = 0  # updates in a round, so the job's min_clients; 0: the worker's own floor alone
    max_rounds: int = 0  # updates that one job gets; 0: as many as it has rounds
    clip: float = 0.0  # L2 norm of an update; 0: not clipped
    noise: float = 0.0  # standard deviation of the Gaussian noise in each entry of an update, times ``clip``
    statistics: int = 0  # numbers about the data beside each update; 0: the few always allowed
    # Workers that may see an update before it is summed: ids, or SITE for each gateway of its own site.
    gateways: tuple[str, ...] = ()
    epsilon: float = 0.0  # that single samples may spend over all jobs, whose updates must bound it; 0: any

    def __post_init__(self) -> None:
        if not 1 <= len(self.accept) <= MAX_RULES:
            raise UsageError(f"{len(self.accept)} rules of --accept; give 1 to {MAX_RULES}")
        for rule in self.accept:
            _check_rule(rule)
        if len(self.accept) > 1 and {ASK, ANY} & {*self.accept}:
            raise UsageError("--accept ask and --accept any each apply to every job; give no other --accept")
        for name, count in (
            ("--min-clients", self.min_clients),
            ("--max-rounds", self.max_rounds),
            ("--allow-statistics", self.statistics),
        ):
            if type(count) is not int or not 0 <= count <= 10**9:
                raise UsageError(
                    f"{name} = {count!r}; give a whole number from 0 (no bound of this data set's)"
                )
        if len(self.gateways) > MAX_RULES or any(not GATEWAY.fullmatch(who) for who in self.gateways):
            raise UsageError(
                f"--gateway {', '.join(self.gateways)[:80]!r}; give {SITE}, none, or the ids of at most "
                f"{MAX_RULES} workers, as `atoll status` shows them"
            )
        for name, value in (("--clip", self.clip), ("--noise", self.noise), ("--epsilon", self.epsilon)):
            if not isinstance(value, int | float) or not math.isfinite(value) or not 0.0 <= value <= 1e9:
                raise UsageError(f"{name} = {value!r}; give a number from 0 (none)")
        if self.noise and not self.clip:
            raise UsageError(
                "--noise without --clip hides nothing: one sample may move an update without bound"
            )

    @property
    def accept_words(self) -> str:
        """Which jobs may train, for people."""
        return {ASK: "asked for each job", ANY: "any job"}.get(self.accept[0], ", ".join(self.accept))

    @property
    def bound_words(self) -> str:
        """The bounds, for people; empty without any."""
        seen_by = "any gateway of its site" if SITE in self.gateways else ", ".join(self.gateways)
        return ", ".join(
            words
            for value, words in (
                (self.min_clients, f"at least {self.min_clients} updates in a round"),
                (self.max_rounds, f"at most {self.max_rounds} updates to a job"),
                (self.clip, f"updates clipped to norm {self.clip:g}"),
                (self.noise, f"Gaussian noise of {self.noise:g} times that in each entry"),
                (
                    self.statistics,
                    f"up to {self.statistics:,} numbers about the data beside each update",
                ),
                (self.gateways, f"updates may be seen by {seen_by}"),
                (self.epsilon, f"epsilon {self.epsilon:g} of single samples over all jobs"),
            )
            if value
        )

    def as_json(self) -> dict[str, Any]:
        """Return what ``policy_from_json`` reads."""
        return {**asdict(self), "accept": list(self.accept), "gateways": list(self.gateways)}


UNSTATED = Policy()
"""Policy of who gave none, and of registrations from before there were any: each job asks."""


OPEN = Policy((ANY,))
"""Policy of data for experiments."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that a job states. ``digest`` covers all that decides what leaves, ``graph`` the graphs alone.
    ``rounds``: 0 of a job that is cut into stages around the data: it sends activations, and no updates."""

    job: str
    data: str
    owner: str
    graph: str
    digest: str
    min_clients: int
    rounds: int
    unclippable: str = ""  # why its strategy's updates cannot be clipped; empty: they can
    numbers: int = 0  # about the data that each round returns beside the update
    few: int = 0  # of them that are allowed without the owner's word
    excess: str = ""  # words for where they are more
    place: str = ""  # the coordinator, and the data set's contents: an acceptance is of both


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word and who gives it why."""

    word: Word
    reason: str


def judge(policy: Policy, terms: Terms, decided: Word | None, reason: str, akin: str = "") -> Verdict:
    """Apply a policy to a job; ``decided``: this owner's own word on it, with its reason.

    A refusal outweighs everything, the bounds outweigh an acceptance. ``akin``: a job that this owner
    refused, of the same graph or the same submitter: then no rule of the policy accepts by itself.
    """
    if decided is Word.REFUSED:
        return Verdict(Word.REFUSED, f"its data owner refused{': ' if reason else ''}{reason}")
    exceeded = _exceeded(policy, terms)
    if exceeded:
        return Verdict(Word.REFUSED, f"the policy of its data owner for {terms.data}: {exceeded}")
    if decided is Word.GIVEN:
        return Verdict(Word.GIVEN, "accepted by its data owner")
    named = {ANY, f"{OWNER}:{terms.owner}", f"{GRAPH}:{terms.graph}"} & {*policy.accept}
    if named and not terms.rounds:
        return Verdict(
            Word.AWAITED,
            f"job {terms.job} would send activations of each sample, which needs its owner's word",
        )
    if named and akin:
        return Verdict(
            Word.AWAITED,
            f"its data owner refused job {akin}, of the same graph or submitter, so this one needs its word",
        )
    if named:
        return Verdict(Word.GIVEN, f"the policy accepts {min(named)}")
    return Verdict(Word.AWAITED, f"its data owner has not accepted job {terms.job} yet")


def most_updates(policy: Policy, terms: Terms) -> tuple[int, str]:
    """Return how many different updates a job gets, and who says so.

    Without ``--max-rounds`` these are its stated rounds, which its owner accepted, with some to spare: a
    round that failed is repeated, and then the update may be coded otherwise.
    """
    if policy.max_rounds:
        return policy.max_rounds, (
            f"the data owner allows {policy.max_rounds} (`atoll-worker data policy --max-rounds`)"
        )
    most = SPARE * terms.rounds + SPARE_ROUNDS
    return most, f"its {terms.rounds} rounds, repeated ones with them, make at most {most}"


def most_evaluations(policy: Policy, terms: Terms) -> tuple[int, str]:
    """Return how many evaluations a job gets, and who says so: one a round for its metrics, one for a
    selector that asks for losses."""
    most, why = most_updates(policy, terms)
    return SPARE * most, f"at most {SPARE} for each update: {why}"


def policy_from_json(found: Mapping[str, Any]) -> Policy:
    """Read a stored policy; UsageError, KeyError, TypeError or ValueError for what is none."""
    return Policy(
        tuple(map(str, found["accept"])),
        int(found["min_clients"]),
        int(found["max_rounds"]),
        float(found["clip"]),
        float(found["noise"]),
        int(found.get("statistics", 0)),  # policies of versions up to 0.6.0 allowed none
        tuple(map(str, found.get("gateways", ()))),
        float(found.get("epsilon", 0.0)),
    )


def rules_of(words: Sequence[str]) -> tuple[str, ...]:
    """Rules of ``--accept`` as given: hashes in small letters, without repetitions."""
    rules = (word.lower() if word.lower().startswith(f"{GRAPH}:") else word for word in map(str.strip, words))
    return tuple(dict.fromkeys(rules))


def _exceeded(policy: Policy, terms: Terms) -> str:
    """Which bound the job breaks; empty when it keeps all."""
    if not terms.rounds:
        bounds = policy.min_clients or policy.max_rounds or policy.clip or policy.noise
        return (
            "it bounds updates, and activations of single samples are within no such bound" if bounds else ""
        )
    if terms.min_clients < policy.min_clients:
        return (
            f"its rounds may close with {terms.min_clients} updates, at least {policy.min_clients} are "
            "demanded (Federated(min_clients=...))"
        )
    if policy.max_rounds and terms.rounds > policy.max_rounds:
        return f"it has {terms.rounds} rounds, at most {policy.max_rounds} are allowed"
    if policy.clip and terms.unclippable:
        return f"updates are to be clipped, and {terms.unclippable}"
    if terms.numbers > max(terms.few, policy.statistics) and not policy.noise:
        return terms.excess
    return ""
