"""`atoll-worker data`: register data for federated training; it stays on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from atoll.errors import UsageError
from hostos.command_line import AsJson, byte_progress, err, out, print_json, with_groups
from worker.cli.options import StateDir
from worker.config import default_state_dir

if TYPE_CHECKING:
    from worker.data.policy import Policy
    from worker.data.registry import Dataset

MAX_SCHEMA_BYTES = 1 << 20

data = typer.Typer(
    name="data",
    help="Register data for federated training. The data stays here; others learn its schema and size.",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name by which jobs refer to the data set.")]


@dataclass(frozen=True)
class PolicyOptions:
    """Options of a data set's policy."""

    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Jobs that may train: ask (each waits for `jobs accept`; default), any, owner:NAME, "
            "graph:HASH; may be repeated.",
        ),
    ] = None
    min_clients: Annotated[
        int | None, typer.Option(metavar="N", help="Minimum number of updates in each round of a job.")
    ] = None
    max_rounds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Maximum number of rounds of one job, and of updates sent to it."),
    ] = None
    clip: Annotated[float | None, typer.Option(metavar="C", help="Clip each update to this L2 norm.")] = None
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="Z", help="Add Gaussian noise to each update, of standard deviation Z times --clip."
        ),
    ] = None
    statistics: Annotated[
        int | None,
        typer.Option(
            "--allow-statistics",
            metavar="N",
            help="How many numbers about the data a round may return in addition to the update, such as "
            "running statistics.",
        ),
    ] = None
    gateways: Annotated[
        list[str] | None,
        typer.Option(
            "--gateway",
            metavar="WHO",
            help="Who may see updates before they are summed: site (any gateway of the worker's site), "
            "none, or a worker's id; may be repeated.",
        ),
    ] = None
    epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="E",
            help="Privacy budget (epsilon) of single samples over all jobs; each job must state what it "
            "spends.",
        ),
    ] = None

    def over(self, before: Policy) -> Policy:
        """Return ``before`` with what was given; UsageError for what is no policy."""
        from worker.data.policy import NO_GATEWAY, rules_of

        changes: dict[str, Any] = {name: value for name, value in asdict(self).items() if value is not None}
        if self.accept:
            changes["accept"] = rules_of(self.accept)
        if self.gateways:
            changes["gateways"] = () if self.gateways == [NO_GATEWAY] else tuple(self.gateways)
        return replace_fields(before, **changes)


@data.command(
    epilog="Examples: atoll-worker data add mnist client-03.safetensors --schema "
    "'image:float32[1,28,28]=image|scale:1/255' --schema 'label:int64=label'; "
    "atoll-worker data add heart visits.csv --schema 'x:float32[13]=age..thal' --schema 'y:int64=outcome'"
)
@with_groups
def add(
    name: Name,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a folder of IDX or text files.")],
    schema: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="NAME:DTYPE[SHAPE]=SOURCE|TRANSFORM..., one per field. A safetensors file needs none.",
        ),
    ] = None,
    schema_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the schema from a file, one field per line.")
    ] = None,
    format_name: Annotated[
        str, typer.Option("--format", metavar="F", help="idx, safetensors, csv or text; default: detected.")
    ] = "",
    delimiter: Annotated[str, typer.Option(metavar="C", help="Separator of a CSV file's columns.")] = ",",
    no_header: Annotated[
        bool,
        typer.Option(
            "--no-header",
            help="The first line of the CSV file is data, not names; columns are called 1, 2, ...",
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing data set of this name.")
    ] = False,
    *,
    options: PolicyOptions,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Read a data set, check every value, and store it where this machine's worker trains on it.

    SOURCE for safetensors is the name of a tensor; for IDX the name of a file in the folder; for text
    windows:LENGTH[,STRIDE], documents:LENGTH or document. For CSV it is columns by name, range (x1..x9),
    number (#3) or the rest (*). Without --accept each job that names the data set waits for
    `atoll-worker jobs accept`.
    """
    from worker.data.policy import UNSTATED
    from worker.data.registry import add_dataset
    from worker.data.sources import Form

    with byte_progress(f"reading {path.name}", quiet=json) as done:
        added = add_dataset(
            state_dir or default_state_dir(),
            name,
            path,
            [*(schema or []), *_lines(schema_file)],
            Form(format_name, delimiter, not no_header),
            policy=options.over(UNSTATED),
            replace=replace,
            progress=done,
        )
    if json:
        print_json(_as_json(added))
        return 0
    _show(added)
    err.print("A worker that runs now tells its coordinator the next time it connects.", style="dim")
    return 0


@data.command("list", epilog="Example: atoll-worker data list --json")
def list_command(state_dir: StateDir = None, json: AsJson = False) -> int:
    """List the data sets registered on this machine."""
    from worker.data.registry import list_datasets

    found = list_datasets(state_dir or default_state_dir())
    if json:
        print_json([_as_json(each) for each in found])
        return 0
    if not found:
        out.print("no data set is registered; see `atoll-worker data add --help`")
        return 0
    table = Table("name", "samples", "size", "fields", box=None, pad_edge=False)
    for each in found:
        fields = ", ".join(_kind(f.name, f.dtype, f.shape) for f in each.fields)
        table.add_row(each.name, f"{each.n_samples:,}", _size(each.n_bytes), fields)
    out.print(table)
    return 0


@data.command(epilog="Example: atoll-worker data show mnist --verify")
def show(
    name: Name,
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it and verify its hashes.")] = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Show the stored facts about a data set, and those that others learn."""
    from worker.data.registry import load_dataset, verify_dataset

    folder = state_dir or default_state_dir()
    if verify:
        with byte_progress(f"reading {name}", quiet=json) as done:
            found = verify_dataset(folder, name, done)
    else:
        found = load_dataset(folder, name)
    if json:
        print_json(_as_json(found))
    else:
        _show(found)
    return 0


@data.command(
    epilog="Examples: atoll-worker data part mnist --how dirichlet:0.1 --clients 1000 --by label; "
    "atoll-worker data part ratings --how natural --by user; atoll-worker data part mnist --as clinic-7"
)
def part(
    name: Name,
    how: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="iid, dirichlet:BETA, unbalanced:BETA, labels:COUNT, shards[:EACH], quantity:BETA, natural.",
        ),
    ] = "",
    clients: Annotated[
        int, typer.Option(metavar="N", help="Number of clients; with natural it follows from the data.")
    ] = 0,
    by: Annotated[
        str,
        typer.Option(metavar="FIELD", help="Field of the labels, or of the client that a sample belongs to."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the draw: hosts with the same data and seed agree.")] = 0,
    own_name: Annotated[
        str,
        typer.Option(
            "--as", metavar="CLIENT", help="Use a single client with this name, the owner of the data set."
        ),
    ] = "",
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Let a data set stand for many clients, which this machine trains in turn.

    A job sees each of them as a separate client; only one sum over the clients drawn for a round leaves.
    """
    from worker.data.population import name_owner, part_dataset

    if bool(how) == bool(own_name):
        raise UsageError("give either --how, the clients of this data set, or --as, the name of its only one")
    folder = state_dir or default_state_dir()
    found = (
        name_owner(folder, name, own_name) if own_name else part_dataset(folder, name, how, clients, seed, by)
    )
    sizes = sorted(found.clients.values())
    if json:
        print_json({"name": name, "how": found.how, "clients": len(sizes), "sha256": found.sha256})
        return 0
    out.print(f"{name}: {len(sizes):,} clients ({found.how}), {sizes[0]:,} to {sizes[-1]:,} samples each")
    out.print("What others learn besides: the clients' names and numbers of samples.")
    return 0


@data.command(epilog="Example: atoll-worker data policy mnist --accept owner:research --max-rounds 200")
@with_groups
def policy(
    name: Name,
    *,
    options: PolicyOptions,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Show a data set's policy, or change the given parts of it; a running worker obeys at once.

    The worker leaves a running job that the new policy does not accept. A changed limit on the number of
    updates, their norm or noise applies from the next job, or the next time that this one is resumed.
    """
    from worker.cli.running import signal_consent_changed
    from worker.data.registry import load_dataset, set_policy

    folder = state_dir or default_state_dir()
    found = load_dataset(folder, name)
    wanted = options.over(found.policy)
    if wanted != found.policy:
        found = set_policy(folder, name, wanted)
        signal_consent_changed(folder)
    if json:
        print_json({"name": name, **found.policy.as_json()})
        return 0
    out.print(f"{'accepts':10} {found.policy.accept_words}", soft_wrap=True, markup=False)
    out.print(f"{'bounds':10} {found.policy.bound_words or 'those of the worker alone'}", soft_wrap=True)
    return 0


@data.command(epilog="Example: atoll-worker data remove mnist")
def remove(name: Name, state_dir: StateDir = None) -> int:
    """Remove a data set and the worker's copy of it; your own files stay."""
    from worker.data.registry import remove_dataset

    remove_dataset(state_dir or default_state_dir(), name)
    out.print(f"data set {name} is no longer registered")
    return 0


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll-worker` command."""
    app.add_typer(data)


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        if path.stat().st_size > MAX_SCHEMA_BYTES:
            raise UsageError(f"schema file {path} is larger than {MAX_SCHEMA_BYTES >> 20} MiB")
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read schema file {path}: {error}") from None


def _show(found: Dataset) -> None:
    facts = (
        ("data set", found.name),
        ("samples", f"{found.n_samples:,}"),
        ("size", _size(found.n_bytes)),
        ("from", f"{found.path} ({found.format})"),
        ("sha256", found.sha256),
        ("accepts", found.policy.accept_words),
        *((("bounds", found.policy.bound_words),) if found.policy.bound_words else ()),
    )
    for key, value in facts:
        out.print(f"{key:10} {value}", soft_wrap=True)
    for at, field in enumerate(found.fields):
        kind = _kind(field.name, field.dtype, field.shape)
        out.print(f"{'' if at else 'fields':10} {kind}", soft_wrap=True)
    out.print("What others learn: the name, the number of samples, and the fields' types and shapes.")


def _kind(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    return f"{name}:{dtype}" + (f"[{','.join(map(str, shape))}]" if shape else "")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


def _as_json(found: Dataset) -> dict[str, Any]:
    return {
        "name": found.name,
        "n_samples": found.n_samples,
        "bytes": found.n_bytes,
        "path": found.path,
        "format": found.format,
        "sha256": found.sha256,
        "fields": [{"name": f.name, "dtype": f.dtype, "shape": list(f.shape)} for f in found.fields],
        "policy": found.policy.as_json(),
    }
