"""Answers of a client, or a host of clients, to the orders of a federated job, before they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.messages.from_worker import EvaluatedRow, Row
    from compressors.container import Stored
    from strategies.fixed import FixedSums
    from strategies.values import ClientUpdate


@dataclass(frozen=True)
class HostAnswer:
    """A host's upload: the file of ``sums`` (None: nobody is in it) and the clients in it; ``refused``: why
    others are not; ``stateful``: some of them keep a state here."""

    stored: Stored | None
    sums: FixedSums
    rows: Mapping[str, Row]
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


@dataclass(frozen=True)
class Assessment:
    """An evaluation's answer: ``found`` by client, "" for this machine's own data."""

    found: Mapping[str, EvaluatedRow]
    took_s: float
    download_bytes: int
    download_s: float
