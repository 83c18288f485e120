"""Use of the environment's proxy by connections: one word for owners, workers and peers."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

from atoll.errors import UsageError
from hostos.net.addresses import join_address

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # as gRPC reads them
MAX_HEAD_BYTES = 16 << 10


def proxy_option(use_proxy: bool) -> tuple[str, int]:
    """gRPC's channel option for ``--use-proxy``.

    gRPC by itself heeds ``https_proxy`` and its kin, also for addresses of the own network: with a proxy in
    the environment a coordinator on the same machine would not be found. Ours connect directly unless asked
    otherwise; then ``no_proxy`` excepts hosts as usual. TLS goes through a proxy end to end.
    """
    return ("grpc.enable_http_proxy", int(use_proxy))


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy that allows CONNECT; ``login`` is "USER:PASSWORD" or ""."""

    host: str
    port: int
    login: str = ""

    def request(self, host: str, port: int) -> bytes:
        """The request to be connected with ``host``."""
        target = join_address(host, port)
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.login:
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(self.login.encode()).decode()}")
        return "\r\n".join([*lines, "", ""]).encode()


def proxy_for(host: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """The environment's proxy for connections of ours that gRPC does not make; None: directly. UsageError
    when it is not http://HOST:PORT."""
    excepted = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    if any(_names(entry.strip(), host) for entry in excepted.split(",")):
        return None
    found = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    if not found:
        return None
    parts = urlsplit(found if "//" in found else f"//{found}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or parts.scheme not in ("", "http"):
        raise UsageError(f"the environment's proxy {parts.hostname or '?'} is not http://HOST:PORT")
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Proxy(parts.hostname, port or 80, login)


def _names(entry: str, host: str) -> bool:
    """Whether an entry of ``no_proxy`` names a host: itself, its domain, its network, or all."""
    name = entry.lstrip(".").lower()
    if not name:
        return False
    if name == "*" or host.lower() == name or host.lower().endswith(f".{name}"):
        return True
    try:
        return ip_address(host) in ip_network(name, strict=False)
    except ValueError:
        return False


def connected(head: bytes) -> bool:
    """Whether an answer's head grants a request."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    return len(words) > 1 and words[0].startswith(b"HTTP/1.") and words[1] == b"200"
