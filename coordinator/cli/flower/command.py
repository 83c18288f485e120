"""`atoll flower`: run an unmodified Flower app on this coordinator and its workers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from atoll.errors import UsageError
from coordinator.cli.flower import runs as flower_runs
from coordinator.cli.flower.follow import local_nodes, run_app
from coordinator.cli.flower.runs import Detach
from coordinator.cli.options import Common, StateDir
from coordinator.flower.launcher import Wish
from hostos.command_line import AsJson, err, out, with_groups
from hostos.packages.fetching import checked_source
from hostos.packages.wheels import table_of
from protos import app_signing
from protos.app_bundle import make_bundle, parse_pairs, with_overrides

MAX_WAIT_S = 30 * 86400.0
SIMULATED = 10  # nodes, as Flower's default simulation has
flower = typer.Typer(
    help="Flower apps, unmodified, on this coordinator and its workers.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add this module's command to the `atoll` command."""
    flower_runs.register(flower)
    app.add_typer(flower, name="flower")


AppDir = Annotated[Path, typer.Argument(metavar="APP_DIR", help="The folder with the app's pyproject.toml.")]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(
        metavar="K=V", help="Override [tool.flwr.app.config], as in 'lr=0.1 name=\"a\"', or a .toml file."
    ),
]
FederationConfig = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Same as for `flwr run`: 'num-supernodes=10' means --nodes 10."),
]
Packages = Annotated[
    str,
    typer.Option(
        metavar="SOURCE",
        help="Install packages that the app brings for its ServerApp, from a folder of wheels (/srv/wheels) "
        "or an index (https://HOST/simple).",
    ),
]
ShowLog = Annotated[bool, typer.Option("--log", help="Show Flower's own log lines too.")]


@flower.command(epilog="Example: atoll flower run examples/flower_digits --nodes 2 --run-config 'lr=0.1'")
@with_groups
def run(
    folder: AppDir,
    nodes: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of nodes; default: all that accepted the app.")
    ] = 0,
    run_config: RunConfig = None,
    federation_config: FederationConfig = None,
    wait: Annotated[
        float,
        typer.Option(min=0.0, max=MAX_WAIT_S, metavar="S", help="Seconds to wait for missing workers."),
    ] = 0.0,
    sign: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sign the app with this key (`atoll flower key`).")
    ] = None,
    packages: Packages = "",
    log: ShowLog = False,
    detach: Detach = False,
    *,
    common: Common,
) -> int:
    """Run a Flower app: its ServerApp here, its ClientApp on workers whose owners accepted it.

    With --json every event is one JSON object per line on standard output, and the app's own output
    goes to standard error.
    """
    wish = _wish(folder, _nodes(nodes, federation_config), run_config, log, packages)
    signed = app_signing.sign(sign, wish.bundle.hash) if sign is not None else wish.signed
    wish = replace(wish, wait_s=wait, signed=signed)
    with common.client() as client:
        endpoint = client.endpoint
    if detach:
        return flower_runs.detach(wish, endpoint, common.state_dir, json=common.json)
    run_app(endpoint, wish, json=common.json)
    return 0


@flower.command(epilog="Example: atoll flower key lab.key")
def key(file: Annotated[Path, typer.Argument(metavar="FILE", help="File for the new key.")]) -> int:
    """Make a publisher's key, and print the publisher id that owners of workers can accept instead of every
    version of an app.

    Anyone with this file can run Python code on their machines: protect it like a password.
    """
    out.print(app_signing.make_key(file))
    return 0


@flower.command(epilog="Example: atoll flower packages ./wheels >> my_app/pyproject.toml")
def packages(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of wheels, such as from `pip download --only-binary :all: -d DIR`."
        ),
    ],
) -> int:
    """Print the [tool.atoll.packages] table, with exact versions and hashes, for an app that brings these
    wheels.

    The folder may hold wheels for several platforms. Packages that Atoll itself has (numpy, torch) are left
    out.
    """
    out.print(table_of(folder), end="")
    return 0


@flower.command(epilog="Example: atoll flower simulate examples/flower_digits --nodes 100")
def simulate(
    folder: AppDir,
    nodes: Annotated[
        int, typer.Option(min=1, max=10_000, metavar="N", help="Number of nodes; default: 10.")
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Processes that run the nodes in turn.")
    ] = 2,
    run_config: RunConfig = None,
    federation_config: FederationConfig = None,
    packages: Packages = "",
    log: ShowLog = False,
    detach: Detach = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Run a Flower app on this one machine without Ray: a few workers take turns running its nodes.

    It starts a coordinator and workers on loopback and ends them with the run; nothing remains. Every node
    has its own partition-id and Context.state, as with `flwr run` in a simulation.
    """
    wish = _wish(folder, _nodes(nodes, federation_config) or SIMULATED, run_config, log, packages)
    if detach:
        return flower_runs.detach(wish, None, state_dir, workers=workers, json=json)
    with local_nodes(wish, workers) as (endpoint, here, joined):
        if not json:
            err.print(f"{wish.nodes} nodes on {min(workers, wish.nodes)} workers of this machine")
        run_app(endpoint, here, json=json, joined=joined)
    return 0


def _wish(folder: Path, nodes: int, run_config: list[str] | None, log: bool, packages: str) -> Wish:
    """Return what is to be run. UsageError when it is no app, or flwr is missing here."""
    if importlib.util.find_spec("flwr") is None:
        raise UsageError("flwr is not installed here; `pip install 'atoll[flower]'`")
    bundle = make_bundle(folder)
    config = with_overrides(bundle.spec.config, run_config or [])
    source = checked_source(packages) if packages else ""
    return Wish(folder, bundle, config, nodes, 0.0, log, packages=source)


def _nodes(nodes: int, federation_config: list[str] | None) -> int:
    """Return how many nodes the options ask for, 0 when they do not say."""
    given = parse_pairs(federation_config or [], "--federation-config")
    known = {"num-supernodes", "options.num-supernodes"}
    if odd := sorted(given.keys() - known):
        raise UsageError(f"--federation-config: {odd[0]!r} is not supported; only num-supernodes is")
    found = {value for value in given.values() if isinstance(value, int) and 0 < value <= 10_000}
    if len(found) != min(1, len(given)) or (nodes and found and found != {nodes}):
        raise UsageError("--federation-config: give num-supernodes=N once, from 1 to 10000, or --nodes N")
    return nodes or next(iter(found), 0)
