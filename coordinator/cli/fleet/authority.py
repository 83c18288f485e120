"""Commands of `atoll` about the coordinator's certificate authority: show, rotate, drop, token."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from atoll.errors import UsageError
from coordinator.cli.fleet.admin import parse_duration
from coordinator.cli.options import Common
from coordinator.cli.views.format import in_seconds
from hostos.command_line import answer, out, print_json, with_groups
from protos.coding import plain

if TYPE_CHECKING:
    from protos import atoll_control_pb2 as pb

DEFAULT_OVERLAP = "60d"
SHOWN = 8  # workers that are named
authority_app = typer.Typer(
    no_args_is_help=True, help="The coordinator's certificate authority, and its exchange for a new one."
)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.add_typer(authority_app, name="ca")


@authority_app.command("show", epilog="Example: atoll ca show --json | jq .behind")
@with_groups
def show(common: Common) -> None:
    """Show the certificate authorities that are trusted now and until when, and the workers that have no
    certificate from the newest."""
    with common.client() as client:
        found = client.authorities()
    _print(found, json=common.json)


@authority_app.command("rotate", epilog="Example: atoll ca rotate --overlap 60d")
@with_groups
def rotate(
    overlap: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long both authorities are trusted, such as 12h or 60d; 0s: only the new one, at once.",
        ),
    ] = DEFAULT_OVERLAP,
    *,
    common: Common,
) -> None:
    """Make a new certificate authority. Workers that connect during the overlap get new certificates
    automatically; all others must join again with a token."""
    overlap_s = parse_duration(overlap)
    with common.client() as client:
        found = client.rotate_authority(overlap_s)
    _print(found, json=common.json)


@authority_app.command("drop", epilog="Example: atoll ca drop")
@with_groups
def drop(
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Do it even if some workers have no certificate from the new authority yet."
        ),
    ] = False,
    *,
    common: Common,
) -> None:
    """End the overlap now: the older authority is no longer trusted, and its key is deleted."""
    with common.client() as client:
        found = client.drop_authority(anyway=anyway)
    _print(found, json=common.json)


@authority_app.command("token", epilog="Example: atoll ca token --token-file owner.token > new.token")
@with_groups
def token(common: Common) -> None:
    """Print the given owner's token again with the authorities that are trusted now: the same secret, for
    owners on other machines."""
    with common.client() as client:
        given, found = client.endpoint.token, client.authorities()
    if given is None:
        raise UsageError("this coordinator runs with --insecure: there are no tokens")
    text = replace(given, ca_pem=found.ca_pem).encode()
    answer({"token": text}, text, json=common.json)


def _print(found: pb.AuthorityList, *, json: bool) -> None:
    if json:
        print_json({"authorities": [plain(one) for one in found.authorities], "behind": list(found.behind)})
        return
    now_s = time.time()
    table = Table("authority (SHA-256)", "age", "trusted", box=None, pad_edge=False)
    for one in found.authorities:
        until = (
            f"for {in_seconds(max(0.0, one.ends_s - now_s))} more" if one.ends_s else "until it is exchanged"
        )
        table.add_row(one.fingerprint, in_seconds(max(0.0, now_s - one.since_s)), until)
    out.print(table)
    if found.behind:
        named = ", ".join(found.behind[:SHOWN]) + (", ..." if len(found.behind) > SHOWN else "")
        out.print(f"{len(found.behind)} workers have none of the newest yet: {named}")
