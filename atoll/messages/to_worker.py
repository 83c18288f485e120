"""What a coordinator says to its workers, as far as both handle it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atoll import bounded
from atoll.bounded import Amount, At, Most, Name, Version, Within
from atoll.messages.from_worker import MAX_REPEATED, Reason
from atoll.plan import LinkSpec

BlobHash = bounded.Blob
MAX_VERSION = (1 << 32) - 1
MAX_STEP = (1 << 63) - 1
MAX_ERAS = 1024  # versions of steps that are repeated
MAX_OVERLAP_S = 366 * 86_400.0

Step = Annotated[int, Within(0, MAX_STEP)]


@dataclass(frozen=True, slots=True)
class Revoked:
    """A worker's certificate opens nothing any more: end its connections, accept none of it."""

    worker: Name
    reason: Reason


@dataclass(frozen=True, slots=True)
class TrustAuthorities:
    """Authorities of this coordinator from now on, PEM, the newer one first; two for ``left_s`` more."""

    ca_pem: bytes
    left_s: Annotated[float, Within(0.0, MAX_OVERLAP_S)]


@dataclass(frozen=True, slots=True)
class StoreCopy:
    """Put the blobs of a copy into the store; answered by ``CopyStored``."""

    job: Name
    name: Name
    blobs: tuple[BlobHash, ...]


@dataclass(frozen=True, slots=True)
class Era:
    """From ``first_step`` on, the stages exchange under ``version`` with these codecs."""

    version: Version
    first_step: Step
    links: tuple[LinkSpec, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps from ``first_step`` on that a rank repeats by itself; ``stores``: numbers of steps after which it
    stores its part of a checkpoint; ``standby``: and every later one, beside the plan."""

    first_step: Step
    # Ascending; the first begins at or before ``first_step``, of who stands by the last goes on.
    eras: Annotated[tuple[Era, ...], Most(MAX_ERAS)]
    # One a step.
    scales: Annotated[tuple[Amount, ...], At("gradient_scales"), Most(MAX_REPEATED)]
    stores: Annotated[tuple[int, ...], Most(MAX_REPEATED)] = ()
    standby: bool = False


@dataclass(frozen=True, slots=True)
class StepStart:
    job: str
    version: Version
    step: int


@dataclass(frozen=True, slots=True)
class Relink:
    """From ``first_step`` on the same stages exchange under ``version`` with these codecs."""

    version: Version
    first_step: Step
    links: tuple[LinkSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCommit:
    job: str
    version: Version
    step: int
    gradient_scale: Amount
    store: bool
    evaluate: bool
    last: bool
    relink: Relink | None = None
    evaluate_coded: bool = False  # with evaluate: once more through the links' codecs
    replay_from: int = 0  # step of the newest checkpoint: older messages may leave the send logs
    keep: bool = False  # a snapshot on the workers' own disks, for the others of the plan


@dataclass(frozen=True, slots=True)
class StepDiscard:
    job: str
    version: Version
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Release:
    job: str
    version: Version
    reason: Reason


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob by hash and size."""

    hash: str
    size: int


@dataclass(frozen=True, slots=True)
class Model:
    """The broadcast of a round: ``full``, or ``delta`` against ``base`` where a client holds that."""

    full: Blob
    delta: Blob | None = None
    base: str = ""


@dataclass(frozen=True, slots=True)
class TrainRound:
    """Train, and put the update into the store coded with ``codec`` at ``ratio``.

    ``clients``: of a population, to be trained in turn, ``order`` the name of their set; ``drawn`` and
    ``drawn_samples``: how many the round has, and what they have registered together.
    """

    job: str
    round: int
    model: Model
    codec: str
    ratio: float
    deadline_s: float  # from now
    seed: int
    order: str = ""
    clients: tuple[str, ...] = ()
    drawn: int = 0
    drawn_samples: int = 0


@dataclass(frozen=True, slots=True)
class EvaluateRound:
    job: str
    round: int
    model: Model
    deadline_s: float
    clients: tuple[str, ...] = ()  # of a population


@dataclass(frozen=True, slots=True)
class RoundTaken:
    """Result of a client's update; ``clients``: of a population, those that are counted."""

    job: str
    round: int
    taken: bool
    reason: Reason = ""
    clients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Leave now; ``for_good``: the certificate is refused from here on."""

    reason: Reason
    for_good: bool
