"""Which of the addresses that a worker states others may be asked to dial. Pure.

Volunteers connect where a worker says it is reached, so that a hostile one could have them knock at
their own routers and services. A network is as near as its name says: public, private, link-local, the
machine itself. An address is passed on when the coordinator saw its worker come from a network at least
as near; so everything works on one machine, in one LAN and in a lab. A private address of a worker that
came from a public one is passed on to those alone who came from the very same: machines behind one router.
"""

from __future__ import annotations

from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from coordinator.messages.instructions import Addresses

ANYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - what a worker may state: wherever it is seen
_SHARED = ip_network("100.64.0.0/10")  # of carriers and overlay networks
_GLOBAL_V6 = IPv6Network("2000::/3")


class Near(IntEnum):
    """Nearness of a network to the machines in it."""

    PUBLIC = 0
    PRIVATE = 1
    LINK = 2
    MACHINE = 3


def literal(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address that ``host`` writes, None for a name; IPv4 in IPv6 is IPv4."""
    try:
        found = ip_address(host)
    except ValueError:
        return None
    inner = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return inner or found


def nearness(host: str) -> Near | None:
    """Return the nearness of an address; None for a name and for an address at which nothing can be
    reached."""
    found = literal(host)
    if found is None or found.is_multicast or found.is_unspecified:
        return None
    if found.is_loopback:
        return Near.MACHINE
    if found.is_link_local:
        return Near.LINK
    if isinstance(found, IPv6Address):
        # What is tunnelled in 6to4 or Teredo hides an IPv4 address.
        if found.sixtofour is not None or found.teredo is not None:
            return None
        public = found in _GLOBAL_V6 and found.is_global
        return Near.PUBLIC if public else Near.PRIVATE if found.is_private else None
    if found.is_reserved:
        return None
    return Near.PRIVATE if found.is_private or found in _SHARED else Near.PUBLIC


def passed_on(stated: Addresses, seen: str) -> tuple[Addresses, Addresses]:
    """The addresses for everybody, and those for workers seen at the same address alone.

    ``stated`` without names; ``seen``: the address that the worker's session comes from, "" when it has
    none.
    """
    here = nearness(seen)
    everybody, nearby = [], []
    for host, port in stated:
        host = seen if host in ANYWHERE else host
        near = nearness(host)
        if near is None:
            continue
        if near <= (here or Near.PUBLIC):
            everybody.append((host, port))
        elif near is Near.PRIVATE and here is Near.PUBLIC:
            nearby.append((host, port))
    return tuple(dict.fromkeys(everybody)), tuple(dict.fromkeys(nearby))
