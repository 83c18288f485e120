"""Options that several `atoll-worker` commands share, as fields of a worker's configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from protos.app_bundle import parse_pairs
from worker.config import parse_address, parse_size

StateDir = Annotated[
    Path | None,
    typer.Option(help="Identity, settings, data, cached blobs; default ~/.local/state/atoll-worker."),
]


@dataclass(frozen=True)
class Joining:
    """Options with which a worker reaches its coordinator and its device."""

    coordinator: Annotated[
        str | None,
        typer.Argument(metavar="HOST:PORT", help="The coordinator; default: the one joined last."),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            metavar="T", help="Join token as `atoll serve` prints it; or ATOLL_TOKEN. First join only."
        ),
    ] = None
    device: Annotated[str | None, typer.Option(metavar="D", help="auto, cpu, cuda or cuda:N.")] = None
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of computation; default: one per physical core it may use."),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most that plans may use here, e.g. 4GiB; default: what is free."),
    ] = None
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where peers connect; default 0.0.0.0, any free port."),
    ] = None
    state_dir: StateDir = None
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="No TLS and no token: loopback experiments only.")
    ] = None
    use_proxy: Annotated[
        bool | None,
        typer.Option(
            "--use-proxy/--no-use-proxy",
            envvar="ATOLL_USE_PROXY",
            help="Reach coordinator and peers by way of the environment's proxy (https_proxy); else "
            "directly.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        names = ("token", "device", "threads", "state_dir", "insecure", "use_proxy")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.memory:
            found["memory_bytes"] = parse_size(self.memory)
        if self.coordinator is not None:
            found["host"], found["port"] = parse_address(self.coordinator)
        if self.listen is not None:
            found["listen_host"], found["listen_port"] = parse_address(self.listen, 0, lowest_port=0)
        return found


@dataclass(frozen=True)
class Reach:
    """Options by which other workers find this one."""

    name: Annotated[
        str | None, typer.Option(metavar="N", help="Shown to the owner; default: this host's.")
    ] = None
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Where peers reach this machine, behind a forwarded port; may repeat."
        ),
    ] = None
    no_inbound: Annotated[
        bool | None, typer.Option("--no-inbound", help="Accept no connection; open every one ourselves.")
    ] = None
    site: Annotated[
        str | None, typer.Option(metavar="S", help="Machines behind one router or uplink give the same word.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        found: dict[str, Any] = {"name": self.name, "site": self.site}
        if self.no_inbound:
            found["inbound"] = False
        if self.advertise:
            # Port 0: the one we listen on.
            found["advertise"] = tuple(parse_address(a, 0, lowest_port=0) for a in self.advertise)
        return found


@dataclass(frozen=True)
class Limits:
    """Options that bound what jobs may take, and what may leave of this machine's data."""

    max_upload_mbit: Annotated[
        float | None, typer.Option(metavar="M", help="Rate of checkpoint uploads; 0 = unlimited.")
    ] = None
    kept: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most that federated strategies may keep here between rounds; default 20GiB.",
        ),
    ] = None
    min_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Own samples in each mean that leaves; default 3.")
    ] = None
    min_samples: Annotated[
        int | None, typer.Option(metavar="N", help="Own samples behind a federated update; default 10.")
    ] = None
    min_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Local steps behind a federated update; default 2.")
    ] = None
    min_clients: Annotated[
        int | None, typer.Option(metavar="N", help="Updates in a federated round; default 2.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        found = asdict(self)
        kept = found.pop("kept")
        return found | {"kept_bytes": parse_size(kept) if kept else None}


@dataclass(frozen=True)
class AppOptions:
    """Options about other people's Python."""

    allow_apps: Annotated[
        bool,
        typer.Option(
            "--allow-apps",
            help="This time, run those Flower apps that `atoll-worker apps accept` accepted.",
        ),
    ] = False
    accept_app: Annotated[
        list[str] | None,
        typer.Option(metavar="HASH", help="Accept this app for this time; for scripts; may repeat."),
    ] = None
    node_config: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Given to apps as Context.node_config, as in 'data=\"/data\"'."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Fields of the configuration; None where nothing was given."""
        pairs = self.node_config
        return {
            "allow_apps": self.allow_apps,
            "accept_apps": tuple(self.accept_app or ()),
            "node_config": tuple(parse_pairs(pairs, "--node-config").items()) if pairs else None,
        }
