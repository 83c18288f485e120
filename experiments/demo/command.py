"""`atoll demo`: Atoll seen at work on this machine alone."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hostos.command_line import AsJson, err, out, print_json
from hostos.files.refusals import disk

EXAMPLES = (
    "Examples: atoll demo; atoll demo --keep shown   (then read shown/job.py, a job file to start from)"
)


def register(app: typer.Typer) -> None:
    """Add `atoll demo`."""
    app.command(epilog=EXAMPLES)(demo)


def demo(
    steps: Annotated[int, typer.Option(min=60, help="Number of training steps.")] = 120,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep job file, logs, state and weights in this folder; default: they are deleted.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Train a small model on two workers on this machine, export it, and check it against the plain module.

    It downloads nothing and uses only this machine's loopback. It takes about 15 seconds on two cores.
    """
    from coordinator.cli.processes import ended_by_signals
    from experiments.demo.run import play
    from experiments.demo.scene import next_steps, small_scene, summary
    from experiments.demo.shown import Shown

    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-demo-")))
        with disk(f"write {folder}", "give another --keep"):
            folder.mkdir(parents=True, exist_ok=True)
            scene = small_scene(folder.resolve(), steps)
        shown = stack.enter_context(Shown(err if json else out))
        outcome = play(scene, folder.resolve(), shown)
    if json:
        print_json(asdict(outcome) | {"took_s": shown.took_s})
        return
    out.print(f"shown:\n{summary(outcome, scene, shown.took_s)}", markup=False, soft_wrap=True)
    out.print(next_steps(str(keep / "job.py") if keep else "my-job/job.py"), markup=False, soft_wrap=True)
