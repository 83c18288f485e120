"""`atoll checkpoints`: the stored states of a job, looked at and gone back to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from typer.core import TyperGroup

from atoll.errors import StorageError
from coordinator.cli.options import Common
from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import in_bytes
from hostos.command_line import err, out, print_json, show, shown_time, with_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click

    from protos import atoll_control_pb2 as pb

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name or id, as `atoll status` shows it.")]


class _ListsByDefault(TyperGroup):
    """`checkpoints JOB` is `checkpoints list JOB`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


checkpoints = typer.Typer(
    name="checkpoints",
    cls=_ListsByDefault,
    no_args_is_help=True,
    help="List, verify and restore a job's checkpoints; `atoll checkpoints JOB` lists them.",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.add_typer(checkpoints)


@checkpoints.command("list", epilog="Example: atoll checkpoints list j-1   (or: atoll checkpoints j-1)")
@with_groups
def list_(job: JobName, common: Common) -> None:
    """List a job's checkpoints, oldest first: step, time, bytes, and whether each can be loaded."""
    with common.client() as client:
        _show(job, client.checkpoints(job), common.json)


@checkpoints.command(epilog="Example: atoll checkpoints verify j-1 --step 400")
@with_groups
def verify(
    job: JobName,
    step: Annotated[int | None, typer.Option(min=0, help="Only this checkpoint; default: all.")] = None,
    *,
    common: Common,
) -> None:
    """Read checkpoints completely and verify hashes and headers. Exit code 9 if one is damaged."""
    with common.client() as client:
        found = client.checkpoints(job, verify=True, step=step)
    _show(job, found, common.json)
    torn = [c for c in found if c.torn]
    if torn:
        whole = [c.step for c in found if not c.torn]
        how = f"`atoll checkpoints restore {job} --step {whole[-1]}`" if whole else "submit the job again"
        raise StorageError(f"{len(torn)} of {len(found)} checkpoints of {job} are torn; {how}")


@checkpoints.command(epilog="Example: atoll checkpoints restore j-1 --step 400 --steps 2000")
@with_groups
def restore(
    job: JobName,
    step: Annotated[
        int, typer.Option(min=0, help="Checkpoint to continue from, as listed by `atoll checkpoints`.")
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Total number of steps, including those before the checkpoint; default: as in the old job.",
        ),
    ] = None,
    *,
    common: Common,
) -> None:
    """Start a new job from a checkpoint on the workers that are now available; the old job stays as it is."""
    with common.client() as client:
        reply = client.restore(job, step, steps)
    if common.json:
        print_json({"job": reply.job, "state": reply.update.state, "reason": reply.update.reason})
        return
    out.print(f"{reply.job} {reply.update.state}, from step {step} of {job}")
    err.print(f"watch it with `atoll watch {reply.job}`")


def _show(job: str, found: Sequence[pb.Checkpoint], json: bool) -> None:
    if json:
        print_json(
            [
                {"step": c.step, "at_s": c.at_s or None, "bytes": c.bytes, "tensors": c.tensors}
                | {"whole": not c.torn, "torn": c.torn, "best": c.best}
                for c in found
            ]
        )
        return
    if not found:
        out.print(f"{job} has stored no checkpoint yet; --set checkpoint_every=N at submit says how often")
        return
    table = FactTable("step", "when", "size", "tensors", "state")
    for c in found:
        state = (
            Text(f"torn: {c.torn}", style="red") if c.torn else Text("whole, the best" if c.best else "whole")
        )
        table.add_row(str(c.step), shown_time(c.at_s, "unknown"), in_bytes(c.bytes), str(c.tensors), state)
    show(table)
