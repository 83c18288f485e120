"""Reports of a stage's work: a step's result, what it waits for, and that it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from atoll.exchange import Receipt
from atoll.step_loss import StepLoss, step_loss
from worker.pipe.status import Waiting
from worker.transport.frames import MessageKey


@dataclass(frozen=True, slots=True)
class StageReport:
    """A stage's part of a step before its commit."""

    losses: tuple[float, ...]  # where computed, by micro-batch ascending: loss_m / n_micro, ...
    square_norms: tuple[float, ...]  # of gradients; see Stage.norm_names
    finite: bool
    digest: bytes = b""  # of the same gradients
    weights: tuple[float, ...] = ()  # ... or sums over these counts, and gradients are those of the sums

    @property
    def step_loss(self) -> StepLoss:
        """The loss of these micro-batches, where this stage computes it."""
        return step_loss(self.losses, self.weights)


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step's result before its commit, and where its time went."""

    step: int
    stage: StageReport
    forward_s: float
    backward_s: float
    waited_s: float
    optimizer_s: float  # of the step before: finish_step and apply
    handling_s: float = 0.0  # of messages: neither computing nor codecs nor waiting
    inputs: bytes = b""  # digest of the messages that the stage took, where steps are checked
    # Of the round that ends a period, by slice; then ``stage`` has the loss of each step.
    receipts: Mapping[int, Receipt] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LongWait:
    """What a stage has been waiting for, for ``waited_s`` so far."""

    key: MessageKey
    peer: str
    waited_s: float


class Progress:
    """Counts actions and messages, and shows what is awaited, for the heartbeat: stands still when the work
    hangs."""

    def __init__(self) -> None:
        self.count = 0
        self.waits: Waiting | None = None

    def tick(self) -> None:
        self.count += 1

    @contextmanager
    def waiting(self, peer: str, what: str, step: int) -> Iterator[None]:
        """Show a wait for as long as it lasts."""
        self.waits = Waiting(peer, what, step, time.monotonic())
        try:
            yield
        finally:
            self.waits = None
