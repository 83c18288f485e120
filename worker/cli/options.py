"""Options that several `atoll-worker` commands share, as fields of a worker's configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from hostos.command_line import TokenFile, given_token
from hostos.net.addresses import parse_address
from hostos.packages.fetching import checked_source
from hostos.units import parse_size
from protos.app_bundle import parse_pairs

StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder for identity, settings, data and cached blobs; default ~/.local/state/atoll-worker."
    ),
]


@dataclass(frozen=True)
class Joining:
    """Options with which a worker reaches its coordinator and its device."""

    PANEL: ClassVar = "Joining"

    coordinator: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST:PORT",
            help="Address of the coordinator; default: the one in the token, or the one joined last.",
        ),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="Join token as `atoll serve` prints it, which names the coordinator too; or "
            "ATOLL_TOKEN. First join only.",
        ),
    ] = None
    token_file: TokenFile = None
    device: Annotated[str | None, typer.Option(metavar="D", help="auto, cpu, cuda or cuda:N.")] = None
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Several devices, each a separate worker: all (every GPU), or a list such as "
            "cuda:0,cuda:1 or cpu*2; + joins several into one worker.",
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Compute threads; default: one per physical core that the worker may use."
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Total memory that the worker may take, e.g. 4GiB, for Atoll itself and a stage; "
            "default: 85 % of the free memory for a stage.",
        ),
    ] = None
    stage_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that plans assume for a stage, in the planner's figures; it enforces nothing. "
            "Default: what --memory leaves.",
            hidden=True,
        ),
    ] = None
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to listen on for peers; default 0.0.0.0, any free port.",
            hidden=True,
        ),
    ] = None
    sandbox: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="Bubblewrap around the compute process: auto (if it works; default), require or off.",
            hidden=True,
        ),
    ] = None
    state_dir: StateDir = None
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="No TLS and no token: loopback experiments only.", hidden=True),
    ] = None
    use_proxy: Annotated[
        bool | None,
        typer.Option(
            "--use-proxy/--no-use-proxy",
            envvar="ATOLL_USE_PROXY",
            help="Connect to coordinator, peers and relays through the environment's proxy (https_proxy); "
            "default: directly.",
            hidden=True,
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        names = ("device", "devices", "threads", "sandbox", "state_dir", "insecure", "use_proxy")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found["token"] = given_token(self.token, self.token_file)
        if self.memory:
            found["memory_bytes"] = parse_size(self.memory)
        if self.stage_memory:
            found["stage_bytes"] = parse_size(self.stage_memory)
        if self.coordinator is not None:
            found["host"], found["port"] = parse_address(self.coordinator, lowest_port=1)
        if self.listen is not None:
            found["listen_host"], found["listen_port"] = parse_address(self.listen, 0)
        return found


@dataclass(frozen=True)
class Reach:
    """Options by which other workers find this one."""

    PANEL: ClassVar = "How others find this machine"

    name: Annotated[
        str | None, typer.Option(metavar="N", help="Name shown to the owner; default: this host's.")
    ] = None
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Address under which peers reach this machine, for a forwarded port; may be repeated.",
        ),
    ] = None
    no_inbound: Annotated[
        bool | None,
        typer.Option("--no-inbound", help="Accept no connections: this machine opens all of them."),
    ] = None
    site: Annotated[
        str | None,
        typer.Option(
            metavar="S", help="Name shared by machines behind the same router or uplink.", hidden=True
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        found: dict[str, Any] = {"name": self.name, "site": self.site}
        if self.no_inbound:
            found["inbound"] = False
        if self.advertise:
            # Port 0: the one we listen on.
            found["advertise"] = tuple(parse_address(a, 0) for a in self.advertise)
        return found


@dataclass(frozen=True)
class Limits:
    """Options that bound what jobs may take, and what may leave of this machine's data."""

    PANEL: ClassVar = "Limits"

    max_upload_mbit: Annotated[
        float | None, typer.Option(metavar="M", help="Rate limit for checkpoint uploads; 0: unlimited.")
    ] = None
    kept: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Disk limit for client state between federated rounds; default 20GiB.",
            hidden=True,
        ),
    ] = None
    send_log_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Disk limit for the log of what this worker's stage sent since the newest checkpoint, "
            "from which a neighbour's successor catches up; at most a quarter of the free space; "
            "default 1GiB; 0: no log.",
            hidden=True,
        ),
    ] = None
    copy_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Disk limit for copies of stages that this worker stores while idle, so that it can take "
            "over a stage at once; at most a quarter of the free space; default 4GiB; 0: none.",
            hidden=True,
        ),
    ] = None
    min_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Minimum number of own samples in each mean that leaves this machine; default 3.",
            hidden=True,
        ),
    ] = None
    min_samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Minimum number of own samples behind a federated update; default 10.",
            hidden=True,
        ),
    ] = None
    min_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Minimum number of local steps behind a federated update; default 2.",
            hidden=True,
        ),
    ] = None
    min_clients: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Minimum number of updates in a federated round; default 2.", hidden=True
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        found = asdict(self)
        sizes = {"kept_bytes": found.pop("kept")}
        sizes |= {name: found.pop(name) for name in ("send_log_bytes", "copy_bytes")}
        return found | {name: parse_size(size) if size else None for name, size in sizes.items()}


@dataclass(frozen=True)
class AppOptions:
    """Options about foreign Python code."""

    PANEL: ClassVar = "Flower apps"

    allow_apps: Annotated[
        bool,
        typer.Option(
            "--allow-apps",
            help="Run Flower apps that were accepted (`atoll-worker apps accept`); not remembered.",
        ),
    ] = False
    apps_only: Annotated[
        bool,
        typer.Option(
            "--apps-only",
            help="Run only these apps: the compute process for jobs is not started, which saves 200 MB; "
            "not remembered.",
            hidden=True,
        ),
    ] = False
    accept_app: Annotated[
        list[str] | None,
        typer.Option(
            metavar="APP",
            help="Accept an app until this worker ends: its hash, a publisher (ed25519:...), or `any` "
            "(every app of this coordinator's owners; only for your own machines); may be repeated.",
            hidden=True,
        ),
    ] = None
    app_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            metavar="N",
            help="Maximum number of nodes on this machine in one run.",
            hidden=True,
        ),
    ] = None
    app_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Let apps see this environment variable; may be repeated.", hidden=True
        ),
    ] = None
    app_packages: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Install packages that accepted apps bring, from a folder of wheels (/srv/wheels) or an "
            "index (https://HOST/simple); '' (default): install none.",
            hidden=True,
        ),
    ] = None
    app_packages_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk limit of these packages; default 2GiB.", hidden=True),
    ] = None
    node_config: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Context.node_config of apps, as in 'data=\"/data\"'.", hidden=True),
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        pairs, most, source = self.node_config, self.app_packages_bytes, self.app_packages
        return {
            "allow_apps": self.allow_apps,
            "apps_only": self.apps_only,
            "accept_apps": tuple(self.accept_app or ()),
            "app_nodes": self.app_nodes,
            "app_env": tuple(self.app_env) if self.app_env else None,
            "app_packages": checked_source(source) if source else source,
            "app_packages_bytes": parse_size(most) if most else None,
            "node_config": tuple(parse_pairs(pairs, "--node-config").items()) if pairs else None,
        }
