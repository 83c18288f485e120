"""A simulated stage: its place in the plan, its tensors, and the messages that stages exchange."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.microbatch import own_blocks
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.pipeline.assigning import neighbours
from tests.sim.local_steps import begun
from tests.sim.send_log import Kept, Wanted

if TYPE_CHECKING:
    from atoll.plan import Place, Plan, Replica

_serials = itertools.count()
Key = tuple[str, int, int, int]
"""Job, plan version, step, and what it is: forwards, or of which replica the part of an exchange."""
PART = 2  # and the replica: no direction of a pipeline


@dataclass
class Held:
    """A stage: its place, its tensors after ``step`` steps, and neighbours' messages of the one under way."""

    work: do.Assign
    plan: Plan
    tensors: dict[str, str]
    step: int
    first: int  # step that it applies first
    outputs: dict[int, str] = field(default_factory=dict)  # step -> what the whole step comes to
    values: dict[int, str] = field(default_factory=dict)  # step -> what its own pipeline computed
    digests: list[ev.Digest] = field(default_factory=list)  # of steps that are repeated
    serial: int = field(default_factory=lambda: next(_serials))
    taken: int = 0  # local steps of the period under way, ...
    own: dict[str, str] = field(default_factory=dict)  # ... and the state that they have led to
    next: dict[str, str] = field(default_factory=dict)  # after the step that is to be committed
    results: dict[int, dict[str, str]] = field(default_factory=dict)  # of rounds, by their last steps
    ran: int = 0  # version of its newest step
    _placed: tuple[Plan, int, Place] | None = None

    @property
    def rank(self) -> int:
        """Its rank now: those of replicas that are lost leave the plan."""
        return self._now()[0]

    @property
    def stage(self) -> int:
        return self._now()[1].stage

    @property
    def replica(self) -> int:
        return self._now()[1].replica

    def _now(self) -> tuple[int, Place]:
        """Return its rank and place in its plan, which is looked through once: it is asked for often."""
        if self._placed is None or self._placed[0] is not self.plan:
            rank = self.plan.rank_of(self.work.plan.places[self.work.rank].worker)
            rank = self.work.rank if rank is None else rank
            self._placed = self.plan, rank, self.plan.places[rank]
        return self._placed[1:]

    @property
    def stepwise(self) -> bool:
        """Whether each of its steps within a period is committed."""
        return self.plan.in_pipe(self.rank)

    @property
    def pipeline(self) -> Replica:
        return self.plan.replicas[self.replica]

    @property
    def blocks(self) -> range:
        own = own_blocks(self.plan.n_micro, self.plan.blocks, self.pipeline.micros)
        return range(min(own), max(own) + 1)

    @property
    def ring(self) -> bool:
        """Whether the first stage also has the last piece."""
        return bool(self.pipeline.stages[0].further)

    @property
    def last(self) -> bool:
        """Whether its only piece is the last one."""
        return not self.ring and self.stage == len(self.pipeline.stages) - 1

    @property
    def closes(self) -> bool:
        """Whether it computes the loss of what it is sent forwards, beside another piece."""
        return self.ring and self.stage == 0

    @property
    def ends(self) -> bool:
        """Whether it has the loss."""
        return self.last or self.closes

    def names(self, at: int) -> list[str]:
        """Names of the tensors of one of its pieces."""
        piece = self.pipeline.stages[self.stage].pieces[at]
        return sorted(self.work.spec.tensors)[piece.start : piece.stop]

    def neighbour(self, offset: int) -> str:
        stages = self.pipeline.stages
        return stages[(self.stage + offset) % len(stages)].worker

    @property
    def others(self) -> dict[str, int]:
        """Who holds some of its tensors in other replicas, and in which."""
        places = self.plan.places
        ranks = neighbours(self.plan, self.rank)
        found = {places[rank].worker: places[rank].replica for rank in sorted(ranks)}
        return {worker: replica for worker, replica in found.items() if replica != self.replica}

    @property
    def other_ranks(self) -> dict[str, int]:
        """Who holds some of its tensors in other replicas, and as which rank."""
        found = {self.plan.places[rank].worker: rank for rank in sorted(neighbours(self.plan, self.rank))}
        return {worker: rank for worker, rank in found.items() if worker in self.others}

    @property
    def own_now(self) -> dict[str, str]:
        """Its state within a period of its peer's own steps."""
        return self.own if self.taken else begun(self.tensors, self.replica)

    @property
    def neighbours(self) -> dict[bool, str]:
        """Whose messages it is sent, by whether they go forwards."""
        found = {} if self.stage == 0 and not self.ring else {True: self.neighbour(-1)}
        return found if self.last else {**found, False: self.neighbour(+1)}


@dataclass(frozen=True)
class Tensors:
    """What neighbours exchange: a stage's output forwards, or the loss backwards."""

    job: str
    version: int
    step: int
    forwards: bool
    value: str


@dataclass(frozen=True)
class Part:
    """What replicas exchange: what one of them computed in a step."""

    job: str
    version: int
    step: int
    replica: int
    value: str


Message = Tensors | Part | Wanted | Kept
