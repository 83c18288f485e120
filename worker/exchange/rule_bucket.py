"""RuleBucket: one replica's part in the exchange of a bucket by a rule, without a socket or a clock.

    messages = run.contribute(label, parts)    its own parts; when the last is there, the round begins
    messages = run.take(arriving, bytes)       of another replica, in any order
    run.totals()                               once ``finished``

It runs the rounds of a rule's phases (``CollectiveRun``) as peers with local steps do, with the replicas for
ranks. Nobody is given up: a step is whole or it is discarded, and what the rule keeps changes with its
commit. A replica brings the mean over its micro-batches, which weighs as much as it has of them. So the
weighted mean has the scale of the step's gradient, and what is left out has it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from atoll.collective import Collective, even_shares, owner_shares
from atoll.errors import BadFrame
from atoll.exchange import ExchangeRound, Pattern
from atoll.gradient_exchange import Arriving
from compressors.vector import Vector
from strategies.exchanges import exchange_facts
from strategies.exchanges.base import Contribution, Flat, Settled
from worker.exchange.bucket import Outgoing
from worker.exchange.carrier import Slot, most_bytes, packed, read
from worker.exchange.round import CollectiveRun
from worker.exchange.schedule import collective_of

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import Exchange
    from atoll.gradient_exchange import Bucket
    from strategies.exchanges.base import ExchangeRule, State
    from worker.exchange.kept import KeptState
    from worker.exchange.round import Message

NOTHING = torch.empty(0)


class FaultyReplica(Exception):
    """A replica has sent what it should not."""

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(reason)
        self.replica = replica


class RuleBucket:
    """One step of one bucket; ``shapes`` of its parameters."""

    def __init__(
        self,
        bucket: Bucket,
        rule: ExchangeRule,
        at: ExchangeRound,
        shapes: Sequence[tuple[int, ...]],
        kept: KeptState,
    ) -> None:
        self.bucket = bucket
        self._rule, self._at, self._kept, self._flat = rule, at, kept, Flat(tuple(shapes))
        self._parts: dict[int, Mapping[str, Tensor | None]] = {}
        self._reached: set[str] = set()  # parameters that a gradient reached here
        self._state: State = None
        self._run: CollectiveRun | None = None
        self._phase = -1
        self._early: list[tuple[Arriving, Tensor]] = []  # of a phase that has not begun here
        self._totals: dict[str, Tensor | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the totals are here and nothing is to be sent any more."""
        return self._totals is not None

    def contribute(self, label: int, parts: Mapping[str, Tensor | None]) -> list[Outgoing]:
        """Take in a part of every gradient; what can be sent now."""
        self._parts[label] = parts
        if len(self._parts) < len(self.bucket.labels):
            return []
        own = self._joined_parts()
        self._state = self._rule.resumed([self._kept.of(name) for name in self.bucket.names], self._flat)
        return self._begun(self._rule.contribute(own, self._state, self._at, self.bucket.replica))

    def take(self, arriving: Arriving, value: Tensor) -> list[Outgoing]:
        """Take in another replica's message; what can be sent now. Raises FaultyReplica for what nobody
        should send."""
        if self.finished:
            return []
        if self._run is None or arriving.phase > self._phase:
            self._early.append((arriving, value))
            return []
        return self._taken(self._run, arriving, value)

    def awaits(self, arriving: Arriving) -> bool:
        """Whether a message that has not come is still to come: a short row has empty segments, which nobody
        sends. Of a phase that has not begun that is not known."""
        if self._run is None or arriving.phase > self._phase:
            return not self.finished
        return arriving.phase == self._phase and self._run.awaits(arriving.segment, arriving.label)

    def totals(self) -> dict[str, Tensor | None]:
        """Return every gradient's total, flat; None where nothing reached the parameter. Whether anything
        does is the same at all replicas: the model's ops decide it."""
        if self._totals is None:
            raise RuntimeError("the round of a bucket is not over")
        return self._totals

    # ---------------------------------------------------------------- inside

    def _joined_parts(self) -> Tensor:
        """Mean over this replica's micro-batches of the bucket's gradients, in a row [n]."""
        row: Tensor | None = None
        for _, parts in sorted(self._parts.items()):
            self._reached.update(name for name, part in parts.items() if part is not None)
            more = _row(self.bucket, parts)
            row = more if row is None else row.add_(more)
        self._parts.clear()
        assert row is not None  # noqa: S101 - a replica has at least one block
        # Parts are shares of the mean over all of the step's micro-batches.
        return row.mul_(sum(self._at.weights) / self._at.weight_of(self.bucket.replica))

    def _begun(self, contribution: Contribution) -> list[Outgoing]:
        replica, exchange = self.bucket.replica, self._rule.exchange
        collective = _collective(exchange, self.bucket.holders, contribution)
        self._phase = contribution.phase
        run = self._run = CollectiveRun(
            self._rule, collective, replica, self._at, {replica: contribution}, whole=True
        )
        found = [*_outgoing(run.start())]
        early, self._early = self._early, []
        for arriving, value in early:
            found += self.take(arriving, value)
        # One replica alone, or all that comes was early.
        return found + self._settled(run) if run is self._run else found

    def _taken(self, run: CollectiveRun, arriving: Arriving, value: Tensor) -> list[Outgoing]:
        slot = Slot(arriving.segment, arriving.label)
        try:
            message = read(value, slot, arriving.source, self._at, arriving.phase, self.bucket.replica)
            found = [*_outgoing(run.receive(message))]
        except BadFrame as error:
            raise FaultyReplica(arriving.source, str(error)) from None
        return found + self._settled(run)

    def _settled(self, run: CollectiveRun) -> list[Outgoing]:
        """End the phase once all of it is here; what its successor sends."""
        if not run.finished or self.finished:
            return []
        now = torch.zeros(1).expand(self._flat.size)  # no rule of gradients looks at it
        settled = self._rule.settle(run.exchanged(self._state, now))
        run.release()  # memory is at its most here
        if isinstance(settled, Contribution):
            return self._begun(settled)
        assert isinstance(settled, Settled)  # noqa: S101 - the only other outcome
        self._run, self._state = None, None
        kept = self._rule.stored(settled.state, self._flat)
        for name, one in zip(self.bucket.names, kept, strict=True):
            self._kept.propose(name, one)
        self._totals = {
            name: found if name in self._reached or bool(found.any()) else None
            for name, start, stop in self.bucket.spans
            for found in [settled.result[start:stop]]
        }
        return []


def arrivals(
    bucket: Bucket, rule: ExchangeRule, shapes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Arriving, int]]:
    """Yield what a bucket's round brings to its holder, and the most bytes of each message."""
    ranks = len(bucket.holders)
    for phase, rows in enumerate(rule.rows(Flat(tuple(shapes)), ranks)):
        most: dict[Arriving, int] = {}
        for row in rows:
            borders = tuple(row.elements * at for at in range(1, ranks)) if row.free else ()
            # With free borders anybody may own all of it, so there are as many elements for each.
            vector = Vector(row.elements * (ranks if row.free else 1), NOTHING)
            settings = Contribution(vector, *rule.codecs(), phase=phase, borders=borders)
            collective = _collective(rule.exchange, bucket.holders, settings)
            for (segment, label), source in collective.sources(bucket.replica).items():
                bound = most_bytes(collective, Slot(segment, label), settings, row.positions)
                arriving = Arriving(segment, label, source, phase)
                most[arriving] = max(most.get(arriving, 0), bound)
        yield from most.items()


def _collective(exchange: Exchange, holders: Sequence[int], contribution: Contribution) -> Collective:
    """Return how holders, whose ranks in the plan these are, join such contributions, numbered by replica."""
    rates = [exchange.rates[rank] for rank in holders] if exchange.rates else []
    shares = owner_shares(rates) if rates else even_shares(len(holders))
    pattern = exchange_facts(exchange.rule).pattern
    if contribution.borders:
        return collective_of(pattern, [tuple(range(len(shares)))], contribution)
    return _of_shares(pattern, shares, contribution.vector.size, contribution.multiple)


@lru_cache(maxsize=1024)
def _of_shares(pattern: Pattern, shares: tuple[float, ...], elements: int, multiple: int) -> Collective:
    ranks = tuple(range(len(shares)))
    settings = Contribution(Vector(elements, NOTHING), multiple=multiple)
    return collective_of(pattern, [ranks], settings, shares=dict(enumerate(shares)))


def _outgoing(messages: Sequence[Message]) -> Iterator[Outgoing]:
    """Yield messages as their bytes; a total that goes to several is made into bytes once."""
    frames: dict[tuple[int, int], Tensor] = {}
    for message in messages:
        slot = message.segment, message.label
        if slot not in frames:
            frames[slot] = packed(message)
        yield Outgoing(message.target, *slot, frames[slot], message.phase)


def _row(bucket: Bucket, parts: Mapping[str, Tensor | None]) -> Tensor:
    """Return the gradients one after another, zero where there is none: own memory."""
    pieces = [
        torch.zeros(stop - start) if (part := parts[name]) is None else part.detach().reshape(-1).to("cpu")
        for name, start, stop in bucket.spans
    ]
    return torch.cat(pieces)
