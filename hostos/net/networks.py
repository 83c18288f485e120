"""Addresses of either family: where to listen for both, and which of them one customer has."""

from __future__ import annotations

import ipaddress
import socket

ANYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - what people write, not a default


def open_listener(host: str, port: int, backlog: int) -> socket.socket:
    """A TCP listener; anywhere is IPv4 and IPv6, where this machine has both, as gRPC's servers have it.

    OSError when the port cannot be had.
    """
    if host in ANYWHERE and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        except OSError:
            host = "0.0.0.0"  # noqa: S104 - a kernel that knows IPv6 may still have none
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def unmapped(host: str) -> str:
    """The address; of IPv4 in IPv6, as a listener for both sees it, the IPv4 one."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    inner = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return host if inner is None else str(inner)


def customer(host: str) -> str:
    """The address; of IPv6 the /64, which one customer has whole."""
    host = unmapped(host)
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else host
