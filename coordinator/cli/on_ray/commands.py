"""`atoll ray`: workers as actors of a Ray cluster, started, shown and ended."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from atoll.errors import UsageError
from coordinator.cli.on_ray.bundles import Bundle, Node, like_bundles, whole_nodes
from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import in_seconds
from hostos.command_line import AsJson, TokenFile, err, given_token, out, print_json, show, with_groups
from hostos.net.addresses import parse_address
from hostos.units import parse_size

if TYPE_CHECKING:
    from coordinator.cli.on_ray.cluster import Cluster
    from coordinator.cli.on_ray.kept import Order

NAMESPACE = "atoll"
NEAREST = "auto"  # as an address: the cluster of which this machine is a node
LOOK_EVERY_S = 0.5
SETTLED = ("joined", "ended", "failed")

ray_app = typer.Typer(no_args_is_help=True, help="Run workers as actors of a Ray cluster.")
Address = Annotated[
    str,
    typer.Option(
        "--ray",
        envvar="RAY_ADDRESS",
        metavar="ADDRESS",
        help="The Ray cluster, as ray.init takes it; auto: the one of which this machine is a node.",
    ),
]
Namespace = Annotated[
    str, typer.Option(metavar="NAME", help="Ray's namespace of these workers; one for each fleet.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.add_typer(ray_app, name="ray")


@dataclass(frozen=True)
class Asked:
    """Options about the workers that are started."""

    PANEL: ClassVar = "Workers"

    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of workers; default: as many as fit.")
    ] = None
    cpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="CPUs of each worker, and its threads. Without it, --workers, --gpus and --memory each GPU "
            "is a worker with its share of the CPUs, and each node without GPUs is one with all of them.",
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="GPUs of each worker; several compute one stage together."),
    ] = None
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory of each worker, as for `atoll-worker join`; on CPUs Ray reserves as much.",
        ),
    ] = ""
    worker_options: Annotated[
        str, typer.Option(metavar="WORDS", help="More options of `atoll-worker join`, in one word.")
    ] = ""
    node_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Folder on each node for workers' state; default ~/.local/state/atoll-ray."
        ),
    ] = ""

    def bundles(self, nodes: Sequence[Node]) -> list[Bundle]:
        """Return the resources of each worker. UsageError where no node has so much."""
        memory_bytes = parse_size(self.memory) if self.memory else 0
        if self.workers is None and self.cpus is None and self.gpus is None and not memory_bytes:
            return whole_nodes(nodes)
        return like_bundles(nodes, self.workers, self.cpus, self.gpus, memory_bytes)

    def words(self) -> list[str]:
        """Return the options for `atoll-worker join`. UsageError where one is each worker's own."""
        try:
            found = shlex.split(self.worker_options)
        except ValueError as error:
            raise UsageError(f"--worker-options {self.worker_options[:60]!r}: {error}") from None
        for word in found:
            if word.partition("=")[0] in ("--state-dir", "--token", "--token-file", "--name"):
                raise UsageError(
                    f"--worker-options {word[:60]!r}: `atoll ray up` gives each worker its own; leave it out"
                )
        return found


@ray_app.command(
    "up",
    epilog="Examples: atoll ray up 192.0.2.7:7700 --token-file token; with two GPUs each: "
    "atoll ray up 192.0.2.7:7700 --token-file token --gpus 2",
)
@with_groups
def ray_up(
    coordinator: Annotated[
        str | None, typer.Argument(metavar="HOST:PORT", help="The coordinator; default: the token's.")
    ] = None,
    token: Annotated[str | None, typer.Option(metavar="T", help="Join token.")] = None,
    token_file: TokenFile = None,
    wait: Annotated[
        float, typer.Option(min=0, metavar="S", help="Seconds to wait for all of them to join.")
    ] = 60.0,
    ray: Address = NEAREST,
    namespace: Namespace = NAMESPACE,
    *,
    asked: Asked,
    json: AsJson = False,
) -> None:
    """Start workers as actors of a Ray cluster, which join a coordinator and stay after this command.

    Each has its own state folder on its node. Ray starts it again when its process or its node ends; on
    another node it joins anew, by the token.
    """
    from coordinator.cli.on_ray.cluster import connected

    given = given_token(token, token_file)
    if given is None:
        raise UsageError("no token; give --token-file FILE with one of `atoll token create`")
    if coordinator is not None:
        parse_address(coordinator, lowest_port=1)
    words = asked.words()
    with connected(ray, namespace) as cluster:
        if there := cluster.names():
            raise UsageError(
                f"{len(there)} workers are in Ray's namespace {namespace!r}; `atoll ray down` ends them, and "
                "another --namespace is another fleet"
            )
        bundles = asked.bundles(cluster.nodes())
        names = [f"{namespace}-{number}" for number in range(len(bundles))]
        for name, bundle in zip(names, bundles, strict=True):
            arguments = ([coordinator] if coordinator else []) + join_options(name, bundle, words)
            cluster.keep(name, _order(name, arguments, given, asked.node_dir, namespace), bundle)
        _show(_awaited(cluster, names, wait), json)


@ray_app.command("status", epilog="Example: atoll ray status --json")
def ray_status(ray: Address = NEAREST, namespace: Namespace = NAMESPACE, json: AsJson = False) -> None:
    """List the workers on a Ray cluster, and where each of them is.

    `atoll status` shows what they compute.
    """
    from coordinator.cli.on_ray.cluster import connected

    with connected(ray, namespace) as cluster:
        _show(cluster.statuses(cluster.names()), json)


@ray_app.command("down", epilog="Example: atoll ray down; for good: atoll ray down --forget")
def ray_down(
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove their state on the nodes too: identity, settings, blobs.")
    ] = False,
    ray: Address = NEAREST,
    namespace: Namespace = NAMESPACE,
    json: AsJson = False,
) -> None:
    """Have all workers on a Ray cluster leave, and end their actors.

    Without --forget they keep their state, and need no token when they start on the same nodes again.
    """
    from coordinator.cli.on_ray.cluster import connected

    with connected(ray, namespace) as cluster:
        names = cluster.names()
        silent = cluster.end(names, forget)
    if json:
        print_json({"ended": names, "without_answer": silent})
        return
    out.print(f"{len(names)} workers ended")
    if silent:
        kept = "; what they left on their nodes is still there" if forget else ""
        err.print(f"{', '.join(silent)} did not answer and were killed{kept}")


def join_options(name: str, bundle: Bundle, words: Sequence[str]) -> list[str]:
    """Return the options of `atoll-worker join` for a worker of this bundle; ``words`` come last and win."""
    found = ["--name", name, "--threads", str(bundle.cpus)]
    if not any(word.partition("=")[0] in ("--device", "--devices") for word in words):
        # CUDA numbers those alone that Ray lets the actor see; several are one worker.
        device = "+".join(f"cuda:{number}" for number in range(bundle.gpus)) or "cpu"
        found += ["--devices" if bundle.gpus > 1 else "--device", device]
    if bundle.memory_bytes:
        found += ["--memory", str(bundle.memory_bytes)]
    return [*found, *words]


def _order(name: str, arguments: Sequence[str], token: str, node_dir: str, namespace: str) -> Order:
    from coordinator.cli.on_ray.kept import Order

    folder = f"{re.sub(r'[^A-Za-z0-9._-]', '_', namespace).lstrip('.') or '_'}/{name.rpartition('-')[2]}"
    # By the environment: what stands on a command line, others on the node see.
    return Order(tuple(arguments), {"ATOLL_TOKEN": token}, folder, node_dir)


def _awaited(cluster: Cluster, names: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """What all workers report once they have joined, have ended, or so long after they were started."""
    deadline_s = time.monotonic() + seconds
    while True:
        found = cluster.statuses(names)
        if all(row["state"] in SETTLED for row in found) or time.monotonic() > deadline_s:
            return found
        time.sleep(LOOK_EVERY_S)


def _show(rows: Sequence[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(list(rows))
        return
    if not rows:
        out.print("no workers in this namespace; `atoll ray up` starts some")
        return
    table = FactTable("worker", "state", "node", "started", "up", "folder")
    for row in rows:
        up = in_seconds(time.time() - row["since_s"]) if "since_s" in row else ""
        times = f"{row['starts']} x" if "starts" in row else ""
        table.add_row(row["name"], row["state"], row.get("host", ""), times, up, row.get("folder", ""))
    show(table)
    for row in rows:
        if row["state"] != "joined" and (log := row.get("log")):
            err.print(f"{row['name']}: {log.splitlines()[-1]}")
