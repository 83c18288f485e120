"""What the clients of a population keep from round to round, on the disk of the host that trains them.

    FOLDER/counts.json     round and file of each client whose state counts
    FOLDER/pending.json    the same of the clients that a round trained, until the coordinator's verdict
    FOLDER/NAME.state      state/SLOT/TENSOR: the strategy's arrays; left/TENSOR: the codec's residual

A host answers for several clients at once: a verdict makes the states of all that were counted count, by one
atomic replacement of counts.json. Files that neither list names are of a crash and go when the folder is
opened. Only the state of the client in training need be in memory: states are mapped, the last ones used stay
mapped up to a bound. A client that another host is to train takes its file along (``path``, ``adopt``).
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import structlog

from atoll.errors import BadFrame, StorageError
from atoll.federated import residual_counts
from compressors.container import dense_metas, read_dense, write_dense
from hostos.files.private_files import write_private
from hostos.files.refusals import ROOM, disk
from strategies.files import client_state_of, slot_arrays
from strategies.values import ClientState
from worker.federated.kept.folders import MAX_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from strategies.layout import Array, Arrays

log = structlog.get_logger()

COUNTS, PENDING, SUFFIX = "counts.json", "pending.json", ".state"
STATE, LEFT = "state/", "left/"
CACHED_BYTES = 256 << 20  # that stay mapped


@dataclass(frozen=True, slots=True)
class Kept:
    """A client's file: what came of ``round``, as ``order`` had it trained; its residual is that of
    ``codec``."""

    round: int
    file: str
    size: int
    codec: str
    order: str = ""


@dataclass(frozen=True)
class Held:
    """A client's state, and what the codec left out of its updates, by tensor."""

    state: ClientState = field(default_factory=ClientState)
    left: Arrays = field(default_factory=dict)


class PopulationStates:
    """One job's folder on one host. StorageError when the disk refuses."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES, cached_bytes: int = CACHED_BYTES) -> None:
        self.folder, self.max_bytes, self.cached_bytes = folder, max_bytes, cached_bytes
        self._cache: OrderedDict[str, dict[str, Array]] = OrderedDict()  # by file
        self._cached = 0  # bytes
        with disk(f"write {folder}", ROOM):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _, self._counts = self._listed(COUNTS)
            self._pending_round, self._pending = self._listed(PENDING)
            self._sweep()

    @property
    def clients(self) -> Mapping[str, Kept]:
        """The clients whose state counts here."""
        return self._counts

    @property
    def size(self) -> int:
        """Bytes of the states that count or may."""
        return sum(kept.size for kept in (*self._counts.values(), *self._pending.values()))

    def load(self, client: str, at_round: int, codec: str) -> Held:
        """What counts for ``client`` in ``at_round``, mapped: its state, and its residual where that is of
        ``codec`` and not too old. What is damaged on disk counts as never kept."""
        kept = self._counts.get(client)
        if kept is None:
            return Held()
        try:
            arrays = self._mapped(kept)
        except (BadFrame, StorageError) as error:
            log.warning("client.state_lost", client=client, round=kept.round, reason=str(error))
            return Held()
        counts = kept.codec == codec and residual_counts(kept.round, at_round)
        return Held(client_state_of(_below(STATE, arrays)), _below(LEFT, arrays) if counts else {})

    def begin(self, at_round: int, codec: str, order: str = "") -> RoundStates:
        """States of the clients that ``order`` of ``at_round`` trains here."""
        return RoundStates(self, at_round, codec, order)

    def propose(self, at_round: int, drafted: Mapping[str, Kept]) -> None:
        """Let ``drafted`` count if they are counted in the round, beside what it drafted before: clients of
        a host that was lost come later. Drafts of another round go."""
        before = self._pending
        pending = {**before, **drafted} if self._pending_round == at_round else dict(drafted)
        self._write(PENDING, pending, at_round)
        self._pending_round, self._pending = at_round, pending
        self._remove(before.values())

    def settle(self, at_round: int, counted: Collection[str], order: str = "") -> bool:
        """The verdict on the round, or on one order of it: which clients were counted as this host trained
        them. False when no draft is of that round."""
        if self._pending_round != at_round:
            return False
        before, settled, others = self._counts, dict[str, Kept](), dict[str, Kept]()
        for client, kept in self._pending.items():
            (others if order and kept.order != order else settled)[client] = kept
        counting = {client: kept for client, kept in settled.items() if client in counted}
        if counting:
            self._count({**before, **counting})
        if others:
            self._write(PENDING, others, at_round)
        else:
            (self.folder / PENDING).unlink(missing_ok=True)
        self._pending_round, self._pending = at_round if others else -1, others
        self._remove([*settled.values(), *(before[client] for client in counting if client in before)])
        return True

    # ------------------------------------------------------------ moving

    def path(self, client: str) -> Path:
        """Return the file of ``client``, as it goes to another host. StorageError for one without."""
        if client not in self._counts:
            raise StorageError(f"no state of client {client!r} is stored here; it starts without any")
        return self.folder / self._counts[client].file

    def forget(self, clients: Collection[str]) -> None:
        """Drop the states of clients that another host has trained since."""
        gone = {client: self._counts[client] for client in clients if client in self._counts}
        if gone:
            self._count({client: kept for client, kept in self._counts.items() if client not in gone})
            self._remove(gone.values())

    def check_room(self, held: int, n_bytes: int) -> None:
        """Raise StorageError unless ``n_bytes`` may be kept beside ``held``."""
        if held + n_bytes > self.max_bytes:
            raise StorageError(
                f"clients' states take {held} bytes, another {n_bytes} would exceed the {self.max_bytes} "
                "that may be kept here: raise --kept, or share the population with another host"
            )

    # ------------------------------------------------------------ files

    def _mapped(self, kept: Kept) -> dict[str, Array]:
        arrays = self._cache.get(kept.file)
        if arrays is None:
            path = self.folder / kept.file
            arrays = self._cache[kept.file] = read_dense(path, dense_metas(path))
            self._cached += _nbytes(arrays)
        self._cache.move_to_end(kept.file)
        while self._cached > self.cached_bytes and len(self._cache) > 1:
            self._cached -= _nbytes(self._cache.popitem(last=False)[1])
        return arrays

    def _count(self, clients: dict[str, Kept]) -> None:
        self._write(COUNTS, clients)
        self._counts = clients

    def _remove(self, files: Collection[Kept]) -> None:
        """Remove those of ``files`` that neither count nor may: a list may name what counts since a crash."""
        named = {kept.file for kept in (*self._counts.values(), *self._pending.values())}
        for kept in files:
            if kept.file not in named:
                self._cached -= _nbytes(self._cache.pop(kept.file, {}))
                (self.folder / kept.file).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what a crash left: files of no list, and a list that was not finished."""
        named = {kept.file for kept in (*self._counts.values(), *self._pending.values())}
        for path in self.folder.iterdir():
            if path.name not in (COUNTS, PENDING) and path.name not in named:
                path.unlink(missing_ok=True)

    def _write(self, name: str, clients: Mapping[str, Kept], at_round: int = -1) -> None:
        """Replace a list atomically, and so that it survives a power cut."""
        listed = {"round": at_round, "clients": {c: asdict(k) for c, k in clients.items()}}
        write_private(self.folder / name, json.dumps(listed).encode())

    def _listed(self, name: str) -> tuple[int, dict[str, Kept]]:
        """A list of this folder; empty where it is missing or damaged."""
        try:
            found = json.loads((self.folder / name).read_text())
            kept = {str(client): Kept(**entry) for client, entry in found["clients"].items()}
            return int(found["round"]), kept
        except FileNotFoundError:
            return -1, {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("client.states_lost", list=name, reason=str(error))
            return -1, {}


class RoundStates:
    """What a round leaves behind, client by client; ``finish`` proposes it. Left without, it is deleted."""

    def __init__(self, store: PopulationStates, at_round: int, codec: str, order: str = "") -> None:
        self._store, self._round, self._codec, self._order = store, at_round, codec, order
        self._drafted: dict[str, Kept] = {}
        self._bytes = store.size
        self._done = False

    def put(self, client: str, state: ClientState, left: Arrays) -> None:
        """Write what ``client`` keeps; nothing for one that keeps nothing."""
        arrays = {STATE + name: array for name, array in slot_arrays(state.slots).items()}
        arrays |= {LEFT + name: array for name, array in left.items()}
        if not arrays:
            return
        self._store.check_room(self._bytes, _nbytes(arrays))
        name = _named(client, self._round)
        stored = write_dense(self._store.folder / name, arrays, durable=True)
        self._drafted[client] = Kept(self._round, name, stored.size, self._codec, self._order)
        self._bytes += stored.size

    @property
    def stateful(self) -> bool:
        """Return whether some client keeps a state."""
        return bool(self._drafted)

    def finish(self) -> None:
        """Propose all of them together."""
        self._store.propose(self._round, self._drafted)
        self._done = True

    def __enter__(self) -> RoundStates:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._done:
            for kept in self._drafted.values():
                (self._store.folder / kept.file).unlink(missing_ok=True)


def _named(client: str, at_round: int) -> str:
    return f"{sha256(client.encode()).hexdigest()[:16]}-{at_round}-{secrets.token_hex(4)}{SUFFIX}"


def _below(prefix: str, arrays: Arrays) -> dict[str, Array]:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def _nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
