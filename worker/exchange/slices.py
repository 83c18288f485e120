"""SliceRounds: one slice of the model in the rounds of peers with local steps, without a socket or a clock.

A slice is what the same ranks hold in every peer (``atoll.gradient_exchange.Slice``); where each peer is one
stage it is the whole model. Rules treat each tensor by itself, so the slices together have the bits of the
whole. Contributions are labelled by peers' numbers, whichever rank of a peer brings them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from atoll.bounded import MAX_OPS
from atoll.collective import even_shares, owner_shares
from atoll.errors import BadFrame, PlanError
from atoll.exchange import ExchangeRound, Pattern
from atoll.gateways import column_shares, sites_of
from compressors.vector import Vector
from strategies.exchanges import exchange_facts, make_rule
from strategies.exchanges.base import Flat, Settled
from strategies.exchanges.partners import JOINING_RULE, group_of, groups_of
from strategies.exchanges.streaming_diloco import StreamingDiLoCo
from worker.exchange.carrier import Slot, arriving, most_bytes, packed, split, unpacked
from worker.exchange.round import CollectiveRun
from worker.exchange.schedule import collective_of, of_sites
from worker.transport.contract import PeerLost

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.collective import Collective
    from atoll.exchange import Exchange, Receipt
    from atoll.gradient_exchange import Slice
    from atoll.job import TrainingSpec
    from atoll.plan import Plan
    from strategies.exchanges.base import Contribution, ExchangeRule, State
    from worker.exchange.carrier import Arriving
    from worker.exchange.round import Message
    from worker.transport.frames import Direction

    Which = tuple[Direction, int, int]  # direction, micro, edge of a key

Send = Callable[[str, "Which", "Tensor"], None]
Take = Callable[["Which", str], "Tensor | None"]
"""What has arrived of a peer, None where it has not."""
MAX_SEGMENTS = ((1 << 32) - 1) // MAX_OPS
"""Of a slice: an edge of 32 bits has the slice's op and the segment."""


@dataclass(frozen=True, slots=True)
class _Round:
    """A round as all its ranks derive it; ``settings``: codecs and size of each contribution."""

    at: ExchangeRound
    rule: ExchangeRule
    collective: Collective
    settings: Contribution


def rule_of(exchange: Exchange, training: TrainingSpec, last: int) -> ExchangeRule:
    """Return the rule of the round that ends with step ``last``: the training's last one joins the whole
    model, and all end with the same."""
    ends = last + 1 == training.steps
    if exchange.gossips and ends:
        return make_rule(replace(exchange, rule=JOINING_RULE, ratio=1.0))
    rule = make_rule(exchange)
    if not (ends and isinstance(rule, StreamingDiLoCo)):
        return rule
    return replace(rule, exchange=replace(exchange, fragments=1, delay=0), alpha=0.0)


class SliceRounds:
    """A slice's rule and its state at one peer, and the round under way; not thread-safe."""

    def __init__(
        self, piece: Slice, flat: Flat, exchange: Exchange, training: TrainingSpec, peer: int, state: State
    ) -> None:
        """``flat``: shapes of its tensors in their order; ``peer``: this one's number; ``state`` of the rule
        before the next round."""
        self.piece, self.flat, self.state = piece, flat, state
        self._exchange, self._training, self._peer = exchange, training, peer
        self._run: CollectiveRun | None = None
        self._found: _Round | None = None  # the round of ``_run``
        self.shares: tuple[float, ...] = ()  # of the peers in it, by their numbers; none: all alike
        self.left: list[Arriving] = []  # of it

    def key(self, one: Arriving) -> Which:
        """Return what the next message of an arriving one is named by."""
        return self._named(one.next_key)

    def arrivals(self, plan: Plan, last: int) -> list[tuple[str, Which, int]]:
        """Return what the round that ends with step ``last`` brings here: sender, name, and bound of bytes of
        each message."""
        found = self._round(plan, last)
        return [
            (self._holder(plan, one.source), self._named(one.slot.key(number)), size)
            for one in arriving(found.collective, self._peer, found.settings)
            for number, size in enumerate(one.sizes)
        ]

    def contribute(self, plan: Plan, last: int, brought: Tensor, send: Send) -> None:
        """Begin the round: send what this peer brings, [n]."""
        found = self._round(plan, last)
        contribution = found.rule.contribute(brought, self.state, found.at, self._peer)
        self._found = found
        self._run = CollectiveRun(
            found.rule, found.collective, self._peer, found.at, {self._peer: contribution}, whole=True
        )
        self.left = arriving(found.collective, self._peer, found.settings)
        self._send_all(plan, self._run.start(), send)

    def take(self, plan: Plan, one: Arriving, piece: Tensor, send: Send) -> None:
        """Take a piece of an arriving message. Raises PeerLost for one that is none of the round."""
        one.pieces.append(piece)
        if not one.whole or self._run is None or self._found is None:
            return
        self.left.remove(one)
        try:
            message = unpacked(one, self._found.at, self._found.settings.phase, self._peer)
            answers = self._run.receive(message)
        except BadFrame as error:
            raise PeerLost(self._holder(plan, one.source), str(error)) from None
        self._send_all(plan, answers, send)

    def source(self, plan: Plan, one: Arriving) -> str:
        """Return the worker that sends an arriving message."""
        return self._holder(plan, one.source)

    def receipt(self) -> Receipt:
        """Return what the round's result holds, once nothing of it is ``left``."""
        if self._run is None:
            raise RuntimeError("a receipt of a round that was not begun")
        return self._run.receipt()

    def settle(self, now: Tensor) -> Tensor:
        """Use the round's result: return the slice after it from the one ``now``, both [n]."""
        if self._run is None or self._found is None:
            raise RuntimeError("a period is committed whose round has not been")
        done = self._run.exchanged(self.state, now)
        self._run = None  # the round is not done again, and here memory is at its most
        settled = self._found.rule.settle(done)
        assert isinstance(settled, Settled)  # noqa: S101 - rules of changes have one phase
        self.state, self.shares = settled.state, ()
        return settled.result

    def forget(self) -> None:
        """Do the round again, among the peers that there are then."""
        self._run, self.left = None, []

    # ---------------------------------------------------------------- inside

    def _named(self, key: Which) -> Which:
        direction, micro, segment = key
        return direction, micro, self.piece.op + MAX_OPS * segment

    def _holder(self, plan: Plan, peer: int) -> str:
        return plan.places[self.piece.holders[peer]].worker

    def _round(self, plan: Plan, last: int) -> _Round:
        """Return the round as those of this peer's group derive it; under a later plan perhaps, which differs
        in its codec and in who is there alone."""
        codec = plan.exchange.codec if plan.exchange is not None else self._exchange.codec
        rule = rule_of(replace(self._exchange, codec=codec), self._training, last)
        peers = plan.present_replicas
        weights = tuple(self.shares[peer] for peer in peers) if len(set(self.shares)) > 1 else ()
        at = ExchangeRound(self._exchange.round_of(last), peers, self._training.seed, weights)
        settings = rule.contribute(torch.zeros(self.flat.size), self.state, at, self._peer)
        group = group_of(self._peer, groups_of(plan, self._training, last))
        if len(settings.borders) >= MAX_SEGMENTS:
            raise PlanError(f"a slice of {len(settings.borders) + 1} tensors; {MAX_SEGMENTS} go into a round")
        collective = self._collective(rule, group, settings)
        # Nothing but codecs and sizes is needed of it any more: a model is large.
        bare = Vector(settings.vector.size, torch.empty(0))
        return _Round(at, rule, collective, replace(settings, vector=bare, carry=None))

    def _collective(self, rule: ExchangeRule, group: tuple[int, ...], settings: Contribution) -> Collective:
        """Actions of the round in a group of peers."""
        pattern, given = exchange_facts(rule.exchange.rule).pattern, self._exchange.rates
        rates = {peer: given[self.piece.holders[peer]] for peer in group} if given else {}
        if sites := sites_of(rule.exchange, {peer: self.piece.holders[peer] for peer in group}):
            return of_sites(pattern, sites, settings, column_shares(sites, rates))
        shares = owner_shares(list(rates.values())) if rates else even_shares(len(group))
        both_read = pattern is Pattern.PUBLISHED and len(group) > 1
        groups = [group, group[::-1]] if both_read else [group]
        return collective_of(pattern, groups, settings, shares=dict(zip(group, shares, strict=True)))

    def _send_all(self, plan: Plan, messages: list[Message], send: Send) -> None:
        """Send messages; a total that goes to several is made into bytes once."""
        assert self._found is not None  # noqa: S101 - its messages are of a round
        frames: dict[Slot, Tensor] = {}
        for message in messages:
            slot = Slot(message.segment, message.label)
            if slot not in frames:
                frames[slot] = packed(message)
            plain = self._found.collective.plain(message.source, message.target, message.label)
            most = most_bytes(self._found.collective, slot, self._found.settings, plain=plain)
            for number, part in enumerate(split(frames[slot], most)):
                send(self._holder(plan, message.target), self._named(slot.key(number)), part)
