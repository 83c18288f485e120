"""Addresses as people write them."""

from __future__ import annotations

import re

from atoll.errors import UsageError

DEFAULT_PORT = 7700  # of a coordinator's entry


def parse_address(text: str, default_port: int = DEFAULT_PORT, lowest_port: int = 0) -> tuple[str, int]:
    """HOST, HOST:PORT, [IPV6]:PORT -> (host, port); UsageError otherwise."""
    text = text.strip()
    match = re.fullmatch(r"\[([0-9A-Fa-f:.%]+)\](?::(\d{1,5}))?|([^\s/:\[\]]+)(?::(\d{1,5}))?", text)
    if match is not None:
        host, port = match[1] or match[3], int(match[2] or match[4] or default_port)
    elif re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", text):
        host, port = text, default_port  # a bare IPv6 address
    else:
        raise UsageError(f"address {text!r}; write HOST:PORT, for example 192.0.2.7:{DEFAULT_PORT}")
    if not lowest_port <= port <= 65535:
        raise UsageError(f"port {port} of {text!r}; write HOST:PORT, a port from {lowest_port} to 65535")
    return host, port


def join_address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
