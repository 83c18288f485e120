"""`atoll simulate`: a federated job with a population of clients, on workers that this command starts.

The machine is the real one: a coordinator and hosts as processes over loopback, the job file as it is. The
data are parted among the population by a seed; every host holds them all, on the disk once, and trains the
clients that the coordinator deals to it. A host that ends is started again with the states that it had.
With ``--ray`` the hosts are actors of a Ray cluster, and a node's disk holds the data once.
"""

from __future__ import annotations

import json as jsonlib
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from atoll.errors import UsageError
from atoll.federated import Registered
from coordinator.cli.jobs.commands import JobFile, follow
from coordinator.cli.on_ray.shipped import linked
from coordinator.cli.options import JobOptions, telling
from coordinator.cli.views.format import DIM, in_bytes, in_seconds
from experiments.data import OWNED, owned_data
from hostos.allotted import threads_each
from hostos.command_line import AsJson, kept_folder, out, print_json, with_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from atoll.job import Job
    from coordinator.cli.local_fleet import LocalFleet
    from coordinator.cli.processes import Processes
    from protos import atoll_control_pb2 as pb

HERE = "here"
EVERYTHING = ("--allow-statistics", "1000000000")  # nothing leaves the machine that is not its user's
FLOORS = ("--min-batch", "1", "--min-samples", "1", "--min-steps", "1", "--min-clients", "1")


@dataclass(frozen=True, slots=True)
class Hosts:
    """How many workers there are, the threads of each, and the Ray cluster that they are on; None: here."""

    count: int
    cpus: int | None
    ray: str | None


@dataclass(frozen=True, slots=True)
class Parted:
    """Data, and who of the population has which."""

    name: str
    source: Path | None
    schema: tuple[str, ...]
    how: str
    clients: int
    by: str
    seed: int


def register(app: typer.Typer) -> None:
    """Add `atoll simulate`."""
    app.command(
        epilog="Example: atoll simulate examples/federated_mnist.py --population 1000 --how dirichlet:0.1 "
        "--hosts 2"
    )(simulate)


Data = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The training data, in a form that `atoll-worker data add` takes. Default: the data set "
        "registered on this machine under the name in the job, or the fetched corpus of that "
        "name.",
    ),
]
OnRay = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run the workers on a Ray cluster, named as for `atoll ray up`; auto: the one of which this "
        "machine is a node.",
    ),
]


@with_groups
def simulate(
    jobfile: JobFile,
    population: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Number of clients; 0: the number that --how natural finds."),
    ] = 100,
    how: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="How the data are split: iid, dirichlet:BETA, unbalanced:BETA, labels:COUNT, "
            "shards[:EACH], quantity:BETA or natural.",
        ),
    ] = "iid",
    by: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            help="Field that holds the labels or the clients; default: the only suitable one.",
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split.")] = 0,
    hosts: Annotated[int, typer.Option(min=1, max=64, metavar="K", help="Worker processes.")] = 1,
    cpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Threads of each; default: the machine's, or the Ray cluster's, shared out.",
        ),
    ] = None,
    ray: OnRay = None,
    data: Data = None,
    schema: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="With --data: same as for `atoll-worker data add`."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Export the weights to this file.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep logs and state in this folder; default: they are deleted."),
    ] = None,
    *,
    options: JobOptions,
    json: AsJson = False,
) -> None:
    """Train a federated job with a population of clients on this one machine.

    The same job file trains with real clients: submit it to a fleet whose workers registered the data.
    """
    job = options.load(jobfile)
    if job.federated is None or not isinstance(job.data, Registered):
        raise UsageError(f"{job.name} is not federated; give Job(federated=..., data=Registered(...))")
    parted = Parted(job.data.name, data, tuple(schema or ()), how, population, by, seed)
    keep = None if keep is None else kept_folder(keep)
    shown = _run(job, parted, Hosts(hosts, cpus, ray), output, keep, json)
    if json:
        print_json(shown)
    else:
        out.print(_table(shown))


def _run(
    job: Job, parted: Parted, hosts: Hosts, output: Path | None, keep: Path | None, json: bool
) -> dict[str, Any]:
    from coordinator.cli.processes import ended_by_signals
    from coordinator.client.prepare import prepare

    clients: list[int] = []
    with ended_by_signals(), telling(json) as tell:

        def registered(processes: Processes, states: Sequence[Path]) -> None:
            clients.append(_register(processes, states, parted, tell))
            tell(f"{clients[0]:,} clients ({parted.how}, seed {parted.seed}); starting {hosts.count} hosts")

        prepared = prepare(job, tell=tell)
        with _fleet(hosts, keep, registered, tell) as fleet:
            begun_s, client = time.perf_counter(), fleet.client
            made = client.submit(prepared).job
            follow(client, made, json)
            took_s = time.perf_counter() - begun_s
            update = next(each for each in client.status().jobs if each.job == made)
            if output is not None:
                client.export(made, output)
    return _figures(update, clients[0], hosts.count, took_s)


@contextmanager
def _fleet(
    hosts: Hosts,
    keep: Path | None,
    before: Callable[[Processes, Sequence[Path]], None],
    tell: Callable[[str], None],
) -> Iterator[LocalFleet]:
    """A coordinator here, and hosts on this machine or on Ray; they are started again when they end."""
    from coordinator.cli.local_fleet import LocalFleet

    if hosts.ray is None:
        threads = hosts.cpus or threads_each(hosts.count)
        options = [*FLOORS, "--threads", str(threads)]
        with LocalFleet(hosts.count, options, keep=keep, before=before, again=True) as fleet:
            yield fleet
        return
    from coordinator.cli.on_ray.bundles import widest
    from coordinator.cli.on_ray.cluster import connected
    from coordinator.cli.on_ray.hosts import RayHosts

    names = [f"host{number}" for number in range(hosts.count)]
    with connected(hosts.ray, "atoll-simulate") as cluster:
        cpus = hosts.cpus or widest(cluster.nodes(), hosts.count)
        options = [*FLOORS, "--threads", str(cpus)]
        with (
            RayHosts(cluster, names, cpus, tell) as there,
            LocalFleet(
                0, options, keep=keep, before=before, again=True, hosts=names, start=there.start,
                address=cluster.address(),
            ) as fleet,
        ):  # fmt: skip
            yield fleet


def _register(
    processes: Processes, states: Sequence[Path], parted: Parted, tell: Callable[[str], None]
) -> int:
    """Give every host the data and the population; how many clients have some."""
    first, *others = states
    state = ["--state-dir", str(first)]
    source, schema = parted.source, parted.schema
    registered = Path.home() / ".local" / "state" / "atoll-worker" / "data" / parted.name
    if source is None and registered.is_dir():
        first.mkdir(mode=0o700, parents=True, exist_ok=True)
        linked(registered, first / "data" / parted.name)
    else:
        if source is None:
            source, schema = _corpus(parted.name, processes.folder / "corpus")
        tell(f"reading {source}")
        fields = [word for field in schema for word in ("--schema", field)]
        add = ["-m", "worker.cli", "data", "add", parted.name, str(source), *fields, *state]
        processes.run("data-add", HERE, add)
    # Who simulates on this machine has its owner's consent; the owner's other bounds stay, the original too.
    consent = ["-m", "worker.cli", "data", "policy", parted.name, "--accept", "any", *EVERYTHING, *state]
    processes.run("data-policy", HERE, consent)
    tell("parting the data")
    wanted = ["--how", parted.how, "--clients", str(parted.clients), "--seed", str(parted.seed)]
    wanted += ["--by", parted.by] if parted.by else []
    part = ["-m", "worker.cli", "data", "part", parted.name, *wanted, *state, "--json"]
    found = jsonlib.loads(processes.run("data-part", HERE, part))
    for other in others:
        other.mkdir(mode=0o700, parents=True, exist_ok=True)
        linked(first / "data", other / "data")
    return int(found["clients"])


def _corpus(name: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Training data of a corpus that was fetched, and their schema."""
    from experiments.datasets import corpora, download
    from experiments.datasets.split import SCHEMA, split_images

    if name in OWNED:
        path = owned_data(name, download.read(name)).whole(folder)
        return path, tuple((folder / SCHEMA).read_text().splitlines())
    if name != "mnist":
        raise UsageError(
            f"no data for {name!r}: give --data PATH, or register them with `atoll-worker data add {name}`"
        )
    made = split_images(corpora.mnist(download.read(name)), "iid", 1, 0, 0, folder)
    return folder / made.clients[0].file, tuple((folder / SCHEMA).read_text().splitlines())


def _figures(update: pb.JobUpdate, clients: int, hosts: int, took_s: float) -> dict[str, Any]:
    shown = update.federated
    return {
        "job": update.job,
        "rounds": update.step,
        "clients": clients,
        "hosts": hosts,
        "loss": update.loss if update.HasField("loss") else None,
        "clients_metrics": {m.name: m.value for m in shown.clients_metrics},
        "central_metrics": {m.name: m.value for m in shown.central_metrics},
        "privacy": shown.privacy,
        "bytes_up": shown.bytes_up,
        "bytes_down": shown.bytes_down,
        "round_s": shown.round_s if shown.HasField("round_s") else None,
        "took_s": took_s,
    }


def _traffic(shown: dict[str, Any]) -> str:
    """Bytes of all rounds; empty where they are not shown, as of a private job."""
    if shown["privacy"]:
        return ""
    return f"up {in_bytes(shown['bytes_up'])}, down {in_bytes(shown['bytes_down'])}"


def _table(shown: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style=DIM)
    table.add_column()
    rows = [
        ("population", f"{shown['clients']:,} clients on {shown['hosts']} hosts"),
        (
            "rounds",
            f"{shown['rounds']}"
            + (f", {in_seconds(shown['round_s'])} each (median)" if shown["round_s"] else ""),
        ),
        ("training loss", "" if shown["loss"] is None else f"{shown['loss']:.4f}"),
        ("on clients", ", ".join(f"{k} {v:.4f}" for k, v in shown["clients_metrics"].items())),
        ("on own data", ", ".join(f"{k} {v:.4f}" for k, v in shown["central_metrics"].items())),
        ("traffic", _traffic(shown)),
        ("privacy", shown["privacy"]),
        ("took", in_seconds(shown["took_s"])),
    ]
    for name, words in rows:
        if words:
            table.add_row(name, words)
    return table
