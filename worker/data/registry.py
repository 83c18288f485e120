"""The data sets that this machine's owner registered: stored once, mapped into memory, never sent.

    STATE/data/NAME/manifest.json     fields, sizes, hashes, the schema as it was given
    STATE/data/NAME/FIELD.bin         the samples of one field, one after another, little-endian

``add_dataset`` reads the owner's files through a schema (``worker.data.schema``), checks every value and
writes what training reads, so that a run meets no surprise and needs no parser. What others learn of it
is ``DatasetFacts``: name, number of samples, dtypes and shapes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from atoll.errors import AtollError, StorageError, UsageError
from atoll.federated import DatasetFacts, FieldFacts, checked_name
from atoll.messages.from_worker import MAX_DATASETS
from hostos.files.locked_json import sound_object
from hostos.files.private_files import private_folder, write_private
from hostos.files.refusals import disk
from worker.config import make_state_dir
from worker.data.policy import UNSTATED, Policy, policy_from_json
from worker.data.schema import FieldSchema, parse_schema, sources_of
from worker.data.sources import AS_FOUND, Form, Piece, SafetensorsSource, Source, open_source
from worker.data.transforms import BadValue, settle

if TYPE_CHECKING:
    from worker.data.transforms import Array

FOLDER = "data"
MANIFEST = "manifest.json"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 20
KEPT_FREE_BYTES = 256 << 20  # of the disk, for the worker's own needs
READ_BYTES = 1 << 20

Progress = Callable[[int, int], None]  # bytes done, of all


@dataclass(frozen=True, slots=True)
class StoredField:
    """A field on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of one sample
    sha256: str  # of the file
    schema: str = ""  # the line it came from

    def bytes_of(self, n_samples: int) -> int:
        return n_samples * prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Dataset:
    """A registered data set's manifest."""

    name: str
    n_samples: int
    fields: tuple[StoredField, ...]
    path: str  # of what was registered
    format: str
    policy: Policy = UNSTATED

    @property
    def n_bytes(self) -> int:
        return sum(field.bytes_of(self.n_samples) for field in self.fields)

    @property
    def sha256(self) -> str:
        """Hash of names, types, sizes and every field's hash; it identifies this very data."""
        facts = [[f.name, f.dtype, list(f.shape), f.sha256] for f in self.fields]
        return sha256(json.dumps([self.n_samples, facts]).encode()).hexdigest()

    @property
    def facts(self) -> DatasetFacts:
        """Facts that leave this machine; nothing else does."""
        fields = tuple(FieldFacts(f.name, f.dtype, f.shape) for f in self.fields)
        return DatasetFacts(self.name, self.n_samples, fields)


def add_dataset(
    state_dir: Path,
    name: str,
    path: Path,
    schema: Sequence[str],
    form: Form = AS_FOUND,
    *,
    policy: Policy = UNSTATED,
    replace: bool = False,
    progress: Progress = lambda done, total: None,
) -> Dataset:
    """Read ``path`` through ``schema`` and keep it as ``name`` under ``policy``; an empty schema takes a
    safetensors file's tensors as they are.

    UsageError names the line, row or column that cannot be used; StorageError for a full disk. Nothing
    is left behind by a registration that fails.
    """
    checked_name("data set", name)
    target = state_dir / FOLDER / name
    if target.exists() and not replace:
        raise UsageError(f"data set {name!r} is registered already; give --replace or another name")
    if len(list_datasets(state_dir)) >= MAX_DATASETS:
        raise UsageError(f"{MAX_DATASETS} data sets are registered here already; remove one first")
    fields = parse_schema(schema) if schema else ()
    path = path.expanduser()
    source = open_source(path, form, sources_of(fields))
    if not fields:
        fields = _own_schema(source)
    scratch = target.with_name(f".{name}.{secrets.token_hex(4)}")
    make_state_dir(state_dir)
    private_folder(target.parent)
    try:
        scratch.mkdir(mode=0o700, parents=True)
        stored = _Writer(scratch, fields, name).write(source, progress)
        dataset = Dataset(name, stored[0], stored[1], str(path.resolve()), source.format, policy)
        (scratch / MANIFEST).write_text(_to_json(dataset))
        if target.exists():
            remove_dataset(state_dir, name)
        scratch.replace(target)
    except OSError as error:
        raise StorageError(f"cannot keep {name!r} in {target.parent}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return dataset


def list_datasets(state_dir: Path) -> tuple[Dataset, ...]:
    """Return every registered data set by name; without damaged ones (``load_dataset`` raises why)."""
    folder = state_dir / FOLDER
    found = []
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    for name in [n for n in names if not n.startswith(".")][:MAX_DATASETS]:
        try:
            found.append(load_dataset(state_dir, name))
        except AtollError:
            continue
    return tuple(found)


def known_facts(state_dir: Path) -> tuple[DatasetFacts, ...]:
    """Facts about the registered data sets that this machine reports to the coordinator."""
    return tuple(dataset.facts for dataset in list_datasets(state_dir))


def load_dataset(state_dir: Path, name: str) -> Dataset:
    """The manifest of ``name``, its files' sizes checked. UsageError where there is none, StorageError
    where it is damaged."""
    checked_name("data set", name)
    folder = state_dir / FOLDER / name
    manifest = folder / MANIFEST
    if not manifest.is_file():
        known = ", ".join(d.name for d in list_datasets(state_dir)) or "none"
        raise UsageError(f"no data set {name!r} is registered here ({known}); see `atoll-worker data add`")
    try:
        dataset = _from_json(sound_object(manifest, MAX_MANIFEST_BYTES), name)
        dataset.facts  # noqa: B018 - its bounds
        for field in dataset.fields:
            found, due = (folder / f"{field.name}.bin").stat().st_size, field.bytes_of(dataset.n_samples)
            if found != due:
                raise ValueError(f"{field.name}.bin has {found} bytes, not {due}")
    except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
        raise StorageError(
            f"data set {name!r} in {folder} is damaged ({error}); register it again with --replace"
        ) from None
    return dataset


def dataset_folder(state_dir: Path, name: str) -> Path:
    """The folder of a registered data set. Raises as ``load_dataset``."""
    load_dataset(state_dir, name)
    return state_dir / FOLDER / name


def open_dataset(state_dir: Path, name: str) -> dict[str, Array]:
    """Field -> array [n, ...sample], read-only and mapped: what is not touched is not read."""
    dataset = load_dataset(state_dir, name)
    folder = state_dir / FOLDER / name
    return {
        field.name: np.memmap(
            folder / f"{field.name}.bin",
            np.dtype(field.dtype).newbyteorder("<"),
            "r",
            shape=(dataset.n_samples, *field.shape),
        )
        for field in dataset.fields
    }


def set_policy(state_dir: Path, name: str, policy: Policy) -> Dataset:
    """Put another policy in force for ``name``. Raises as ``load_dataset``."""
    dataset = replace(load_dataset(state_dir, name), policy=policy)
    write_private(state_dir / FOLDER / name / MANIFEST, _to_json(dataset).encode())
    return dataset


def remove_dataset(state_dir: Path, name: str) -> None:
    """Forget ``name`` and delete its copy here; the owner's own files stay. UsageError for no such set."""
    checked_name("data set", name)
    folder = state_dir / FOLDER / name
    if not folder.is_dir():
        load_dataset(state_dir, name)
    with disk(f"remove {folder}"):
        gone = folder.with_name(f".{name}.{secrets.token_hex(4)}")
        folder.replace(gone)  # at once, whatever becomes of the deletion
        shutil.rmtree(gone)


def verify_dataset(state_dir: Path, name: str, progress: Progress = lambda done, total: None) -> Dataset:
    """``load_dataset`` with every file's hash checked."""
    dataset = load_dataset(state_dir, name)
    done = 0
    for field in dataset.fields:
        digest = sha256()
        with (state_dir / FOLDER / name / f"{field.name}.bin").open("rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
                done += len(data)
                progress(done, dataset.n_bytes)
        if digest.hexdigest() != field.sha256:
            raise StorageError(
                f"field {field.name!r} of data set {name!r} is not what was registered; "
                "register it again with --replace"
            )
    return dataset


class _Writer:
    """Pieces in, files out: transforms, checks, hashes."""

    def __init__(self, folder: Path, fields: Sequence[FieldSchema], name: str) -> None:
        self.folder, self.fields, self.name = folder, fields, name
        self.digests = {field.name: sha256() for field in fields}
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.n_samples = 0

    def write(self, source: Source, progress: Progress) -> tuple[int, tuple[StoredField, ...]]:
        files = {field.name: (self.folder / f"{field.name}.bin").open("xb") for field in self.fields}
        try:
            for piece in source.pieces(sources_of(self.fields)):
                self._piece(piece, files)
                progress(piece.done, max(source.total_bytes, piece.done))
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        finally:
            for file in files.values():
                file.close()
        if not self.n_samples:
            raise UsageError(f"data set {self.name!r} has no sample; the source offers {source.described}")
        stored = tuple(
            StoredField(f.name, *self.kinds[f.name], self.digests[f.name].hexdigest(), f.text)
            for f in self.fields
        )
        return self.n_samples, stored

    def _piece(self, piece: Piece, files: Mapping[str, IO[bytes]]) -> None:
        made = {field.name: _made(field, piece) for field in self.fields}
        counts = {name: len(array) for name, array in made.items()}
        if len(set(counts.values())) != 1:
            raise UsageError(f"the fields have unequal numbers of samples: {counts}")
        due = sum(array.nbytes for array in made.values())
        if shutil.disk_usage(self.folder).free < due + KEPT_FREE_BYTES:
            raise StorageError(
                f"the disk of {self.folder.parent} is full after {self.n_samples:,} samples; free some space "
                "or choose another --state-dir"
            )
        for name, array in made.items():
            kind = (array.dtype.name, tuple(array.shape[1:]))
            if self.kinds.setdefault(name, kind) != kind:
                raise UsageError(f"field {name!r} is {kind} here, but was {self.kinds[name]} before")
            data = array.tobytes()
            files[name].write(data)
            self.digests[name].update(data)
        self.n_samples += len(made[self.fields[0].name])


def _made(field: FieldSchema, piece: Piece) -> Array:
    """Return a field's samples of a piece, as declared."""
    array = piece.arrays[field.source]
    try:
        for step in field.transforms:
            array = step.apply(array)
        return settle(array, field.dtype, field.shape)
    except BadValue as error:
        row = error.at[0] if error.at else 0
        column = error.at[1] if len(error.at) > 1 else None
        raise UsageError(f"{piece.where(field.source, row, column)}: field {field.name!r}: {error}") from None
    except UsageError as error:
        raise UsageError(f"field {field.name!r}: {error}") from None


def _own_schema(source: Source) -> tuple[FieldSchema, ...]:
    if isinstance(source, SafetensorsSource):
        return parse_schema([f"{key}={key}" for key in source.keys])
    raise UsageError(f"a {source.format} source needs --schema, one a field; it offers {source.described}")


def _to_json(dataset: Dataset) -> str:
    facts = {**asdict(dataset), "policy": dataset.policy.as_json()}
    return json.dumps({"version": VERSION, **facts, "sha256": dataset.sha256}, indent=1) + "\n"


def _from_json(found: dict[str, Any], name: str) -> Dataset:
    """ValueError, KeyError or TypeError for what ``_to_json`` has not written."""
    if found["version"] != VERSION or found["name"] != name:
        raise ValueError(f"version {found['version']!r} of {found['name']!r}")
    fields = tuple(
        StoredField(
            str(f["name"]), str(f["dtype"]), tuple(map(int, f["shape"])), str(f["sha256"]), str(f["schema"])
        )
        for f in found["fields"]
    )
    policy = policy_from_json(found["policy"]) if "policy" in found else UNSTATED
    dataset = Dataset(name, int(found["n_samples"]), fields, str(found["path"]), str(found["format"]), policy)
    if found["sha256"] != dataset.sha256:
        raise ValueError("its manifest was changed")
    return dataset
