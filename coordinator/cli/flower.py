"""`atoll flower`: run an unmodified Flower app on this coordinator and its workers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import AtollError, UsageError
from coordinator.cli.options import Common
from coordinator.flower.launcher import AppCommand, Wish
from coordinator.flower.progress import Shown
from protos.app_bundle import IGNORED, Bundle, ignore_results, make_bundle, with_overrides
from protos.command_line import err, print_json, with_groups

if TYPE_CHECKING:
    from coordinator.client.endpoint import Endpoint

MAX_WAIT_S = 30 * 86400.0
flower = typer.Typer(
    help="Flower apps, unmodified, on this coordinator and its workers.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add this module's command to the `atoll` command."""
    app.add_typer(flower, name="flower")


@flower.command(epilog="Example: atoll flower run examples/flower_digits --nodes 2 --run-config 'lr=0.1'")
@with_groups
def run(
    folder: Annotated[
        Path, typer.Argument(metavar="APP_DIR", help="The folder with the app's pyproject.toml.")
    ],
    nodes: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of nodes; default: all that accepted the app.")
    ] = 0,
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V", help="Override [tool.flwr.app.config], as in 'lr=0.1 name=\"a\"', or a .toml file."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0.0, max=MAX_WAIT_S, metavar="S", help="Seconds to wait for missing workers."),
    ] = 0.0,
    log: Annotated[bool, typer.Option("--log", help="Show Flower's own log lines too.")] = False,
    *,
    common: Common,
) -> int:
    """Run a Flower app: its ServerApp here, its ClientApp on workers whose owners accepted it.

    With --json every event is one JSON object per line on standard output, and the app's own output
    goes to standard error.
    """
    if importlib.util.find_spec("flwr") is None:
        raise UsageError("flwr is not installed here; `pip install 'atoll[flower]'`")
    bundle = make_bundle(folder)
    config = with_overrides(bundle.spec.config, run_config or [])
    wish = Wish(folder, bundle, config, nodes, wait, log)
    if not common.json:
        spec = bundle.spec
        err.print(
            f"{spec.name} {spec.version}, {bundle.files} files, {len(bundle.data)} bytes, hash {bundle.hash}",
            soft_wrap=True,
        )
    with common.client() as client:
        endpoint = client.endpoint
    try:
        _follow(endpoint, wish, json=common.json)
    finally:
        _set_aside(folder, bundle)
    return 0


def _set_aside(folder: Path, bundle: Bundle) -> None:
    """What the run left in the app's folder is not the app: its hash, which people accepted, stays."""
    try:
        found = ignore_results(folder, bundle)
    except (OSError, AtollError) as error:
        err.print(f"{folder}: what the run wrote there counts as the app's: {error}", soft_wrap=True)
        return
    if found:
        named = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        err.print(f"{named} in {folder}: results, no part of the app (named in {IGNORED})", soft_wrap=True)


def _follow(endpoint: Endpoint, wish: Wish, *, json: bool) -> None:
    shown = Shown()
    with AppCommand(endpoint, wish, sys.stderr if json else None) as command:
        for event in command.events():
            if json:
                print_json(event)
                continue
            for line in shown.take(event):
                err.print(line, soft_wrap=True)
    if not json:
        err.print(shown.summary())
