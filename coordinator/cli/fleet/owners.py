"""Commands of `atoll` about owners: their tokens, their roles and what they did."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.options import Common, StateDir
from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import in_bytes
from coordinator.client.endpoint import default_state_dir
from hostos.command_line import AsJson, answer, print_json, show, shown_time, with_groups
from hostos.files.bounded_log import read_log
from hostos.units import shown_energy, shown_work
from protos.coding import plain

if TYPE_CHECKING:
    from protos import atoll_control_pb2 as pb

AUDIT = "audit"
SHOWN = ("at_s", "owner", "role", "call", "peer")
owner_app = typer.Typer(
    no_args_is_help=True, help="Owners of this coordinator: their rights and what they did."
)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.add_typer(owner_app, name="owner")
    app.command(epilog="Example: atoll credit --days 30 --json")(credit)


@with_groups
def credit(
    days: Annotated[int, typer.Option(min=1, max=400, help="Number of most recent days to show.")] = 30,
    *,
    common: Common,
) -> None:
    """Show what each worker has contributed to which owner's jobs, by UTC day: useful, discarded and not yet
    stored steps."""
    with common.client() as client:
        found = client.credits(time.time() - (days - 1) * 86_400.0)
    if common.json:
        print_json([plain(row) for row in found])
        return
    columns = ["day", "worker", "for", "useful steps", "samples", "computing", "sent", "received"]
    measured = any(row.useful.HasField("energy_mj") for row in found)
    columns += ["energy"] * measured
    table = FactTable(*columns, "discarded", "pending")
    for row in found:
        done = row.useful
        table.add_row(
            row.day,
            row.name or row.worker,
            row.owner or "-",
            str(done.steps),
            str(done.samples),
            shown_work(done.computed_ms / 1e3),
            in_bytes(done.sent_bytes),
            in_bytes(done.received_bytes),
            *[shown_energy(done.energy_mj / 1e3) if done.HasField("energy_mj") else "-"] * measured,
            str(row.discarded.steps),
            str(row.pending.steps),
        )
    show(table if found else "no worker has given anything in these days")


@owner_app.command("create", epilog="Example: atoll owner create research --role submit")
@with_groups
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the owner, as data owners see it.")],
    role: Annotated[
        str, typer.Option(help="watch, submit (includes watch), or administer (everything).")
    ] = "submit",
    max_workers: Annotated[
        int, typer.Option(min=0, help="Maximum number of workers for this owner's jobs at once; 0: no limit.")
    ] = 0,
    max_jobs: Annotated[
        int, typer.Option(min=0, help="Maximum number of this owner's jobs at once; 0: no limit.")
    ] = 0,
    weight: Annotated[
        float,
        typer.Option(
            min=0.001, max=1000.0, help="Weight of its share of the fleet under the policy `shares`."
        ),
    ] = 1.0,
    *,
    common: Common,
) -> None:
    """Create a separate token for another owner, and print it once."""
    with common.client() as client:
        reply = client.create_owner(name, role, workers=max_workers, jobs=max_jobs, weight=weight)
    words = f"owner {reply.info.name} may {reply.info.role}; commands take its token by --token-file:"
    answer({"token": reply.token, **plain(reply.info)}, words, reply.token, json=common.json)


@owner_app.command("list", epilog="Example: atoll owner list --json")
@with_groups
def list_owners(common: Common) -> None:
    """List owners and their roles, never their tokens."""
    with common.client() as client:
        owners = client.owners()
    if common.json:
        print_json([plain(info) for info in owners])
        return
    table = FactTable("owner", "role", "since", "may have at once")
    for info in owners:
        table.add_row(info.name, info.role, shown_time(info.created_s, "the first start"), _quota(info.quota))
    show(table)


def _quota(quota: pb.OwnerQuota) -> str:
    """Bounds of an owner's jobs in words."""
    words = [f"{quota.workers} workers"] if quota.workers else []
    words += [f"{quota.jobs} jobs"] if quota.jobs else []
    words += [f"weight {quota.weight:g}"] if quota.weight != 1.0 else []
    return ", ".join(words) or "-"


@owner_app.command("revoke", epilog="Example: atoll owner revoke research")
@with_groups
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name, as `atoll owner list` shows it.")],
    common: Common,
) -> None:
    """Revoke an owner's rights at once. Its jobs stay, and an owner with the role `administer` can cancel
    them."""
    with common.client() as client:
        client.revoke_owner(name)
    answer({"name": name, "revoked": True}, f"{name} is no longer an owner", json=common.json)


@owner_app.command("log", epilog="Example: atoll owner log --json")
def log(state_dir: StateDir = None, json: AsJson = False) -> None:
    """Show what owners did on this machine's coordinator, newest last: submit, cancel, export, kick, create
    and revoke."""
    lines = list(read_log((state_dir or default_state_dir()) / AUDIT))
    if json:
        for line in lines:
            print_json(line)
        return
    table = FactTable("when", "owner", "call", "about", "from")
    for line in lines:
        about = ", ".join(f"{key} {value}" for key, value in line.items() if key not in SHOWN)
        table.add_row(shown_time(line["at_s"]), line["owner"], line["call"], about, line["peer"])
    show(table if lines else "no owner has done anything here yet")
