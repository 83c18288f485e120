"""Values that the two halves of a strategy exchange and keep: arrays by state-dict name, and small
numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from strategies.layout import Array, Arrays, Layout, Slots

LOCAL_SLOT = "local"
"""Slot in which a client keeps the tensors whose role is LOCAL."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Requirements of a strategy on whoever runs it."""

    summary: str  # one line for users
    source: str  # paper and section
    linear: bool = True  # aggregate is a weighted sum: partial sums and secure aggregation are possible
    bounded: bool = True  # ... whose weights have a public bound: sums in whole numbers
    secure: bool = True  # ... and the server need not see any single update
    needs_client_state: bool = False
    sgd_only: bool = False  # its formula reads the local optimizer as SGD, momentum allowed
    needs_start_loss: bool = False  # the local loss at the received weights, before any step
    changes_loss: bool = False  # the owner's module is wrapped before capture
    needs_base: bool = False  # averages models: an old update is seen from the newest broadcast
    asynchronous: bool = True  # an update that began with an older model still means something


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that a client uploads, and its bounds."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class ServerState:
    """All that the server half knows: enough to go on after a restart."""

    round: int  # of the next broadcast, from 0
    layout: Layout
    weights: Arrays  # TRAINED, AVERAGED, TOLD
    slots: Slots
    n_clients: int  # of the whole federation, not of one round


@dataclass(frozen=True)
class ClientState:
    """State of a client from round to round; one without slots is a client seen for the first time.

    ``client`` is set by who trains it, and is not kept.
    """

    slots: Slots = field(default_factory=dict)
    client: str = ""


@dataclass(frozen=True)
class Broadcast:
    """Message to every participant of a round."""

    round: int
    weights: Arrays  # TRAINED, AVERAGED, TOLD
    extra: Slots = field(default_factory=dict)


@dataclass(frozen=True)
class Correction:
    """Term that a strategy adds to a local gradient before the optimizer sees it:

        g' = g + offset + pull * (w - anchor)

    for the names in ``offset`` and ``anchor``. Arrays of numpy, or after ``mapped`` the trainer's own.
    """

    offset: Mapping[str, Any] = field(default_factory=dict)
    anchor: Mapping[str, Any] = field(default_factory=dict)
    pull: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.offset) or (self.pull != 0.0 and bool(self.anchor))

    def mapped(self, convert: Callable[[Array], Any]) -> Correction:
        """The same with every array converted, as by ``torch.from_numpy``."""
        return Correction(
            {name: convert(array) for name, array in self.offset.items()},
            {name: convert(array) for name, array in self.anchor.items()},
            self.pull,
        )

    def gradient(self, name: str, gradient: Any, weight: Any) -> Any:
        """``gradient`` of ``name`` at ``weight``, corrected; the arguments stay as they are."""
        if name in self.offset:
            gradient = gradient + self.offset[name]
        if self.pull and name in self.anchor:
            gradient = gradient + (weight - self.anchor[name]) * self.pull
        return gradient


@dataclass(frozen=True)
class Phase:
    """A local training. ``start``: tensors to set; all others start as the job gave them, so that a round is
    a function of broadcast, client state and seed, ``carried`` ones as the phase before left them.
    ``frozen``: parameters that it does not train."""

    start: Arrays
    correction: Correction = field(default_factory=Correction)
    frozen: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """Result of a phase. ``lr`` is the mean over ``steps``; ``momentum`` that of SGD."""

    weights: Arrays
    n_samples: int
    steps: int
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    start_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    """Upload of a participant: ``delta`` = its weights - the broadcast's, for TRAINED and AVERAGED.

    ``client`` is set by who received it, from the authenticated session, never by the peer.
    """

    round: int
    n_samples: int
    steps: int
    delta: Arrays
    extra: Slots = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    client: str = ""


@dataclass(frozen=True)
class Work:
    """All that a client's answer is made of."""

    layout: Layout
    broadcast: Broadcast
    done: Sequence[Done]  # one a phase
    delta: Arrays
    state: ClientState
    seed: int


@dataclass(frozen=True)
class Uploads:
    """A strategy's own part of a client's answer, and the slots it keeps."""

    extra: Slots = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    kept: Slots = field(default_factory=dict)
