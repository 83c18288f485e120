"""Command of `atoll` that copies a coordinator's state, whether it runs or not: backup."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import StateDir
from coordinator.client.endpoint import default_state_dir
from hostos.command_line import AsJson, err, out, print_json


def register(app: typer.Typer) -> None:
    """Add this module's command to the `atoll` command."""
    app.command(epilog="Example: atoll backup /mnt/backup/atoll-$(date +%F)")(backup)


def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Destination folder, new or empty.")],
    state_dir: StateDir = None,
    blobs: Annotated[
        str, typer.Option(metavar="URL", help="Location of the blobs, as given to `atoll serve`.")
    ] = "",
    json: AsJson = False,
) -> None:
    """Copy the coordinator's state folder, while it runs or not, to one that `atoll serve --state-dir` starts
    from.

    The copy holds the authority's key and the owner's token: keep it as safe as the folder itself.
    """
    from coordinator.config import CoordinatorConfig
    from coordinator.services.backup import back_up

    config = CoordinatorConfig(state_dir=state_dir or default_state_dir(), blobs_url=blobs)
    saved = back_up(config, folder)
    if json:
        print_json({**dataclasses.asdict(saved), "folder": str(saved.folder)})
        return
    copied = f"{saved.blobs} blobs, {saved.blob_bytes} bytes"
    where = f"blobs stay in {saved.bucket}" if saved.bucket else copied
    journal = f"journal up to record {saved.records} of term {saved.term}"
    out.print(f"{saved.folder}: {saved.jobs} jobs, {where}, {journal}")
    if saved.missing:
        err.print(
            f"{saved.missing} blobs that the journal names are missing or damaged; `atoll checkpoints verify "
            "JOB` shows which checkpoints are torn"
        )
