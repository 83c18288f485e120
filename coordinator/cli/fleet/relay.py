"""`atoll relay`, and the options of `atoll serve` about relays."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from atoll.errors import UsageError
from coordinator.config import Relaying
from coordinator.relay.book import RelayLimits
from coordinator.relay.server import Relay
from hostos.command_line import AsJson, answer
from hostos.descriptors import raise_limit
from hostos.net.addresses import join_address, parse_address
from hostos.net.networks import ANYWHERE
from hostos.signals import endings
from hostos.units import GIB
from protos.relay_tickets import KEY_BYTES, key_file

RELAY_PORT = 7702
KEY_VARIABLE = "ATOLL_RELAY_KEY"
OWN_DESCRIPTORS = 32  # of a relay's process: the listener, metrics, logs

Mbit = Annotated[
    float, typer.Option(min=0.0, help="Maximum rate in Mbit/s, both directions together; 0: unlimited.")
]
GibADay = Annotated[
    float, typer.Option("--gib-a-day", min=0.0, help="Maximum traffic in 24 hours; 0: unlimited.")
]


def register(app: typer.Typer) -> None:
    """Add this module's command to the `atoll` command."""
    app.command(epilog="Example: atoll relay --listen 0.0.0.0:7702 --key relay-key --gib-a-day 500")(relay)


@dataclass(frozen=True)
class RelayOptions:
    """Relays of a coordinator."""

    relay_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of its own relay; default: the one after the work port."),
    ] = 0
    no_relay: Annotated[bool, typer.Option("--no-relay", help="Run no relay here.")] = False
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="A relay that runs elsewhere (`atoll relay`); may be repeated."
        ),
    ] = None
    relay_mbit: Annotated[
        float,
        typer.Option(
            min=0.0, help="Maximum rate of its own relay in Mbit/s, which plans assume. 0: unlimited."
        ),
    ] = 0.0
    relay_gib_a_day: Annotated[
        float, typer.Option(min=0.0, help="Maximum traffic of its own relay in 24 hours; 0: unlimited.")
    ] = 0.0

    def relaying(self, *, insecure: bool) -> Relaying:
        """The configuration. UsageError for a relay that the coordinator is and is not to run."""
        if self.no_relay and (self.relay_port or self.relay_mbit or self.relay_gib_a_day):
            raise UsageError("--no-relay contradicts the options of the coordinator's relay; leave one out")
        own = not self.no_relay and (not insecure or self.relay_port > 0)
        return Relaying(
            port=self.relay_port if own else None,
            others=tuple(parse_address(text, RELAY_PORT) for text in self.relay or ()),
            line_bps=self.relay_mbit * 1e6,
            day_bytes=int(self.relay_gib_a_day * GIB),
        )


def relay(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")
    ] = f"0.0.0.0:{RELAY_PORT}",
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"The coordinator's `relay-key`, a copy; else {KEY_VARIABLE} holds its content.",
        ),
    ] = None,
    mbit: Mbit = 0.0,
    gib_a_day: GibADay = 0.0,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve Prometheus metrics at this address; HOST defaults to 127.0.0.1.",
        ),
    ] = "",
    json: AsJson = False,
) -> None:
    """Connect workers that cannot dial each other, from any public host; it passes only encrypted bytes."""
    host, port = parse_address(listen, RELAY_PORT)
    limits = RelayLimits(rate_bytes_per_s=mbit * 125_000 or math.inf, day_bytes=gib_a_day * GIB or math.inf)
    where = metrics_address(metrics)
    asyncio.run(_run(_key(key), (host, port), limits, where, json=json))


def metrics_address(text: str) -> tuple[str, int] | None:
    """The address of ``--metrics``, None for ""; UsageError when it is no [HOST:]PORT."""
    if not text:
        return None
    host, port = parse_address(f"127.0.0.1:{text}" if text.isdigit() else text, -1)
    if port < 0:
        raise UsageError(f"--metrics {text!r}; write a port, or HOST:PORT, for example 127.0.0.1:9100")
    return host, port


def _key(path: Path | None) -> bytes:
    if path is not None:
        return key_file(path)
    try:
        found = bytes.fromhex(os.environ.get(KEY_VARIABLE, "").strip())
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise UsageError(
            "no key: give --key FILE, a copy of `relay-key` from the coordinator's state folder, or its "
            f"content in {KEY_VARIABLE}"
        )
    return found


async def _run(
    key: bytes, address: tuple[str, int], limits: RelayLimits, metrics: tuple[str, int] | None, *, json: bool
) -> None:
    from coordinator.services.prometheus import Page, RelayExporter

    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in endings():
        loop.add_signal_handler(number, ending.set)
    allowed = raise_limit(limits.connections + limits.strangers + OWN_DESCRIPTORS)
    served = Relay(key, limits.within(allowed - OWN_DESCRIPTORS))
    port = await served.start(*address)
    page = Page(RelayExporter(served.book), *metrics) if metrics is not None else None
    host = address[0]
    at, shown = join_address(host, port), join_address("HOST" if host in ANYWHERE else host, port)
    words = f"relay listens on {at}; start the coordinator with:", f"  atoll serve --relay {shown}"
    answer({"address": at, "metrics": f"{page.host}:{page.port}" if page else None}, *words, json=json)
    await ending.wait()
    await served.stop()
    if page is not None:
        page.close()
