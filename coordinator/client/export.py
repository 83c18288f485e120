"""A trained job's weights as one safetensors file under the module's own names."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load, save_file

from atoll.errors import StorageError
from strategies.files import WEIGHTS

if TYPE_CHECKING:
    import torch

VALUE = "value"  # the tensor itself; a checkpoint's blob holds optimizer state beside it


def assemble(
    blobs: Iterable[tuple[str, bytes]],
    names: Mapping[str, str],
    aliases: Mapping[str, str],
    model: str = "",
) -> dict[str, torch.Tensor]:
    """Tensors by state-dict name: every name of ``names`` (name -> blob hash) and every alias.

    ``model``: hash of a federated job's model, one file of ``weights/NAME`` that goes over the others.

    An alias gets a copy of its own, as safetensors holds no shared memory. StorageError when a
    blob is no tensor or a name has none.
    """
    owners: dict[str, list[str]] = {}
    for name, blob in names.items():
        owners.setdefault(blob, []).append(name)
    found: dict[str, torch.Tensor] = {}
    newest: dict[str, torch.Tensor] = {}
    for blob, data in blobs:
        if blob == model:
            newest = _weights(data)
        for name in owners.get(blob, []):
            found[name] = _value(data, name)
    found |= {name: tensor for name, tensor in newest.items() if name in names}
    for alias, name in aliases.items():
        if name in found:
            found[alias] = found[name].clone()
    missing = sorted(({*names} | {*aliases}) - {*found})
    if missing:
        raise StorageError(f"{len(missing)} tensors of the checkpoint are missing, the first is {missing[0]}")
    return found


def unwrapped(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with ``prefix``, without it: those of the owner's own module."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, object]) -> None:
    """Write ``tensors`` to ``path``; it appears whole or not at all.

    ``facts`` go into the file's metadata as text. StorageError when the disk refuses.
    """
    path = path.expanduser()
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    metadata = {"format": "pt", "atoll": json.dumps(dict(facts), sort_keys=True)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, scratch, metadata)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            scratch.unlink()
        raise StorageError(f"cannot write {path}: {error}; free some space or give another -o") from None


def _weights(data: bytes) -> dict[str, torch.Tensor]:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise StorageError(f"the model's blob is no safetensors file: {error}") from None
    return {name.removeprefix(WEIGHTS): t for name, t in tensors.items() if name.startswith(WEIGHTS)}


def _value(data: bytes, name: str) -> torch.Tensor:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise StorageError(
            f"the blob of {name} is no safetensors file: {error}; submit the job again"
        ) from None
    if VALUE not in tensors:
        raise StorageError(f"the blob of {name} holds no {VALUE!r}; submit the job again")
    return tensors[VALUE]
