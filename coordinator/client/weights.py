"""Weights of a job's module from a folder of safetensors: mapped from its files, read where they are used.

The module may be on the meta device, so that a model is planned, captured and sent which no one process could
build. A checkpoint's names are the module's own, with or without the prefix that transformers gives a model
with a head, or under the adapters of peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from atoll.errors import UsageError
from protos.tensor_files import checkpoint_files

if TYPE_CHECKING:
    from atoll.job import Job

MAX_NAMED = 4  # tensors in one message
ADAPTED = "base_model.model."  # of peft, before a name; ...
BASE = ".base_layer."  # ... and within that of a layer with an adapter


def with_weights(job: Job) -> str:
    """Give the job's module the tensors of its ``weights`` folder; returns in words which, "" without one.

    Whatever the folder lacks stays as it is. Raises UsageError for a folder that cannot be read, for a tensor
    of another shape or dtype than the module's, and for one on the meta device that is not there.
    """
    if job.weights is None:
        return ""
    folder = Path(job.weights).expanduser()
    found = _mapped(folder)
    prefix = str(getattr(job.module, "base_model_prefix", ""))
    taken, lacking = 0, []
    for name, tensors in _by_tensor(job.module).items():
        spellings = [spelling for own in (name, *tensors[1]) for spelling in _spellings(own, prefix)]
        given = next((found[spelling] for spelling in spellings if spelling in found), None)
        if given is None:
            lacking.append((name, tensors[0]))
            continue
        _check(name, tensors[0], given, folder)
        _put(job.module, (name, *tensors[1]), tensors[0], given)
        taken += 1
    blank = [name for name, tensor in lacking if tensor.is_meta]
    if blank or not taken:
        what = f"{_named(blank)} of the module, on the meta device" if blank else "any tensor of the module"
        raise UsageError(
            f"weights = {str(folder)!r} does not hold {what}; build with values what no checkpoint has, or "
            f"name the folder of this model: it holds {_named(sorted(found))}"
        )
    kept = f"; kept as they are: {_named([name for name, _ in lacking])}" if lacking else ""
    return f"{taken} tensors of the module are those of {folder}{kept}"


def _mapped(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, by name, mapped from its file."""
    found: dict[str, Tensor] = {}
    try:
        with ExitStack() as stack:
            for path in checkpoint_files(folder):
                file = stack.enter_context(safe_open(path, framework="pt"))
                found.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"weights = {str(folder)!r} cannot be read: {error}") from None
    return found


def _by_tensor(module: nn.Module) -> dict[str, tuple[Tensor, list[str]]]:
    """First name of every parameter and buffer -> it, and its other names."""
    first: dict[int, str] = {}
    found: dict[str, tuple[Tensor, list[str]]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if (known := first.setdefault(id(tensor), name)) == name:
            found[name] = (tensor, [])
        else:
            found[known][1].append(name)
    return found


def _spellings(name: str, prefix: str) -> Iterator[str]:
    plain = name.removeprefix(ADAPTED).replace(BASE, ".")
    for own in dict.fromkeys((name, plain)):
        yield own
        if prefix:
            yield own.removeprefix(f"{prefix}.")
            yield f"{prefix}.{own}"


def _check(name: str, own: Tensor, given: Tensor, folder: Path) -> None:
    if (own.shape, own.dtype) != (given.shape, given.dtype):
        raise UsageError(
            f"{name!r} of the module has shape {tuple(own.shape)} and type {own.dtype}, that in {folder} "
            f"{tuple(given.shape)} and {given.dtype}; build the module in the checkpoint's sizes and type"
        )


def _put(module: nn.Module, names: tuple[str, ...], own: Tensor, given: Tensor) -> None:
    value = nn.Parameter(given, own.requires_grad) if isinstance(own, nn.Parameter) else given
    for name in names:
        parent, _, key = name.rpartition(".")
        setattr(module.get_submodule(parent), key, value)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(map(repr, names[:MAX_NAMED])) + more
