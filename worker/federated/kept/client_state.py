"""What a client keeps of a federated job from round to round, across restarts.

    STATE/federated/JOB/kept.json         which folder counts: that of the last round that was taken
    STATE/federated/JOB/pending.json      which folder will count if the round's update is taken
    STATE/federated/JOB/ROUND-XXXX/state  the rule's own arrays (``ClientState``)
    STATE/federated/JOB/ROUND-XXXX/left   what the codec left out of the deltas: the residual

A round's answer changes both at once or neither: the pointer is replaced atomically, and only when the
coordinator says that the update was taken. A round that was lost, late or refused leaves all as it was,
so that training it again gives the same update. What is damaged on disk counts as never kept, and so does
a residual of another codec or one that is too old (``atoll.federated.residual_counts``).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from atoll.errors import BadFrame, StorageError
from atoll.federated import residual_counts
from atoll.opdag import TensorMeta
from compressors.container import DenseWriter, dense_metas, read_dense, write_dense
from hostos.files.locked_json import sound_object
from hostos.files.private_files import write_private
from hostos.files.refusals import ROOM, disk
from strategies.files import client_state_of, slot_arrays
from strategies.values import ClientState
from worker.federated.kept.folders import MAX_BYTES, forget_old, job_folder, size_of

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.layout import Array

log = structlog.get_logger()

MAX_POINTER_BYTES = 4096
KEPT, PENDING, STATE, LEFT = "kept.json", "pending.json", "state", "left"


@dataclass(frozen=True, slots=True)
class Pointer:
    """``folder`` holds what came of ``round``; its residual is that of ``codec``."""

    round: int
    folder: str
    codec: str


class ClientStore:
    """One job's folder. StorageError when the disk refuses, or ``max_bytes`` are too few for this job."""

    def __init__(self, state_dir: Path, job: str, max_bytes: int = MAX_BYTES) -> None:
        self.folder = job_folder(state_dir, job)
        self.max_bytes = max_bytes
        with disk(f"write {self.folder}", ROOM):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.utime(self.folder)
            self.make_room(0)

    def make_room(self, n_bytes: int) -> None:
        """For so much more of this job's: what older jobs left goes until it fits. StorageError when it
        does not fit beside what counts now, though nothing else is left."""
        pointer = self._pointer(KEPT)
        counts = size_of(self.folder / pointer.folder) if pointer is not None else 0
        if counts + n_bytes > self.max_bytes:
            raise StorageError(
                f"a round leaves {n_bytes} bytes to keep beside the last one's {counts}; at most "
                f"{self.max_bytes} may be kept here: join again with a larger --kept, or leave this job to "
                "others"
            )
        forget_old(self.folder, counts + n_bytes, self.max_bytes)

    def load(self, at_round: int, codec: str) -> tuple[ClientState, dict[str, Tensor]]:
        """What counts in ``at_round``, mapped: the rule's state, and the residual by tensor where it is of
        ``codec`` and not too old."""
        pointer = self._pointer(KEPT)
        if pointer is None:
            return ClientState(), {}
        try:
            place = self.folder / Path(pointer.folder).name
            state = _read(place / STATE)
            counts = pointer.codec == codec and residual_counts(pointer.round, at_round)
            left = _read(place / LEFT) if counts else {}
        except (BadFrame, StorageError) as error:
            log.warning("client.state_lost", round=pointer.round, reason=str(error))
            return ClientState(), {}
        return client_state_of(state), {name: torch.from_numpy(array) for name, array in left.items()}

    def begin(self, at_round: int, codec: str, left: Mapping[str, TensorMeta]) -> Draft:
        """What may count after ``at_round``. ``left``: residuals to come."""
        return Draft(self, Pointer(at_round, f"{at_round}-{secrets.token_hex(4)}", codec), left)

    def settle(self, at_round: int, taken: bool) -> bool:
        """The coordinator's word on the update of ``at_round``; False when no draft is of that round."""
        pointer = self._pointer(PENDING)
        if pointer is None or pointer.round != at_round:
            return False
        if taken:
            before = self._pointer(KEPT)
            self.point(KEPT, pointer)
            (self.folder / PENDING).unlink(missing_ok=True)
            if before is not None:
                shutil.rmtree(self.folder / before.folder, ignore_errors=True)
        else:
            self.propose(None)
        return True

    def point(self, name: str, pointer: Pointer) -> None:
        """Replace a pointer atomically, and so that it survives a power cut."""
        write_private(self.folder / name, json.dumps(asdict(pointer)).encode())

    def propose(self, pointer: Pointer | None) -> None:
        """The draft that counts if its round is taken, instead of an earlier one; None: nothing is kept.

        Only a draft that is whole replaces another: the word on an update that this machine sent before
        it was restarted may come while the same round is trained again.
        """
        before, kept = self._pointer(PENDING), self._pointer(KEPT)
        if pointer is None:
            (self.folder / PENDING).unlink(missing_ok=True)
        else:
            self.point(PENDING, pointer)
        if before is not None and before.folder not in {p.folder for p in (kept, pointer) if p is not None}:
            shutil.rmtree(self.folder / Path(before.folder).name, ignore_errors=True)

    def _pointer(self, name: str) -> Pointer | None:
        path = self.folder / name
        try:
            found = sound_object(path, MAX_POINTER_BYTES)
            pointer = Pointer(int(found["round"]), str(found["folder"]), str(found["codec"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return pointer if (self.folder / Path(pointer.folder).name).is_dir() else None


class Draft:
    """What a round leaves behind, written while its update is; nothing for rules and codecs that keep
    nothing. ``finish`` makes it pending; left without, it is deleted."""

    def __init__(self, store: ClientStore, pointer: Pointer, left: Mapping[str, TensorMeta]) -> None:
        self._store, self._pointer = store, pointer
        self._place = store.folder / pointer.folder
        self._sizes = {name: meta.elements for name, meta in left.items()}
        self._left: DenseWriter | None = None
        self._left_bytes = sum(4 * elements for elements in self._sizes.values())
        if left:
            store.make_room(self._left_bytes)
            self._make_place()
            flat = {name: TensorMeta((meta.elements,), "float32") for name, meta in left.items()}
            self._left = DenseWriter(self._place / LEFT, flat)
        self._done = False

    def keep(self, name: str, error: Tensor | None) -> None:
        """The residual of one tensor, in the order of their names."""
        if self._left is None:
            raise ValueError(f"no residual of {name!r} was announced")
        flat = torch.zeros(self._sizes[name]) if error is None else error.reshape(-1)
        self._left.add(name, flat.numpy())

    def finish(self, state: ClientState) -> None:
        if self._left is not None:
            self._left.finish(durable=True)
        if state.slots:
            arrays = slot_arrays(state.slots)
            self._store.make_room(self._left_bytes + sum(array.nbytes for array in arrays.values()))
            self._make_place()
            write_dense(self._place / STATE, arrays, durable=True)
        self._store.propose(self._pointer if self._place.is_dir() else None)
        self._done = True

    def _make_place(self) -> None:
        with disk(f"write {self._place}", ROOM):
            self._place.mkdir(mode=0o700, exist_ok=True)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._done:
            if self._left is not None:
                self._left.__exit__(None, None, None)
            shutil.rmtree(self._place, ignore_errors=True)


def _read(path: Path) -> dict[str, Array]:
    return read_dense(path, dense_metas(path)) if path.is_file() else {}
