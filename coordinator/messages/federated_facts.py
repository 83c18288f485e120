"""Durable facts of federated jobs; the Ledger of ``coordinator.messages.facts`` folds them with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.messages.from_worker import UpdateReady
from strategies.privacy.accountant import Spent


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """A federated round is over and its state in the store: written before anybody hears of it.

    ``state`` is the server's state after it, ``model`` the next broadcast. ``participants`` holds what
    each one counted showed (``coordinator.federated.metrics``), ``dropped`` why others were not. ``homes``:
    of a population whose clients keep a state, by host the clients whose state lies there. ``waits``: names
    of an asynchronous job's updates that are for a later round.
    """

    job: str
    round: int  # from 0; round + 1 are closed
    state: str
    model: str
    model_bytes: int
    loss: float | None
    participants: Mapping[str, Mapping[str, Any]]
    dropped: Mapping[str, str]
    selector: Any  # its state, JSON-ready
    took_s: float
    at_s: float
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    privacy: Spent | None = None  # of a private job, with this round
    waits: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class NoisedAsked:
    """Members of a private secure round are asked for their vectors: from now on the coordinator may open a
    sum of them, so it is spent, whatever comes of the round."""

    job: str
    round: int
    privacy: Spent  # with this sum


@dataclass(frozen=True, slots=True)
class UpdateTaken:
    """A client's update of an asynchronous job, or a host's sum of several, waits in the store to be summed:
    written before the worker hears that it was taken.

    ``update.round`` is the number of the model that it began with, ``model`` the blob of that. ``codec`` and
    ``ratio`` are what the worker was given, ``registered`` are its samples. ``clients``: in a host's sum, and
    what each of them may count; ``grid``: clients and registered samples that fix its grid.
    """

    job: str
    worker: str
    update: UpdateReady
    registered: int
    codec: str
    ratio: float
    model: str
    clients: Mapping[str, int] = field(default_factory=dict)
    grid: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """Name of the update among those that wait: a host may have several sums there."""
        return f"{self.worker}/{self.update.round}/{self.update.order}" if self.clients else self.worker

    @property
    def members(self) -> Mapping[str, int]:
        """The clients in it, and what each of them may count."""
        return self.clients or {self.worker: self.registered}


@dataclass(frozen=True, slots=True)
class RoundEvaluated:
    """The model after ``round`` closed rounds; ``where``: clients | central."""

    job: str
    round: int
    where: str
    loss: float
    metrics: Mapping[str, float]
    n_samples: int
    clients: int
