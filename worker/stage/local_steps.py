"""Steps of a peer's own, and the exchange round that ends a period of them.

A period begins with a committed state. The peer takes its optimizer's steps on its own share of each step's
micro-batches; its optimizer's state never leaves it but for checkpoints. The model as it is
``contributed_after`` so many steps is what it brings to the round, to whom ``partners`` says; a copy that it
has published leaves as the period begins. The result is used with the commit, so that until then a round may
be done again with the same bits, among fewer or other peers. Steps that were taken stay: who is interrupted
goes on with the step it was at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from atoll.collective import even_shares, owner_shares
from atoll.errors import BadFrame
from atoll.exchange import ExchangeRound, Pattern
from compressors.selection import all_finite
from compressors.vector import Vector
from strategies.exchanges import exchange_facts, make_rule
from strategies.exchanges.base import Flat, Settled
from strategies.exchanges.diloco import OuterState
from strategies.exchanges.partners import JOINING_RULE, group_of, groups_of
from strategies.exchanges.streaming_diloco import StreamingDiLoCo
from strategies.exchanges.swarm import Published
from worker.exchange.carrier import Slot, arriving, most_bytes, packed, split, unpacked
from worker.exchange.round import CollectiveRun
from worker.exchange.schedule import collective_of
from worker.stage.flat import by_name, flat_of, flat_shapes, flat_values, set_values
from worker.transport.contract import PeerLost

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.collective import Collective
    from atoll.exchange import Receipt
    from strategies.exchanges.base import Contribution, ExchangeRule, State
    from worker.exchange.carrier import Arriving
    from worker.exchange.round import Message
    from worker.stage.assignment import Assignment
    from worker.stage.joining import Send, Take, Which
    from worker.stage.stage import Stage

OUTER, MOMENTUM, RESIDUAL, PEER = "outer", "outer_momentum", "residual", "peer"
PUBLISHED, DISTANCE = "published", "distance"
"""Keys of a checkpoint's tensors beside those of the optimizer; ``PEER`` says whose state it is."""

Wait = Callable[["Which", str, float], "Tensor"]
"""Wait for a message of a peer until the exchange's deadline is over, or so many times its length."""
TOTALS_PATIENCE = 2.0  # deadlines: who is to send a total may wait for one itself before it names who is late


@dataclass(frozen=True, slots=True)
class _Round:
    """A round as all its ranks derive it; ``settings``: codecs and size of each contribution."""

    at: ExchangeRound
    rule: ExchangeRule
    collective: Collective
    settings: Contribution


class LocalSteps:
    """A peer's rule, its state, and how far it is within a period; not thread-safe."""

    def __init__(
        self, assignment: Assignment, stage: Stage, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """``tensors``: what the stage was made from; of a checkpoint they have the rule's state as well."""
        assert assignment.plan.exchange is not None  # noqa: S101 - of local steps
        self._exchange = assignment.plan.exchange
        self._rule = make_rule(self._exchange)
        self._stage, self._rank, self._training = stage, assignment.rank, assignment.training
        self._state = self._restored(tensors)
        self._last = -1  # step that ends the period under way
        self.losses: list[float] = []  # of the period's steps so far: means, ...
        self.weights: list[float] = []  # ... and the counts that they are over, where the job has some
        self._brought: Tensor | None = None  # the model as contributed
        self._run: CollectiveRun | None = None
        self._found: _Round | None = None  # the round of ``_run``
        self._left: list[Arriving] = []  # of it

    # ---------------------------------------------------------------- steps

    def begin(self, first: int, last: int) -> range:
        """Return the steps that are left of a period."""
        if last != self._last:
            self._last, self.losses, self.weights = last, [], []
            self._brought = self._run = None
            rule = self._rule_of(last, self._exchange.codec)
            if exchange_facts(rule.exchange.rule).pattern is Pattern.PUBLISHED:
                self._brought = flat_values(self._stage.trained)
        return range(first + len(self.losses), last + 1)

    def taken(self, step: int, loss: float, weight: float | None = None) -> None:
        """Take in that the optimizer's step is done."""
        self.losses.append(loss)
        if weight is not None:
            self.weights.append(weight)
        whole = self._last + 1 if self._ends(self._last) else self._exchange.contributed_after(self._last)
        # Later where a job begins between a contribution and its use: all begin there, with nothing brought.
        if step + 1 >= whole and self._brought is None:
            self._brought = flat_values(self._stage.trained)

    @property
    def contributes(self) -> bool:
        """Whether this is the time to begin the round of the period."""
        return self._brought is not None and self._run is None

    @property
    def joinable(self) -> bool:
        """Whether what this rank is to bring may go into the models of others."""
        return self._brought is None or all_finite(self._brought)

    # ---------------------------------------------------------------- the round

    def arrivals(self, assignment: Assignment, last: int) -> list[Arriving]:
        """Return what the round that ends with step ``last`` brings to this rank."""
        found = self._round(assignment, last)
        return arriving(found.collective, self._rank, found.settings)

    def contribute(self, assignment: Assignment, send: Send) -> None:
        """Begin the round: send what this rank brings."""
        assert self._brought is not None  # noqa: S101 - it ``contributes``
        found = self._round(assignment, self._last)
        brought = found.rule.contribute(self._brought, self._state, found.at, self._rank)
        self._found = found
        self._run = CollectiveRun(
            found.rule, found.collective, self._rank, found.at, {self._rank: brought}, whole=True
        )
        self._left = arriving(found.collective, self._rank, found.settings)
        self._send_all(assignment, self._run.start(), send)

    def advance(self, assignment: Assignment, send: Send, take: Take) -> None:
        """Take what has arrived."""
        for one in list(self._left):
            peer = assignment.plan.places[one.source].worker
            while not one.whole and (piece := take(one.next_key, peer)) is not None:
                one.pieces.append(piece)
            self._arrived(assignment, one, send)

    def finish(self, assignment: Assignment, send: Send, take: Take, wait: Wait) -> Receipt:
        """Wait for the rest of the round. Raises PeerLost for who has not sent all before the deadline, or
        sent what it should not."""
        while self._left:
            self.advance(assignment, send, take)
            if self._left:
                one = self._left[0]
                patience = TOTALS_PATIENCE if one.slot.label < 0 else 1.0
                one.pieces.append(wait(one.next_key, assignment.plan.places[one.source].worker, patience))
                self._arrived(assignment, one, send)
        assert self._run is not None  # noqa: S101 - it was begun
        return self._run.receipt()

    def settle(self) -> None:
        """Use the round's result, with its commit."""
        if self._run is None or self._found is None:
            raise RuntimeError("a period is committed whose round has not been")
        done = self._run.exchanged(self._state, flat_values(self._stage.trained))
        self._run = self._brought = None  # the round is not done again, and here memory is at its most
        settled = self._found.rule.settle(done)
        assert isinstance(settled, Settled)  # noqa: S101 - rules of changes have one phase
        self._state = settled.state
        if self._exchange.gossips and self._ends(self._last):
            self._state = self._rule.init(Flat(flat_shapes(self._stage.trained)), settled.result)
        set_values(self._stage.trained, settled.result)
        self._last = -1

    def forget_round(self) -> None:
        """Do the round again, among the peers that there are then; the steps stay."""
        self._run, self._left = None, []

    # ---------------------------------------------------------------- checkpoints

    def with_own(self, snapshot: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Put copies of the rule's state beside the optimizer's."""
        state, trained = self._state, self._stage.trained
        flats: dict[str, Tensor | None] = {}
        if isinstance(state, OuterState):
            flats = {MOMENTUM: state.momentum, RESIDUAL: state.residual}
            if not exchange_facts(self._exchange.rule).alike:
                flats[OUTER] = state.outer
        elif isinstance(state, Published):
            flats = {PUBLISHED: state.model}
            for name in trained:
                snapshot[name][DISTANCE] = torch.tensor([state.distance, state.whole], dtype=torch.float64)
        for key, flat in flats.items():
            if flat is not None:
                for name, part in by_name(trained, flat).items():
                    snapshot[name][key] = part.contiguous().clone()
        for name in trained:
            snapshot[name][PEER] = torch.tensor([float(self._rank)])
        return snapshot

    def _restored(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> State:
        """Return the rule's state as stored; of another rank's all but its residual: a published copy is
        the model that this one begins with, too, and as far from the others'."""
        trained = self._stage.trained
        own = flat_values(trained)
        state = self._rule.init(Flat(flat_shapes(trained)), own)
        mine = all(
            PEER in tensors[name] and int(tensors[name][PEER].reshape(-1)[0]) == self._rank
            for name in trained
        )

        def kept(key: str) -> Tensor | None:
            held = {name: tensors[name][key] for name in trained if key in tensors[name]}
            if len(held) < len(trained):
                return None
            odd = [name for name, part in held.items() if part.shape != trained[name].shape]
            if odd:
                raise BadFrame(f"{key} of {odd[0]} is of shape {tuple(held[odd[0]].shape)}")
            return flat_of(trained, held)

        if isinstance(state, Published) and (model := kept(PUBLISHED)) is not None:
            figures = tensors[next(iter(trained))].get(DISTANCE)
            if figures is None or figures.numel() != 2:
                raise BadFrame("a published copy is stored without its distance")
            return Published(model, float(figures[0]), bool(figures[1]))
        if not isinstance(state, OuterState):
            return state
        momentum, outer = kept(MOMENTUM), kept(OUTER)
        state = replace(state, outer=state.outer if outer is None else outer)
        if momentum is not None:
            state = replace(state, momentum=momentum)
        return replace(state, residual=kept(RESIDUAL) if mine else None)

    # ---------------------------------------------------------------- inside

    def _ends(self, last: int) -> bool:
        return last + 1 == self._training.steps

    def _rule_of(self, last: int, codec: str) -> ExchangeRule:
        """Return the rule of the round that ends with step ``last``: the training's last one joins the whole
        model, and all end with the same. ``codec``: of a later plan perhaps, which differs in no more."""
        exchange = replace(self._exchange, codec=codec)
        if exchange.gossips and self._ends(last):
            return make_rule(replace(exchange, rule=JOINING_RULE, ratio=1.0))
        rule = make_rule(exchange)
        if not (self._ends(last) and isinstance(rule, StreamingDiLoCo)):
            return rule
        return replace(rule, exchange=replace(exchange, fragments=1, delay=0), alpha=0.0)

    def _round(self, assignment: Assignment, last: int) -> _Round:
        """Return the round as those of this rank's group derive it."""
        plan, exchange = assignment.plan, self._exchange
        rule = self._rule_of(last, plan.exchange.codec if plan.exchange is not None else exchange.codec)
        at = ExchangeRound(exchange.round_of(last), plan.present, self._training.seed)
        nothing = torch.zeros(sum(parameter.numel() for parameter in self._stage.trained.values()))
        settings = rule.contribute(nothing, self._state, at, self._rank)
        group = group_of(self._rank, groups_of(plan, self._training, last))
        rates = [exchange.rates[rank] for rank in group] if exchange.rates else []
        shares = owner_shares(rates) if rates else even_shares(len(group))
        by_rank = dict(zip(group, shares, strict=True))
        pattern = exchange_facts(rule.exchange.rule).pattern
        both_read = pattern is Pattern.PUBLISHED and len(group) > 1
        groups = [group, group[::-1]] if both_read else [group]
        collective = collective_of(pattern, groups, settings, shares=by_rank)
        # Nothing but codecs and sizes is needed of it any more: a model is large.
        empty = Vector(settings.vector.size, torch.empty(0))
        return _Round(at, rule, collective, replace(settings, vector=empty, carry=None))

    def _arrived(self, assignment: Assignment, one: Arriving, send: Send) -> None:
        if not one.whole or self._run is None or self._found is None:
            return
        self._left.remove(one)
        try:
            message = unpacked(one, self._found.at, self._found.settings.phase, self._rank)
            answers = self._run.receive(message)
        except BadFrame as error:
            raise PeerLost(assignment.plan.places[one.source].worker, str(error)) from None
        self._send_all(assignment, answers, send)

    def _send_all(self, assignment: Assignment, messages: list[Message], send: Send) -> None:
        """Send messages; a total that goes to several is made into bytes once."""
        assert self._found is not None  # noqa: S101 - its messages are of a round
        frames: dict[Slot, Tensor] = {}
        for message in messages:
            slot = Slot(message.segment, message.label)
            if slot not in frames:
                frames[slot] = packed(message)
            peer = assignment.plan.places[message.target].worker
            most = most_bytes(self._found.collective, slot, self._found.settings)
            for number, piece in enumerate(split(frames[slot], most)):
                send(peer, slot.key(number), piece)
