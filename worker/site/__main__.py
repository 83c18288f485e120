"""The command of a site of several hosts, for torchrun and SLURM.

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST:PORT --rdzv-backend c10d \\
        -m worker.site 192.0.2.7:7700 --token-file token --secret-file secret

Every process of the site runs it. Rank 0 is the worker that joins the coordinator; the others compute for it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import structlog
import typer

from atoll.errors import UsageError
from hostos.command_line import HELP_NAMES, enter, with_groups
from hostos.signals import heeded
from worker.cli.main import EXIT_CODES, configured, run_daemon, start_log
from worker.cli.options import Joining, Limits, Reach
from worker.config import WorkerConfig
from worker.machine.device import machine_memory, memory_limit, usable_cores, versions
from worker.machine.lent import gpus_here
from worker.ranks.gathering import Gathering, Reached
from worker.site.places import Place, device_of, place_in, site_interface, site_secret
from worker.site.rank import Rank, Terms

if TYPE_CHECKING:
    from collections.abc import Mapping

log = structlog.get_logger()

app = typer.Typer(
    name="worker.site", epilog=EXIT_CODES, context_settings=HELP_NAMES, pretty_exceptions_enable=False
)


@dataclass(frozen=True)
class Hosts:
    """Options by which the hosts of a site find and know each other."""

    PANEL: ClassVar = "The site"

    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The site's secret, the same on every host and readable by you alone; or ATOLL_SITE_SECRET.",
        ),
    ] = None
    site_port: Annotated[
        int, typer.Option(metavar="PORT", help="Rank 0's port for the others; default: MASTER_PORT + 1.")
    ] = 0
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Network device of the site on this host; default: that by which MASTER_ADDR is reached.",
        ),
    ] = None


@app.command()
@with_groups
def site(
    joining: Joining,
    reach: Reach,
    limits: Limits,
    hosts: Hosts,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object per line.")] = False,
) -> int:
    """Lend a site of several hosts as one worker; run by torchrun, on every host.

    --memory and --threads are of each process. The site's network must be its own: what its processes
    exchange is neither encrypted nor authenticated.
    """
    given = {**joining.given(), **reach.given(), **limits.given(), "log_json": log_json}
    if given.pop("devices") is not None:
        raise UsageError("--devices in a site of several hosts; each process takes one device of its host")
    environment: Mapping[str, str] = os.environ
    place = place_in(environment, hosts.site_port)
    secret = site_secret(hosts.secret_file, environment)
    device = device_of(given.pop("device"), place.local, gpus_here())
    config = _shared_out(configured({**given, "device": device}), place)
    interface, address = site_interface(place, hosts.interface)
    start_log(log_json)
    if place.rank == 0:
        at = Reached(address, place.port, interface)
        gathering = Gathering(place.size, secret, at, _versions())
        log.info("site.gathering", address=address, port=gathering.port, interface=interface, size=place.size)
        try:
            return run_daemon(config, ranks=gathering)
        finally:
            gathering.close()
    return _follow(config, place, interface, secret)


def _follow(config: WorkerConfig, place: Place, interface: str, secret: bytes) -> int:
    terms = Terms(
        place.rank,
        place.size,
        (place.address, place.port),
        interface,
        config.device,
        config.threads,
        config.memory_bytes,
        config.gpu_memory_bytes,
        config.sandbox,
        _versions(),
    )
    rank = Rank(terms, secret)
    restore = heeded(dict.fromkeys((signal.SIGINT, signal.SIGTERM), rank.leave))
    try:
        rank.run()
    finally:
        restore()
    return 0


def _shared_out(config: WorkerConfig, place: Place) -> WorkerConfig:
    """Return the configuration of one process: cores, and memory on a CPU, are shared with others here."""
    threads = config.threads or max(1, usable_cores() // place.here)
    memory_bytes = config.memory_bytes
    if config.device == "cpu" and not memory_bytes:
        memory_bytes = memory_limit(0, *machine_memory(), "this machine") // place.here
    return replace(config, threads=threads, memory_bytes=memory_bytes)


def _versions() -> str:
    found = versions()
    return f"atoll {found['atoll']}, torch {found['torch']}"


if __name__ == "__main__":
    enter(app)
