"""A registered data set that belongs to many clients: who has which of its samples.

    STATE/data/NAME/clients.json    the clients' names and sizes, how they were drawn, a hash of all of it
    STATE/data/NAME/clients.bin     their sample numbers, client after client, int64, little-endian

Beside the samples, which stay as they were registered. Registering the data set anew removes both, and so
does ``part_dataset`` with one client, the data set's owner under a name of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import StorageError, UsageError
from atoll.federated import checked_name
from atoll.messages.from_worker import MAX_CLIENTS
from hostos.files.locked_json import sound_object
from hostos.files.private_files import write_private
from hostos.files.refusals import disk
from strategies.partition_data import parts_of
from worker.data.registry import dataset_folder, load_dataset, open_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from worker.data.transforms import Array

LIST, ROWS = "clients.json", "clients.bin"
VERSION = 1
MAX_LIST_BYTES = 16 << 20
NATURAL = "natural"


@dataclass(frozen=True)
class Population:
    """Clients of a data set. ``sha256`` identifies all their data: of equal hashes, equal clients."""

    clients: dict[str, int]  # samples by name, in the order of ``rows``
    rows: Array  # sample numbers, client after client
    how: str
    sha256: str

    def rows_of(self) -> dict[str, Array]:
        """Sample numbers by client: views."""
        ends = np.cumsum(list(self.clients.values()))
        return {
            name: self.rows[end - size : end]
            for (name, size), end in zip(self.clients.items(), ends, strict=True)
        }


def part_dataset(
    state_dir: Path, name: str, how: str, clients: int = 0, seed: int = 0, field: str = ""
) -> Population:
    """Part a registered data set among ``clients``, as ``strategies.partition_data`` draws it by ``seed``.

    ``field``: whose values are labels, for splits by label, or clients, for natural ones; whole numbers.
    The only one that fits where none is given.
    Clients without a sample are left out. UsageError for a split that does not work out.
    """
    dataset, arrays = load_dataset(state_dir, name), open_dataset(state_dir, name)
    if how.startswith(("noise", "documents")):
        raise UsageError(f"--how {how[:40]} changes or needs files; part a population by its samples' labels")
    values = np.zeros(dataset.n_samples, np.int64)
    if how != "iid" and not how.startswith("quantity"):
        fitting = [n for n, a in arrays.items() if a.ndim == 1 and a.dtype.kind in "iu"]
        field = fitting[0] if not field and len(fitting) == 1 else field
        if field not in fitting:
            raise UsageError(
                f"--how {how[:40]} needs --by FIELD, a whole number a sample; {name} has {fitting or 'none'}"
            )
        values = np.asarray(arrays[field])
    if how == NATURAL and not clients:
        owners, where = np.unique(values, return_inverse=True)
        parts = [np.flatnonzero(where == at) for at in range(len(owners))]
        names = [f"client-{owner}" for owner in owners.tolist()]
    else:
        parts = parts_of(how, values, values.tolist() if how == NATURAL else (), clients, seed, least=0)
        names = [f"client-{at:0{max(2, len(str(len(parts) - 1)))}d}" for at in range(len(parts))]
    kept = [(who, part) for who, part in zip(names, parts, strict=True) if len(part)]
    said = f"{how}, seed {seed}" + (f", by {field}" if field else "")
    return _write(state_dir, name, [who for who, _ in kept], [part for _, part in kept], said)


def name_owner(state_dir: Path, name: str, client: str) -> Population:
    """Let a data set's owner take part under a name of its own, as the only client of a population."""
    every = np.arange(load_dataset(state_dir, name).n_samples)
    return _write(state_dir, name, [client], [every], "one owner")


def load_population(state_dir: Path, name: str) -> Population | None:
    """Return the clients of a registered data set, None for one of a single owner. StorageError where the
    list is damaged."""
    folder = dataset_folder(state_dir, name)
    if not (folder / LIST).is_file():
        return None
    try:
        found = sound_object(folder / LIST, MAX_LIST_BYTES)
        clients = {checked_name("client", who): int(size) for who, size in found["clients"].items()}
        total = sum(clients.values())
        if found["version"] != VERSION or (folder / ROWS).stat().st_size != 8 * total:
            raise ValueError(f"version {found['version']!r}, {total} samples")
        rows = np.memmap(folder / ROWS, np.dtype("<i8"), "r", shape=(total,))
        return Population(clients, rows, str(found["how"]), str(found["sha256"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise StorageError(
            f"the clients of data set {name!r} in {folder} are damaged ({error}); part it again"
        ) from None


def _write(
    state_dir: Path, name: str, clients: Sequence[str], parts: Sequence[Array], how: str
) -> Population:
    if not 1 <= len(clients) <= MAX_CLIENTS:
        raise UsageError(f"a population of {len(clients)} clients; 1 to {MAX_CLIENTS}")
    folder = dataset_folder(state_dir, name)
    sizes = {checked_name("client", who): len(part) for who, part in zip(clients, parts, strict=True)}
    data = np.concatenate(parts).astype("<i8").tobytes()
    facts = json.dumps([load_dataset(state_dir, name).sha256, list(sizes.items())]).encode()
    listed = {
        "version": VERSION,
        "how": how,
        "sha256": sha256(facts + data).hexdigest(),
        "clients": sizes,
    }
    with disk(f"write {folder}", "free some space"):
        (folder / LIST).unlink(missing_ok=True)  # it names the rows that are written now
        write_private(folder / ROWS, data)
        write_private(folder / LIST, json.dumps(listed).encode())
    found = load_population(state_dir, name)
    assert found is not None  # noqa: S101 - just written
    return found
