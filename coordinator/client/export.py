"""A trained job's weights: one safetensors file under the module's own names, or a folder that transformers
or peft reads, written by the owner's own module.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file

from atoll.errors import StorageError, UsageError
from coordinator.client.weights import MAX_NAMED
from strategies.files import WEIGHTS
from strategies.quantised_module import is_quantised

if TYPE_CHECKING:
    import torch

ADAPTED = "peft_config"
"""An attribute that peft's models have, and transformers' only with an adapter."""
FACTOR = ".lora_"
"""In the names of a layer's factors."""
MERGE = "merge_and_unload"
PRIVACY_FILE = "PRIVACY.txt"


class Format(StrEnum):
    """Formats of exported weights."""

    SAFETENSORS = "safetensors"  # one file, the module's own names
    HF = "hf"  # a folder for from_pretrained: the whole model, adapters merged into it
    PEFT = "peft"  # a folder with the adapter alone


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
    blob is not a tensor or a name has none.
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


def check_target(path: Path) -> None:
    """Make the folder of a file that is written once there is something to write. UsageError for a folder in
    the file's place, StorageError where nothing can be written."""
    target = path.expanduser()
    if target.is_dir():
        raise UsageError(f"{path} is a folder; give a file, such as -o {path / 'model.safetensors'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give another -o") from None


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


def needed(module: torch.nn.Module, form: Format) -> frozenset[str] | None:
    """Return the names of the tensors that a folder of this format is made of, None for all.

    An adapter's are its factors, which a server may change where clients do not train them, and whatever else
    is trained.
    """
    if form is not Format.PEFT:
        return None
    named = module.named_parameters()
    return frozenset(name for name, held in named if held.requires_grad or FACTOR in name)


def fill(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], wanted: Collection[str] | None
) -> None:
    """Give the module a job's tensors; UsageError where they are not its own, by name and shape.

    ``wanted``: the names that suffice, all where it is None. Whatever is not given stays as it is.
    """
    own = dict(module.state_dict(keep_vars=True))
    expected = own.keys() if wanted is None else wanted
    odd = [
        *(f"{name!r} is missing" for name in sorted(set(expected) - tensors.keys())),
        *(f"{name!r} is not in the module" for name in sorted(tensors.keys() - own.keys())),
        *(
            f"{name!r} has shape {tuple(tensor.shape)}, the module's {tuple(own[name].shape)}"
            for name, tensor in sorted(tensors.items())
            if name in own and own[name].shape != tensor.shape
        ),
    ]
    if odd:
        more = f" and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
        raise UsageError(
            f"the module is not the one that was trained: {'; '.join(odd[:MAX_NAMED])}{more}; give the job "
            "file that was submitted, with the same --set"
        )
    for name, tensor in tensors.items():
        own[name].data.copy_(tensor)


def check_adapter(tensors: Mapping[str, torch.Tensor]) -> None:
    """UsageError where every B is 0, as FLoRA leaves it: what was trained is in the layers."""
    factors = [tensor for name, tensor in tensors.items() if f"{FACTOR}B." in name]
    if factors and not any(tensor.any() for tensor in factors):
        raise UsageError(
            "--format peft: every B is 0, so the adapter changes nothing; what flora trained is folded into "
            "the layers: give --format hf"
        )


def write_folder(path: Path, module: torch.nn.Module, form: Format, privacy: str = "") -> None:
    """Have the module write itself to a new folder, which appears whole or not at all.

    The functions are transformers' and peft's own: ``save_pretrained``, of an adapted model that is to be one
    again after ``merge_and_unload``. UsageError for a module that has no such function, and for a folder that
    is there; StorageError when the disk refuses. ``privacy``: a sentence for the file of that name.
    """
    path = path.expanduser()
    saved = _savable(module, form)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} already exists; give -o a folder that does not")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        saved.save_pretrained(str(scratch))
        if privacy:
            (scratch / PRIVACY_FILE).write_text(f"{privacy}\n")
        scratch.replace(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {error}; free some space or give another -o") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _savable(module: torch.nn.Module, form: Format) -> Any:
    """Return the outermost module that can write itself, as a model or as an adapter."""
    found = next((inner for inner in module.modules() if hasattr(inner, "save_pretrained")), None)
    if found is None:
        raise UsageError(
            f"--format {form}: nothing in {type(module).__name__} has save_pretrained, as models of "
            "transformers have; leave --format out for one safetensors file"
        )
    _check_whole(module, found, form)
    if form is Format.HF and is_quantised(found):
        raise UsageError(
            f"--format hf: the base of {type(found).__name__} is stored by quantise_frozen or salr in parts "
            "that from_pretrained does not read; give --format peft and load the adapter on the whole base"
        )
    adapted = hasattr(found, ADAPTED) and hasattr(found, MERGE)
    if form is Format.PEFT and not adapted:
        raise UsageError(f"--format peft: {type(found).__name__} has no adapter of peft; give --format hf")
    return getattr(found, MERGE)() if adapted and form is Format.HF else found


def _check_whole(module: torch.nn.Module, saved: torch.nn.Module, form: Format) -> None:
    """UsageError where parameters of the module would not be in the folder."""
    inside = {id(parameter) for parameter in saved.parameters()}
    outside = [
        name
        for name, parameter in module.named_parameters()
        if id(parameter) not in inside and (form is Format.HF or parameter.requires_grad)
    ]
    if outside:
        raise UsageError(
            f"--format {form}: {type(saved).__name__} would write itself without {len(outside)} parameters "
            f"of {type(module).__name__}, the first is {outside[0]!r}; leave --format out for one file of all"
        )


def _weights(data: bytes) -> dict[str, torch.Tensor]:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise StorageError(f"the model's blob is not a safetensors file: {error}") from None
    return {name.removeprefix(WEIGHTS): t for name, t in tensors.items() if name.startswith(WEIGHTS)}


def _value(data: bytes, name: str) -> torch.Tensor:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise StorageError(
            f"the blob of {name} is not a safetensors file: {error}; submit the job again"
        ) from None
    if VALUE not in tensors:
        raise StorageError(f"the blob of {name} holds no {VALUE!r}; submit the job again")
    return tensors[VALUE]
