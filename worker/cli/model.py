"""`atoll-worker model`: keep a checkpoint's weights on this machine, so that no job has to send them here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hostos.command_line import AsJson, byte_progress, err, out, print_json
from hostos.units import shown_size
from worker.cli.options import StateDir
from worker.config import default_state_dir

if TYPE_CHECKING:
    from worker.data.weights import Weights

model = typer.Typer(
    name="model",
    help="Keep weights on this machine: jobs that begin with them find them here; no owner sends them.",
    no_args_is_help=True,
)


@model.command(
    epilog="Examples: atoll-worker model add ~/models/Qwen2.5-1.5B; "
    "atoll-worker model add model.safetensors --name base. Stopped, the same command goes on."
)
def add(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A Hugging Face folder, or any folder or file of safetensors."),
    ],
    name: Annotated[str, typer.Option(help="Name in `model list`; default: that of the folder.")] = "",
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Copy a checkpoint's tensors to this worker's disk, where they stay until you remove them.

    A running worker reports the SHA-256 of each tensor to its coordinator at once. An owner who may submit
    jobs and knows the hash of a tensor can obtain its values: add only weights that are public, or known to
    all owners.
    """
    from worker.cli.running import signal_consent_changed
    from worker.data.weights import add_weights

    where = state_dir or default_state_dir()
    changed = partial(signal_consent_changed, where)
    with byte_progress(f"adding {folder.name}", quiet=json) as done:
        added = add_weights(where, folder, name, changed, done)
    told = changed()
    if json:
        print_json(_as_json(added))
        return 0
    out.print(f"{added.name}: {len(added.blobs):,} tensors, {shown_size(added.n_bytes)}", soft_wrap=True)
    if not told:
        err.print("No worker runs now: the next one tells its coordinator.", style="dim")
    return 0


@model.command("list", epilog="Example: atoll-worker model list --json")
def list_command(state_dir: StateDir = None, json: AsJson = False) -> int:
    """List the weights that are stored on this machine."""
    from worker.data.weights import list_weights

    found = list_weights(state_dir or default_state_dir())
    if json:
        print_json([_as_json(each) for each in found])
        return 0
    if not found:
        out.print("no weights are kept here; see `atoll-worker model add --help`")
        return 0
    table = Table("name", "tensors", "size", "from", "", box=None, pad_edge=False)
    for each in found:
        state = "" if each.whole else "not whole: add it again, or remove it"
        table.add_row(each.name, f"{len(each.blobs):,}", shown_size(each.n_bytes), each.folder, state)
    out.print(table)
    return 0


@model.command(epilog="Example: atoll-worker model remove Qwen2.5-1.5B")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name in `model list`.")],
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Delete the worker's copy of weights, except tensors that other weights share; your own folder stays."""
    from worker.cli.running import signal_consent_changed
    from worker.data.weights import remove_weights

    where = state_dir or default_state_dir()
    freed = remove_weights(where, name)
    signal_consent_changed(where)
    if json:
        print_json({"name": name, "freed_bytes": freed})
    else:
        out.print(f"{name} is no longer kept here; {shown_size(freed)} were freed", soft_wrap=True)
    return 0


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll-worker` command."""
    app.add_typer(model)


def _as_json(weights: Weights) -> dict[str, Any]:
    return {
        "name": weights.name,
        "folder": weights.folder,
        "tensors": len(weights.blobs),
        "bytes": weights.n_bytes,
        "whole": weights.whole,
    }
