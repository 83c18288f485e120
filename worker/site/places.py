"""Where a process stands in its site, by the variables that torchrun and scripts for SLURM set."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from atoll.errors import UsageError
from worker.machine.device import own_address
from worker.ranks.gathering import MOST_RANKS
from worker.ranks.sealed import LEAST_SECRET

SECRET_VARIABLE = "ATOLL_SITE_SECRET"  # noqa: S105 - a variable's name
MOST_SECRET = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """A process of a site. ``here``: processes on this host; ``local``: this one's number among them."""

    rank: int
    size: int
    local: int
    here: int
    address: str  # of rank 0
    port: int  # where rank 0 gathers the others


def place_in(environment: Mapping[str, str], port: int = 0) -> Place:
    """Return the place that RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT name.

    ``port``: of rank 0's gathering; 0: the one after MASTER_PORT, which is torchrun's own. UsageError.
    """

    def number(name: str, low: int, high: int, usual: str | None = None) -> int:
        text = environment.get(name, usual)
        if text is None or not text.isdecimal() or not low <= int(text) <= high:
            raise UsageError(
                f"{name}={text!r}; start it by torchrun, or set {name} to a number from {low} to {high}"
            )
        return int(text)

    size = number("WORLD_SIZE", 2, MOST_RANKS)
    here = number("LOCAL_WORLD_SIZE", 1, size, "1")
    address = environment.get("MASTER_ADDR", "")
    if not address:
        raise UsageError("MASTER_ADDR is not set: start it by torchrun, or give rank 0's address in it")
    return Place(
        number("RANK", 0, size - 1),
        size,
        number("LOCAL_RANK", 0, here - 1, "0"),
        here,
        address,
        port or number("MASTER_PORT", 1, 65534) + 1,
    )


def device_of(wanted: str | None, local: int, gpus: int) -> str:
    """Return the device of a process: its own GPU of this host, else the CPU. UsageError."""
    if wanted not in (None, "auto", "cpu", "cuda"):
        raise UsageError(f"--device {wanted!r} in a site; give auto, cpu or cuda: each process takes its own")
    if wanted == "cpu" or (wanted != "cuda" and not gpus):
        return "cpu"
    if local >= gpus:
        raise UsageError(
            f"process {local} of this host has no GPU of its own: it may use {gpus}; start fewer, or set "
            "LOCAL_RANK=0 where CUDA_VISIBLE_DEVICES shows each process another GPU alone"
        )
    return f"cuda:{local}"


def site_interface(place: Place, given: str | None = None) -> tuple[str, str]:
    """Return the network device of the site on this host and the address there.

    ``given``: by the user; None: that by which rank 0 is reached. UsageError where that is the loopback
    device, by which no other host is reached, though processes are on other hosts.
    """
    addresses = {
        (name, each.address.partition("%")[0])
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    if given is not None:
        own = sorted(address for name, address in addresses if name == given)
        if not own:
            raise UsageError(f"--interface {given[:40]!r}: this host has {sorted({n for n, _ in addresses})}")
        return given, next((a for a in own if ":" not in a), own[0])
    address = own_address(place.address, place.port)
    name = next((name for name, each in sorted(addresses) if each == address), None)
    if address is None or name is None:
        raise UsageError(f"no way to rank 0 at {place.address[:80]}; give the site's network by --interface")
    elsewhere = place.here < place.size and not _is_loopback(place.address)
    if elsewhere and ipaddress.ip_address(address).is_loopback:
        raise UsageError(
            f"{place.address[:80]} is {address} on this host; give the site's network by --interface"
        )
    return name, address


def _is_loopback(address: str) -> bool:
    """Return whether the user gave the loopback device's own address."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def site_secret(file: Path | None, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret that this site's hosts share. UsageError where there is none, or others can read its
    file."""
    if file is None:
        found = environment.get(SECRET_VARIABLE, "").encode()
        where = SECRET_VARIABLE
    else:
        where = str(file)
        try:
            with file.open("rb") as opened:
                if os.fstat(opened.fileno()).st_mode & 0o077:
                    raise UsageError(f"{file} is open to others; `chmod 600 {file}`")
                found = opened.read(MOST_SECRET + 1).strip()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
    if not LEAST_SECRET <= len(found) <= MOST_SECRET:
        raise UsageError(
            f"the site's secret in {where} has {len(found)} bytes; write {LEAST_SECRET} or more, the same on "
            "every host, for example by `openssl rand -hex 32`, and give it by --secret-file"
        )
    return found
