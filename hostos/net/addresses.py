"""Addresses as people write them."""

from __future__ import annotations

import ipaddress
import re

from atoll.errors import UsageError

DEFAULT_PORT = 7700  # of a coordinator's entry


def parse_address(text: str, default_port: int = DEFAULT_PORT, lowest_port: int = 0) -> tuple[str, int]:
    """HOST, HOST:PORT, [IPV6]:PORT -> (host, port); UsageError otherwise."""
    text = text.strip()
    match = re.fullmatch(
        r"\[([0-9A-Fa-f:.]+(?:%[^\s\]]+)?)\](?::(\d{1,5}))?|([^\s/:\[\]]+)(?::(\d{1,5}))?", text
    )
    if match is not None:
        host, port = match[1] or match[3], int(match[2] or match[4] or default_port)
    elif text.count(":") > 1 and "[" not in text:
        host, port = _bare(text), default_port
    else:
        raise UsageError(f"address {text!r}; write HOST:PORT, for example 192.0.2.7:{DEFAULT_PORT}")
    if ":" in host and not _is_ipv6(host):
        raise UsageError(f"address {text!r}: {host} is not an IPv6 address; write HOST:PORT or [IPV6]:PORT")
    if not lowest_port <= port <= 65535:
        raise UsageError(f"port {port} of {text!r}; write HOST:PORT, a port from {lowest_port} to 65535")
    return host, port


def _bare(text: str) -> str:
    """Return an IPv6 address without brackets; UsageError where its end may be meant as a port."""
    host, _, end = text.rpartition(":")
    if re.fullmatch(r"\d{4,5}", end) and _is_ipv6(host):
        either = f", or [{text}] if {end} belongs to the address" if _is_ipv6(text) else ""
        raise UsageError(f"address {text!r}; write HOST:PORT with brackets, [{host}]:{end}{either}")
    return text


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
