"""Commands of `atoll` about the coordinator and its members: serve, status, tokens, kick."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.errors import UsageError
from coordinator.cli.fleet.relay import RelayOptions, metrics_address
from coordinator.cli.options import (
    Common,
    Insecure,
    StateDir,
    TokenCopies,
)
from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import in_seconds
from coordinator.cli.views.render import status_view
from coordinator.client.endpoint import Endpoint, default_state_dir, remember
from hostos.command_line import AsJson, answer, print_json, show, with_groups
from hostos.net.addresses import join_address, parse_address
from hostos.net.networks import ANYWHERE
from hostos.units import parse_size
from protos.coding import plain
from protos.credentials import JoinToken, join_command

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.server import Started

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DEFAULT_EXPIRES, DEFAULT_USES = "7d", 100
worker_app = typer.Typer(no_args_is_help=True, help="Enrolled workers.")
token_app = typer.Typer(
    no_args_is_help=True, help="Create, list and revoke the tokens that workers join with."
)


Policy = Annotated[str, typer.Option(help="Which job gets workers first: srsf, shares, priorities or fifo.")]
MostJobs = Annotated[
    int,
    typer.Option(
        min=1, max=1000, help="Maximum number of jobs that train at once, not counting federated ones."
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.command(epilog="Example: atoll serve --listen 0.0.0.0:7700 --advertise train.example.org")(serve)
    app.command(epilog="Example: atoll status --json | jq '.workers[].state'")(status)
    app.command(epilog="Example: atoll dashboard --listen 127.0.0.1:7780")(dashboard)
    app.command(epilog="Example: atoll kick w-7f3a2c9e05b1d846 --for-good --reason 'wrong results'")(kick)
    app.add_typer(token_app, name="token")
    app.add_typer(worker_app, name="worker")


@with_groups
def serve(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")] = "0.0.0.0:7700",
    advertise: Annotated[str, typer.Option(help="Address in the join command.")] = "",
    work_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for joined workers; default: the next port.")
    ] = 0,
    state_dir: StateDir = None,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Address for Prometheus metrics, without TLS or token; HOST defaults to 127.0.0.1.",
        ),
    ] = "",
    max_workers: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, help="Maximum number of enrolled workers, including those that left."
        ),
    ] = 4096,
    database: Annotated[
        str, typer.Option(metavar="URL", help="Journal database; default: SQLite in the state folder.")
    ] = "",
    blobs: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Folder for the blobs, or s3://BUCKET/PREFIX; default: in the state folder."
        ),
    ] = "",
    blob_quota: Annotated[
        str, typer.Option(metavar="SIZE", help="Disk limit for models, data and checkpoints.")
    ] = "512GiB",
    policy: Policy = "srsf",
    concurrent_jobs: MostJobs = 16,
    insecure: Insecure = False,
    json: AsJson = False,
    *,
    relays: RelayOptions,
    tokens: TokenCopies,
) -> None:
    """Run the coordinator until it is interrupted, and print the command with which workers join."""
    from coordinator.config import CoordinatorConfig
    from coordinator.server import serve_forever

    host, port = parse_address(listen)
    folder = state_dir or default_state_dir()
    if insecure and host in ANYWHERE and not advertise:
        host = "127.0.0.1"  # never open to the network by default
    config = CoordinatorConfig(
        state_dir=folder,
        host=host,
        entry_port=port,
        work_port=work_port,
        advertise=advertise,
        insecure=insecure,
        **_metrics(metrics),
        relaying=relays.relaying(insecure=insecure),
        database_url=database,
        blobs_url=blobs,
        blob_quota_bytes=parse_size(blob_quota),
        max_workers=max_workers,
        policy=policy,
        concurrent_jobs=concurrent_jobs,
        join_token_copy=tokens.join_token_file,
        owner_token_copy=tokens.owner_token_file,
    )

    serve_forever(config, partial(_announce, folder, host, insecure=insecure, as_json=json))


def _announce(folder: Path, host: str, started: Started, *, insecure: bool, as_json: bool) -> None:
    """Print where the coordinator listens and how workers join it; note it for the other commands."""
    remember(folder, host, started.entry_port, insecure=insecure)
    address = Endpoint(host, started.entry_port).address
    values = {
        "address": address,
        "work_address": Endpoint(host, started.work_port).address,
        "relay_address": started.relay_port and Endpoint(host, started.relay_port).address,
        "state_dir": str(folder),
        "insecure": insecure,
        "join_command": started.join_command,
        "join_token": started.join_token,
    }
    open_ = ["insecure: no TLS and no tokens, for experiments on this machine only"] * insecure
    listens = f"coordinator listens on {address}, state in {folder}"
    answer(values, listens, *open_, "workers join with:", f"  {started.join_command}", json=as_json)


def _metrics(text: str) -> dict[str, Any]:
    """Return the metrics' address as fields of the configuration; UsageError when it is no [HOST:]PORT."""
    address = metrics_address(text)
    return {} if address is None else {"metrics_host": address[0], "metrics_port": address[1]}


@with_groups
def status(common: Common) -> None:
    """Show workers, jobs and links of the coordinator."""
    with common.client() as client:
        found = client.status()
    if common.json:
        print_json(plain(found))
    else:
        show(status_view(found))


@with_groups
def dashboard(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0: any free one.")
    ] = "127.0.0.1:7780",
    tls: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="CERTIFICATE KEY", help="PEM files of a certificate that browsers trust."),
    ] = None,
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="Another program in front of it terminates TLS; needs --name."),
    ] = False,
    published: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="In a container: the host's loopback port that is forwarded to it."
        ),
    ] = "",
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name", metavar="HOST", help="Name under which browsers reach the page; may be repeated."
        ),
    ] = None,
    public: Annotated[
        bool,
        typer.Option(
            "--public", help="Serve a page for everyone, without a key: progress, losses, counts and totals."
        ),
    ] = False,
    *,
    common: Common,
) -> None:
    """Serve a read-only web page of the fleet and its jobs, and print its address, which contains the access
    key."""
    from coordinator.dashboard.access import Keys, listening
    from coordinator.dashboard.app import Settings, serve_page

    settings = Settings(listening(listen, tls, behind_proxy, tuple(names or ()), published), public=public)
    with common.client() as client:
        endpoint = client.endpoint
    announce = lambda address: answer({"url": address}, f"dashboard: {address}", json=common.json)  # noqa: E731
    serve_page(endpoint, settings, Keys(), announce)


@with_groups
def kick(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id or name, as in `atoll status`.")],
    reason: Annotated[str, typer.Option(help="Reason, sent to the worker and logged.")] = "",
    for_good: Annotated[bool, typer.Option("--for-good", help="Revoke its certificate too.")] = False,
    *,
    common: Common,
) -> None:
    """Remove a worker at once; its stage moves to another worker as after a loss."""
    with common.client() as client:
        known = client.status().workers
        found = [w.worker for w in known if worker in (w.worker, w.name)]
        if len(found) != 1:
            names = ", ".join(f"{w.worker} ({w.name})" for w in known) or "none"
            raise UsageError(f"{worker} names {len(found)} workers; known are {names}")
        client.kick(found[0], reason, for_good=for_good)
    words = f"{found[0]} was asked to leave{' for good' if for_good else ''}"
    answer({"worker": found[0], "reason": reason, "for_good": for_good}, words, json=common.json)


@worker_app.command("forget", epilog="Example: atoll worker forget w-7f3a2c9e05b1d846")
@with_groups
def worker_forget(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id, or a name that only one worker has.")],
    common: Common,
) -> None:
    """Forget a worker that will not come back: its certificate is no longer accepted, and it does not count
    towards --max-workers. To return, it must join with a token as a new worker."""
    with common.client() as client:
        client.forget(worker)
    answer({"worker": worker, "forgotten": True}, f"{worker} is forgotten", json=common.json)


@token_app.command("create", epilog="Example: atoll token create --name lab --expires 24h --uses 10")
@with_groups
def token_create(
    name: Annotated[str, typer.Option(help="Name shown in `atoll token list`.")] = "",
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="Lifetime such as 30m, 24h or 7d; never: unlimited.")
    ] = DEFAULT_EXPIRES,
    uses: Annotated[
        int, typer.Option(min=0, help="Maximum number of workers that may join with it; 0: any number.")
    ] = DEFAULT_USES,
    host: Annotated[str, typer.Option(help="Address in the join command.")] = "",
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Print the long form, which contains the authority's certificate: for workers behind a "
            "proxy or with an older version.",
        ),
    ] = False,
    *,
    common: Common,
) -> None:
    """Create a token with which workers join, and print the join command."""
    lifetime_s = 0.0 if expires == "never" else parse_duration(expires)
    with common.client() as client:
        reply = client.create_token(name, lifetime_s, uses, host)
        at = client.endpoint
    host, port = parse_address(host, at.port) if host else (at.host, at.port)
    command = join_command(JoinToken.decode(reply.token), host, port)
    if long:
        command = f"atoll-worker join {join_address(host, port)} --token {reply.token}"
    values = {"token": command.rpartition(" ")[2], "join_command": command, **plain(reply.info)}
    answer(values, f"token {reply.info.id}; workers join with:", f"  {command}", json=common.json)


@token_app.command("list", epilog="Example: atoll token list --json")
@with_groups
def token_list(common: Common) -> None:
    """List tokens, never their secrets."""
    with common.client() as client:
        tokens = client.tokens()
    if common.json:
        print_json([plain(info) for info in tokens])
        return
    table = FactTable("token", "name", "age", "expires", "uses", "state")
    now_s = time.time()
    for info in tokens:
        left_s = info.expires_s - now_s
        expires = f"in {in_seconds(left_s)}" if info.expires_s and left_s > 0 else "never"
        state = "revoked" if info.revoked else "expired" if info.expires_s and left_s <= 0 else "valid"
        uses = f"{info.uses} of {info.max_uses}" if info.max_uses else str(info.uses)
        age = in_seconds(max(0.0, now_s - info.created_s))
        table.add_row(info.id, info.name, age, "" if state == "expired" else expires, uses, state)
    show(table)


@token_app.command("revoke", epilog="Example: atoll token revoke t-1a2b3c4d")
@with_groups
def token_revoke(
    id: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="Id, as `atoll token list` shows it.")],
    common: Common,
) -> None:
    """Revoke a token for further joins; workers that have joined stay (see `atoll kick`)."""
    with common.client() as client:
        client.revoke_token(id)
    answer({"id": id, "revoked": True}, f"{id} is revoked", json=common.json)


def parse_duration(text: str) -> float:
    """ "30m", "24h", "7d", "90s" -> seconds; UsageError otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise UsageError(f"duration {text!r}; write a number and s, m, h or d, for example 24h")
    return float(found[1]) * _UNITS_S[found[2]]
