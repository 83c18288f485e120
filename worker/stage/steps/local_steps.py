"""Steps of a peer's own, and the exchange round that ends a period of them.

A period begins with a committed state. The peer takes its optimizer's steps on its own share of each step's
micro-batches; its optimizer's state never leaves it but for checkpoints. The model as it is
``contributed_after`` so many steps is what it brings to the round, to whom ``partners`` says; a copy that it
has published leaves as the period begins. The result is used with the commit, so that until then a round may
be done again with the same bits, among fewer or other peers. Steps that were taken stay: who is interrupted
goes on with the step it was at.

A peer is a replica. A stage of several joins those slices of the model that it holds, each with the stages
of the other peers that hold it (``worker.exchange.slices``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from atoll.errors import BadFrame
from atoll.exchange import Pattern
from compressors.selection import all_finite
from strategies.exchanges import exchange_facts, make_rule
from strategies.exchanges.diloco import OuterState
from strategies.exchanges.swarm import Published
from worker.exchange.flat import by_name, flat_of, flat_values, row_of, set_values
from worker.exchange.slices import SliceRounds, rule_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from atoll.exchange import Receipt
    from atoll.plan import Plan
    from strategies.exchanges.base import State
    from worker.exchange.slices import Send, Take, Which
    from worker.stage.assignment import Assignment
    from worker.stage.stage import Stage

OUTER, MOMENTUM, RESIDUAL, PEER = "outer", "outer_momentum", "residual", "peer"
PUBLISHED, DISTANCE = "published", "distance"
"""Keys of a checkpoint's tensors beside those of the optimizer; ``PEER`` says whose state it is."""

Tensors = Mapping[str, Mapping[str, "Tensor"]]
Wait = Callable[["Which", str, float], "Tensor"]
"""Wait for a message of a peer until the exchange's deadline is over, or so many times its length."""


class LocalSteps:
    """A peer's slices, and how far it is within a period; not thread-safe."""

    def __init__(self, assignment: Assignment, stage: Stage, tensors: Tensors) -> None:
        """``tensors``: what the stage was made from; of a checkpoint they have the rule's state as well."""
        assert assignment.plan.exchange is not None  # noqa: S101 - of local steps
        self._exchange, self._training = assignment.plan.exchange, assignment.training
        self._peer, self._trained = assignment.replica, stage.trained
        self.alone = not assignment.plan.in_pipe(assignment.rank)  # else each step is committed, too
        self._slices: list[SliceRounds] = []
        for piece in assignment.slices:
            held = self._held(piece.names)
            state = self._restored(held, tensors)
            flat = row_of(held)
            self._slices.append(
                SliceRounds(piece, flat, self._exchange, self._training, assignment.replica, state)
            )
        self._last = self._next = -1  # step that ends the period under way, and the one to be taken next
        self.losses: list[float] = []  # of the period's steps so far, where they are computed: means, ...
        self.weights: list[float] = []  # ... and the counts that they are over, where the job has some
        self._brought: list[Tensor] | None = None  # each slice as contributed
        self._begun = False  # the round

    # ---------------------------------------------------------------- steps

    def begin(self, first: int, last: int) -> None:
        """Begin the period from step ``first`` to ``last``, or go on with it."""
        if last != self._last:
            self._last, self._next, self.losses, self.weights = last, first, [], []
            self._brought, self._begun = None, False
            rule = rule_of(self._exchange, self._training, last)
            if exchange_facts(rule.exchange.rule).pattern is Pattern.PUBLISHED:
                self._brought = self._values()

    def taken(self, step: int, loss: float | None, weight: float | None = None) -> None:
        """Take in that the optimizer's step is done; ``loss``: None where another stage computes it."""
        self._next = step + 1
        if loss is not None:
            self.losses.append(loss)
        if weight is not None:
            self.weights.append(weight)
        ends = self._last + 1 == self._training.steps
        whole = self._last + 1 if ends else self._exchange.contributed_after(self._last)
        # Later where a job begins between a contribution and its use: all begin there, with nothing brought.
        if step + 1 >= whole and self._brought is None:
            self._brought = self._values()

    def end(self, shares: tuple[float, ...]) -> int:
        """Take no further step of the period, and return its last one: the round begins with those that there
        are. ``shares``: of the peers in it, by their numbers."""
        if self._brought is None:
            self._brought = self._values()
        self._next = self._last + 1
        for one in self._slices:
            one.shares = shares
        return self._last

    @property
    def left(self) -> range:
        """Steps of the period under way that are left."""
        return range(self._next, self._last + 1)

    @property
    def joining(self) -> bool:
        """Whether of the period under way the round alone is left."""
        return self._last >= 0 and not self.left

    @property
    def contributes(self) -> bool:
        """Whether this is the time to begin the round of the period."""
        return self._brought is not None and not self._begun

    @property
    def joinable(self) -> bool:
        """Whether what this rank is to bring may go into the models of others."""
        return self._brought is None or all(map(all_finite, self._brought))

    # ---------------------------------------------------------------- the round

    def arrivals(self, plan: Plan, last: int) -> list[tuple[str, Which, int]]:
        """Return what the round that ends with step ``last`` brings to this rank: sender, name, and bound of
        bytes of each message."""
        return [arrival for one in self._slices for arrival in one.arrivals(plan, last)]

    def contribute(self, plan: Plan, send: Send) -> None:
        """Begin the round: send what this rank brings."""
        assert self._brought is not None  # noqa: S101 - it ``contributes``
        self._begun = True
        for one, brought in zip(self._slices, self._brought, strict=True):
            one.contribute(plan, self._last, brought, send)

    def advance(self, plan: Plan, send: Send, take: Take) -> None:
        """Take what has arrived."""
        for one in self._slices:
            for arriving in list(one.left):
                peer = one.source(plan, arriving)
                while not arriving.whole and (piece := take(one.key(arriving), peer)) is not None:
                    one.take(plan, arriving, piece, send)

    def finish(self, plan: Plan, send: Send, take: Take, wait: Wait) -> dict[int, Receipt]:
        """Wait for the rest of the round, and return what came of each slice, by its op. Raises PeerLost for
        who has not sent all before the deadline, or sent what it should not."""
        while True:
            self.advance(plan, send, take)
            left = [(one, arriving) for one in self._slices for arriving in one.left]
            if not left:
                return {one.piece.op: one.receipt() for one in self._slices}
            # First, of all slices, what nobody waits for anything to send. Who passes on may wait for another
            # itself, so it has a deadline more than that one before it is named.
            one, arriving = min(left, key=lambda each: each[1].hops)
            patience = float(arriving.hops)
            one.take(plan, arriving, wait(one.key(arriving), one.source(plan, arriving), patience), send)

    def settle(self) -> None:
        """Use the round's result, with its commit."""
        self._brought = None
        afresh = self._exchange.gossips and self._last + 1 == self._training.steps
        for one in self._slices:
            held = self._held(one.piece.names)
            result = one.settle(flat_values(held))
            if afresh:
                one.state = make_rule(self._exchange).init(one.flat, result)
            set_values(held, result)
        self._last = -1

    def forget_round(self) -> None:
        """Do the round again, among the peers that there are then; the steps stay."""
        self._begun = False
        for one in self._slices:
            one.forget()

    # ---------------------------------------------------------------- checkpoints

    def with_own(self, snapshot: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Put copies of the rule's state beside the optimizer's."""
        for one in self._slices:
            held = self._held(one.piece.names)
            flats: dict[str, Tensor | None] = {}
            if isinstance(one.state, OuterState):
                flats = {MOMENTUM: one.state.momentum, RESIDUAL: one.state.residual}
                if not exchange_facts(self._exchange.rule).alike:
                    flats[OUTER] = one.state.outer
            elif isinstance(one.state, Published):
                flats = {PUBLISHED: one.state.model}
                figures = [one.state.distance, one.state.whole]
                for name in held:
                    snapshot[name][DISTANCE] = torch.tensor(figures, dtype=torch.float64)
            for key, flat in flats.items():
                if flat is not None:
                    for name, part in by_name(held, flat).items():
                        snapshot[name][key] = part.contiguous().clone()
            for name in held:
                snapshot[name][PEER] = torch.tensor([float(self._peer)])
        return snapshot

    def _restored(self, held: Mapping[str, Parameter], tensors: Tensors) -> State:
        """Return the rule's state of a slice as stored; of another peer's all but its residual: a published
        copy is the model that this one begins with, too, and as far from the others'."""
        own = flat_values(held)
        state = make_rule(self._exchange).init(row_of(held), own)
        mine = all(
            PEER in tensors[name] and int(tensors[name][PEER].reshape(-1)[0]) == self._peer for name in held
        )

        def kept(key: str) -> Tensor | None:
            found = {name: tensors[name][key] for name in held if key in tensors[name]}
            if len(found) < len(held):
                return None
            odd = [name for name, part in found.items() if part.shape != held[name].shape]
            if odd:
                raise BadFrame(f"{key} of {odd[0]} is of shape {tuple(found[odd[0]].shape)}")
            return flat_of(held, found)

        if isinstance(state, Published) and (model := kept(PUBLISHED)) is not None:
            figures = tensors[next(iter(held))].get(DISTANCE)
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

    def _held(self, names: tuple[str, ...]) -> dict[str, Parameter]:
        """Return parameters so that their row begins with the first of these."""
        return {name: self._trained[name] for name in reversed(names)}

    def _values(self) -> list[Tensor]:
        return [flat_values(self._held(one.piece.names)) for one in self._slices]
