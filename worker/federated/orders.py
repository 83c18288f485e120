"""A federated job between the session and who takes part: the coordinator's orders, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from atoll.bounded import At, Blob, Most, Name, Once, OptionalBlob, Within
from atoll.compression import MAX_RATIO
from atoll.federated import FederatedSpec
from atoll.job import TrainingSpec
from atoll.messages.from_worker import MAX_CLIENTS
from atoll.opdag import StateMeta, TensorMeta
from atoll.program import StageProgram

if TYPE_CHECKING:
    from compressors.container import Stored
    from strategies.fixed import FixedSums
    from strategies.values import ClientUpdate

MAX_BATCH = 1 << 24
Clients = Annotated[tuple[str, ...], Once(), Most(MAX_CLIENTS)]


@dataclass(frozen=True)
class Joining:
    """A federated job as a client hears of it. ``states`` describes every leaf of the programs, inputs
    included; ``tensors`` maps every other leaf to its blob."""

    job: Name
    version: int
    training: TrainingSpec
    federated: FederatedSpec
    program: StageProgram
    eval_program: StageProgram | None
    states: Annotated[Mapping[Name, StateMeta], At("metas")]
    tensors: Mapping[Name, Blob]
    batch: Annotated[int, Within(1, MAX_BATCH)]

    @property
    def programs(self) -> tuple[StageProgram, ...]:
        return (self.program,) if self.eval_program is None else (self.program, self.eval_program)

    @property
    def inputs(self) -> dict[str, TensorMeta]:
        return {name: self.states[name].meta for program in self.programs for name in program.inputs}


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A broadcast: blob ``full``, or blob ``delta`` from the broadcast known as ``base``."""

    full: Annotated[Blob, At("full.hash")]
    delta: Annotated[OptionalBlob, At("delta.hash")] = ""
    base: OptionalBlob = ""


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """``seed``: of what codec and rule draw on this client in this round. ``clients``: of a population, to be
    trained in turn; ``drawn`` and ``drawn_samples``: how many the round has on all hosts, and what they have
    registered together."""

    round: int
    model: ModelRef
    codec: Name
    ratio: Annotated[float, Within(1.0, MAX_RATIO)]
    seed: int
    order: str = ""
    clients: Clients = ()
    drawn: int = 0
    drawn_samples: int = 0


@dataclass(frozen=True, slots=True)
class EvaluateOrder:
    """A model to evaluate on the held-out share, of ``clients`` where they are a population's."""

    round: int
    model: ModelRef
    clients: Clients = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of a client whose update is in a host's sum; ``coded_bytes``: of its own update, had it
    travelled; ``seconds``: of its training."""

    client: str
    n_samples: int
    steps: int
    loss: float
    square_loss: float
    coded_bytes: int
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class HostAnswer:
    """A host's upload: the file of ``sums`` (None: nobody is in it) and the clients in it; ``refused``: why
    others are not; ``stateful``: some of them keep a state here."""

    stored: Stored | None
    sums: FixedSums
    rows: tuple[Row, ...]
    refused: Mapping[str, str]
    stateful: bool = False


@dataclass(frozen=True)
class Update:
    """A round's answer, stored: ``answer`` and its numbers, without its arrays."""

    answer: ClientUpdate | HostAnswer
    square_loss: float
    stored: Stored | None
    train_s: float
    upload_bytes: int
    upload_s: float
    download_bytes: int
    download_s: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Means over ``n_samples`` held-out samples of one client."""

    n_samples: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Assessment:
    """An evaluation's answer: ``found`` by client, "" for this machine's own data."""

    found: Mapping[str, Evaluated]
    took_s: float
    download_bytes: int
    download_s: float
