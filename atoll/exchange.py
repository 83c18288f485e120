"""Exchange: how replicas and peers join what they have; ExchangeRound: one such joining; Receipt: its result.

A plan names an exchange by its rule (``strategies.exchanges``), how often it happens and how it is coded.
A round derives everything else, at every rank alike, from these values and its number: who takes part, which
collective's actions each performs (``atoll.collective``), which elements are drawn.

Nothing is lost silently. A receipt says which contributions the result holds; less than all of them is a
status of its own, and what was not included stays with its owner for the next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from math import ceil, isfinite
from typing import Annotated

from atoll.bounded import MAX_STAGES, At, Coded, Most, Name, Unset, Within
from atoll.compression import MAX_RATIO
from atoll.errors import PlanError, UsageError

BUCKET_BYTES = 4 << 20
DIGEST_BYTES = 16  # of a packet, a total, a result
GOSSIP_RULES = frozenset({"saps", "swarm", "wagma"})
"""Rules of peers' models (``Content.MODEL`` of the catalogue), some with some in each round."""
LOCAL_RULES = frozenset({"diloco", "streaming_diloco", "sparseloco"}) | GOSSIP_RULES
"""Rules of what comes of peers' own steps: those, and what peers have changed (``Content.DELTA``)."""
QUORUM_RULES = frozenset({"diloco", "sparseloco"})
"""Those whose rounds may begin before all peers have taken all of a period's steps."""
CODED_RULES = frozenset({"diloco", "streaming_diloco"})
"""Those whose rounds travel in a codec of the job's choice."""
SITE_RULES = frozenset({"diloco", "streaming_diloco", "sparseloco"})
"""Those whose rounds may take what peers of one site have to another once."""
GRADIENT_RULES = frozenset({"mean", "powersgd", "acp_sgd", "random_k", "gtopk", "ok_topk", "demo"})
"""Rules of the gradients of replicas, one round a step, that workers run beside exact sums."""
SIGN_RULES = frozenset({"demo"})
"""Those whose result is a sign of each element: a step of its own, which plain SGD applies."""
EXACT = "exact"
AUTO = "auto"
LOCAL_STEPS = 50  # between two exchanges, unless a job or the rule's paper says otherwise
PAPERS_STEPS = {"saps": 1, "swarm": 5, "wagma": 1}
MOST_PEERS = 64  # of a table of pairs; nobody has measured what more peers teach
RATIOS = {
    "sparseloco": 200.0,
    "saps": 100.0,
    "powersgd": 16.0,
    "acp_sgd": 16.0,
    "random_k": 100.0,
    "gtopk": 100.0,
    "ok_topk": 100.0,
    "demo": 100.0,
}
"""Of rules that have a ratio, unless a job says otherwise."""
STREAMED_FRAGMENTS, STREAMED_DELAY = 4, 5  # the same of streaming_diloco; the steps in which a result arrives


class Content(StrEnum):
    """Quantity that ranks exchange."""

    GRADIENT = "gradient"  # of one step, before the optimizer
    DELTA = "delta"  # change of the model since the last exchange
    MODEL = "model"  # the parameters themselves


class Partners(StrEnum):
    """Ranks that exchange with each other in one round."""

    ALL = "all"
    PAIRS = "pairs"
    GROUPS = "groups"


class Pattern(StrEnum):
    """Collective that carries an exchange; see the functions of ``atoll.collective`` of these names."""

    OWNERS = "owners"  # segment owners add in a fixed order
    TREE = "tree"  # binomial: up with merges, down with copies
    GATHERED = "gathered"  # all send all they have, and all add
    PAIRWISE = "pairwise"  # both send, both add
    PUBLISHED = "published"  # readers take what was published last; nobody waits


MAX_PERIOD = 10**6  # steps
MAX_BUCKET_BYTES = 1 << 30
Rate = Annotated[float, Within()]
Period = Annotated[int, Within(1, MAX_PERIOD)]


@dataclass(frozen=True, slots=True)
class PairTable:
    """Rates of all pairs of ranks. Those as fast as the threshold are drawn, others where they must be."""

    # Bytes/s from each rank to each, row by row; 0 where nothing can be sent.
    rates: Annotated[tuple[Rate, ...], At("pair_rates"), Most(MOST_PEERS**2)]
    threshold: Annotated[Rate, At("pair_threshold")] = 0.0  # bytes/s

    def bps(self, one: int, other: int, ranks: int) -> float:
        """Bits/s of the slower direction between two of so many ranks."""
        return 8.0 * min(self.rates[one * ranks + other], self.rates[other * ranks + one])


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchange of a plan, identical at all its ranks."""

    rule: Name = "sum"  # of strategies.exchanges.catalogue
    every: Period = 1  # steps between two rounds
    codec: Name = "none"  # of what travels, where the rule leaves it open; auto until it is planned
    ratio: Annotated[float, Within(1.0, MAX_RATIO)] = 1.0  # dense bytes / wire bytes aimed at, >= 1
    fragments: Period = 1  # parts of the model that take turns, one a round
    # Steps between a round's start and the use of its result.
    delay: Annotated[int, Within(0, MAX_PERIOD)] = 0
    quorum: Annotated[float, Within(0.0, 1.0)] = 1.0  # share of the ranks that are waited for, in (0, 1]
    deadline_s: Annotated[float, Within()] = 0.0  # of what a round brings to a rank; 0: none
    # Of the ranks of one site among themselves: exact sums, first.
    inner: Exchange | None = None
    # Gradients are merged into messages up to this size.
    bucket_bytes: Annotated[int, Within(1, MAX_BUCKET_BYTES), Unset(BUCKET_BYTES)] = BUCKET_BYTES
    # Bytes/s of each rank over its slowest link to another; none: all alike.
    rates: Annotated[tuple[Rate, ...], Most(MAX_STAGES)] = ()
    # Of each rank, where ``inner`` joins those of one.
    sites: Annotated[tuple[int, ...], Most(MAX_STAGES)] = ()
    pairs: Annotated[PairTable | None, Coded("pairs")] = None  # that gossip draws pairs by; None: at random
    grace_s: Annotated[float, Within()] = 0.0  # from the quorum until nobody begins another step

    def among(self, ranks: int, awaited: int, grace_s: float) -> Exchange:
        """The same of so many ranks, of which ``awaited`` are waited for, and the others ``grace_s`` longer;
        0: all."""
        if not 0 < awaited < ranks:
            return self
        return replace(self, quorum=awaited / ranks, grace_s=grace_s)

    def awaited(self, ranks: int) -> int:
        """Ranks that are waited for, of so many."""
        return ceil(self.quorum * ranks - 1e-9)  # 0.07 of 100 are 7

    @property
    def early(self) -> bool:
        """Whether rounds may begin before all peers have taken all steps of a period."""
        return self.rule in QUORUM_RULES and self.quorum < 1.0

    @property
    def local(self) -> bool:
        """Whether each rank takes its optimizer's steps by itself and exchanges what has come of them."""
        return self.rule in LOCAL_RULES

    @property
    def keeps(self) -> bool:
        """Whether replicas exchange gradients by a rule that keeps what a round left out, for each parameter
        at the stage that holds it."""
        return self.rule in GRADIENT_RULES

    @property
    def setting(self) -> str:
        """The codec, or the ratio where the rule codes what travels by itself."""
        return f"{self.ratio:g}" if self.rule in RATIOS else self.codec

    @property
    def coding(self) -> str:
        """The rule and how it codes what travels, in words."""
        return f"{self.rule} {'of ratio' if self.rule in RATIOS else 'in'} {self.setting}"

    @property
    def gossips(self) -> bool:
        """Whether ranks exchange models with some others in a round, and keep models of their own."""
        return self.rule in GOSSIP_RULES

    def last_step(self, step: int, steps: int) -> int:
        """Return the last step of the period that ``step`` is in, of so many steps in all.

        A period ends with the use of a round's result, ``delay`` steps after ``every`` divides the number of
        steps, and with the last step. Its commit and messages are named by that step. Every step is a period
        of its own unless the exchange is ``local``.
        """
        if not self.local:
            return step
        return min((self.round_of(step) + 1) * self.every + self.delay, steps) - 1

    def first_step(self, step: int) -> int:
        """Return the first step of the period that ``step`` is in."""
        if not self.local:
            return step
        number = self.round_of(step)
        return number * self.every + self.delay if number else 0

    def round_of(self, step: int) -> int:
        """Return the number of the round whose result ends the period of ``step``."""
        return max(0, step - self.delay) // self.every

    def contributed_after(self, last: int) -> int:
        """Return how many steps are done when a rank contributes to the round that ends with step ``last``.
        One that the end of the training cuts short has its contributions at its end."""
        begins = (self.round_of(last) + 1) * self.every
        return begins if begins + self.delay == last + 1 else last + 1


def wanted_exchange(how: str, every: int) -> Exchange | None:
    """Return the exchange that a job asks for as RULE[:CODEC or RATIO], None where it asks for exact ways or
    leaves the choice to the planner. ``every`` 0: as many steps as the rule has by itself.

    UsageError for a rule that no worker runs, PlanError for a period that cannot be.
    """
    rule, _, setting = how.partition(":")
    if how in (EXACT, AUTO):
        return None
    if rule in GRADIENT_RULES:
        return _of_gradients(rule, setting, every)
    if rule not in LOCAL_RULES:
        known = ", ".join((EXACT, AUTO, *sorted(GRADIENT_RULES), *sorted(LOCAL_RULES)))
        raise UsageError(
            f"exchange {how[:40]!r}; workers run {known}, a rule with a codec as in diloco:int8_block"
        )
    every = every or PAPERS_STEPS.get(rule, LOCAL_STEPS)
    exchange = Exchange(rule, every, ratio=RATIOS.get(rule, 1.0))
    if rule == "streaming_diloco":
        parts = min(STREAMED_FRAGMENTS, every)
        exchange = replace(exchange, every=max(1, every // parts), fragments=parts)
        exchange = replace(exchange, delay=min(STREAMED_DELAY, exchange.every - 1))
    if setting and exchange.gossips and rule not in RATIOS:
        raise UsageError(f"exchange {how[:40]!r}; {rule} has nothing to set")
    if setting == AUTO and rule not in CODED_RULES:
        raise UsageError(f"exchange {how!r}: {rule} codes its rounds by itself; give {rule}, or {rule}:RATIO")
    if setting:
        try:
            exchange = replace(exchange, ratio=float(setting))
        except ValueError:
            exchange = replace(exchange, codec=setting)
    check_exchange(exchange)
    return exchange


def _of_gradients(rule: str, setting: str, every: int) -> Exchange:
    """Return the exchange of gradients by a rule, in a codec or at a ratio."""
    if every > 1:
        raise UsageError(
            f"{every} local steps with --exchange {rule}, which exchanges every step's gradients"
        )
    if rule in RATIOS:
        try:
            exchange = Exchange(rule, ratio=float(setting or RATIOS[rule]))
        except ValueError:
            raise UsageError(
                f"exchange {rule}:{setting[:40]}; {rule} has a ratio alone, as {rule}:16"
            ) from None
    elif setting in ("", AUTO):
        raise UsageError(f"exchange {rule!r} needs a codec, as {rule}:int8_block")
    else:
        exchange = Exchange(rule, codec=setting)
    check_exchange(exchange)
    return exchange


def check_exchange(exchange: Exchange) -> None:
    """Raise PlanError for values outside their ranges, or a delay that would let rounds overlap."""
    if exchange.every < 1 or exchange.fragments < 1 or exchange.delay < 0:
        raise PlanError(
            f"exchange every {exchange.every} steps, {exchange.fragments} fragments, delay {exchange.delay}; "
            "at least 1, 1 and 0"
        )
    if exchange.delay >= exchange.every and exchange.delay > 0:
        raise PlanError(
            f"a delay of {exchange.delay} steps with an exchange every {exchange.every}: rounds would "
            "overlap; let the delay be smaller"
        )
    if not (isfinite(exchange.ratio) and exchange.ratio >= 1.0):
        raise PlanError(f"exchange of ratio {exchange.ratio}; at least 1")
    waits_s = (exchange.grace_s, exchange.deadline_s)
    if not 0.0 < exchange.quorum <= 1.0 or not all(isfinite(each) and each >= 0.0 for each in waits_s):
        raise PlanError(
            f"exchange with quorum {exchange.quorum}, grace {exchange.grace_s} s and deadline "
            f"{exchange.deadline_s} s; a share in (0, 1] and at least 0"
        )
    if exchange.bucket_bytes < 1 or not all(isfinite(rate) and rate > 0.0 for rate in exchange.rates):
        raise PlanError(
            f"exchange in messages of {exchange.bucket_bytes} bytes at rates {exchange.rates}; both above 0"
        )
    if exchange.pairs is not None:
        figures = (*exchange.pairs.rates, exchange.pairs.threshold)
        if len(figures) > 1 + MOST_PEERS**2 or not all(isfinite(rate) and rate >= 0.0 for rate in figures):
            raise PlanError(f"rates of {len(figures) - 1} pairs; at most {MOST_PEERS**2}, each at least 0")
    if exchange.sites and exchange.inner is None:
        raise PlanError(f"an exchange of ranks at {len(set(exchange.sites))} sites, and none within a site")
    if exchange.inner is not None:
        check_exchange(exchange.inner)


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """One round. ``seed`` is the job's: draws come from it, the round and the phase alone."""

    number: int
    ranks: tuple[int, ...]  # expected to contribute, ascending
    seed: int = 0
    weights: tuple[float, ...] = ()  # of the ranks' contributions, in their order; none: all alike

    def weight_of(self, rank: int) -> float:
        """Weight of a rank's contribution. Raises ValueError for a rank that is not expected."""
        at = self.ranks.index(rank)
        return self.weights[at] if self.weights else 1.0

    def draw_seed(self, purpose: str) -> int:
        """Seed of this round's draws for ``purpose``, 64 bits; the same at every rank."""
        key = f"{self.seed} {self.number} {purpose}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Receipt:
    """Outcome of a round at one rank. Labels name contributions: ranks, or blocks of micro-batches."""

    round: int
    rank: int
    expected: tuple[int, ...]  # labels
    included: tuple[int, ...]  # labels that every element of the result holds
    share: float  # of the elements, those whose result holds all that was expected
    sent_bytes: int  # packets, without the transport's framing
    received_bytes: int
    digest: str  # of the result; equal at ranks that hold the same
    faults: tuple[tuple[int, str], ...] = ()  # (rank, reason) of peers that were given up
    totals: Mapping[int, str] = field(default_factory=dict)  # digest of what each rank's total brought

    @property
    def complete(self) -> bool:
        """Whether every element of the result holds every contribution."""
        return self.share == 1.0 and self.included == self.expected
