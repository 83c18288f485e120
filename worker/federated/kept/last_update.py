"""The update that a client wrote last, found again after a restart.

    STATE/federated/JOB/update        the update's file
    STATE/federated/JOB/update.json   the work that it answers, its numbers, the hash of its file

Training a round again gives the same update, except where each sample's noise is drawn anew: there it would
be a second release, charged again. A job may have only as many releases as rounds, so such an update
outlives its process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest, sha256
from typing import TYPE_CHECKING

from atoll.messages.to_worker import Model
from compressors.container import Stored
from hostos.files.locked_json import sound_object
from hostos.files.private_files import write_private
from strategies.values import ClientUpdate

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.messages.to_worker import TrainRound

FILE = "update.json"
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LastUpdate:
    """An update whose file is still here. ``work``: what it answers (``work_of``)."""

    work: str
    answer: ClientUpdate
    square_loss: float
    stored: Stored


def work_of(order: TrainRound) -> str:
    """Hash of what an order has a client train, whoever is to have it and until when."""
    work = replace(order, model=Model(order.model.full), deadline_s=0.0, order="", gateway="")
    return sha256(repr(work).encode()).hexdigest()  # of a masked round ``exchange`` names the attempt


def write_last(folder: Path, last: LastUpdate) -> None:
    """Write what ``read_last`` finds, so that it survives a power cut. Raises StorageError."""
    write_private(folder / FILE, json.dumps(asdict(last)).encode())


def read_last(folder: Path, update: Path) -> LastUpdate | None:
    """The last update of a job's folder; None without one, or where its file is gone or another."""
    try:
        found = sound_object(folder / FILE, MAX_BYTES)
        last = LastUpdate(
            str(found["work"]),
            ClientUpdate(**found["answer"]),
            float(found["square_loss"]),
            Stored(**found["stored"]),
        )
        with update.open("rb") as file:
            whole = file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return last if whole == last.stored.hash else None
