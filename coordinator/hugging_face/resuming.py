"""The job that a Trainer's script goes on with: the last one of its output folder, or one by name.

A job goes on by itself whatever happens to the script that submitted it. So to resume is to follow it. Where
it has ended too early, a new job goes on from its newest checkpoint with the optimizer's state.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from coordinator.client.client import ENDED, FINISHED
from protos.convert import content_hash, encode

if TYPE_CHECKING:
    from atoll.job import Job
    from coordinator.client.client import Client

NOTE = "atoll-job"
"""File in the output folder: its last job, and the SHA-256 of how that trains but for the number of steps."""


def note(folder: Path, job: str, made: Job) -> None:
    """Keep the name of a job that was submitted for this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NOTE).write_text(f"{job}\n{_settings(made)}\n")


def resumed(client: Client, asked: object, folder: Path, made: Job) -> str:
    """Return the job to follow; ``asked``: True, or a job's name.

    UsageError where there is none, it has no checkpoint to go on from, or it trains with other settings.
    """
    name, settings = _noted(folder) if asked is True else (str(asked), _settings(made))
    if (Path(name) / "trainer_state.json").exists():
        raise UsageError(
            f"resume_from_checkpoint = {name!r} is a checkpoint of steps on this machine; give that folder "
            "as the model to begin from its weights, or the name of a job to go on with that"
        )
    found = {update.job: update for update in client.status().jobs}.get(name)
    if found is None:
        raise UsageError(f"resume_from_checkpoint: there is no job {name!r}; see `atoll status`")
    odd = [] if found.name == made.name else [f"its name is {found.name!r}, not {made.name!r}"]
    odd += [] if settings == _settings(made) else ["it trains with other arguments"]
    if odd:
        raise UsageError(
            f"resume_from_checkpoint: {name} is another job: {'; '.join(odd)}; leave it out to start over"
        )
    steps = made.training.steps
    if found.state not in ENDED or (found.state == FINISHED and found.steps >= steps):
        return name
    kept = client.checkpoints(name)
    if not kept:
        raise UsageError(
            f"resume_from_checkpoint: {name} {found.state} before its first checkpoint; leave it out to "
            "start over"
        )
    return client.restore(name, kept[-1].step, steps).job


def _noted(folder: Path) -> tuple[str, str]:
    try:
        name, settings = (folder / NOTE).read_text().split()
    except (OSError, ValueError):
        raise UsageError(
            f"resume_from_checkpoint: no job was submitted for {folder} yet; leave it out, or name a job"
        ) from None
    return name, settings


def _settings(made: Job) -> str:
    return content_hash(encode(replace(made.training, steps=1)))
