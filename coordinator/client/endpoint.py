"""Address of the coordinator and credential of the caller: given on the command line or remembered locally.

``atoll serve`` leaves its address and the owner's token in its state folder, so that commands on
the same machine need neither option; elsewhere ``--coordinator`` and ``--token`` name them.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from atoll.errors import UsageError
from hostos.files.refusals import refusal
from hostos.net.addresses import join_address, parse_address
from hostos.net.proxies import proxy_option
from protos.credentials import COORDINATOR, JoinToken, channel_credentials, name_options

ADDRESS_FILE = "address.json"
TOKEN_FILE = "owner-token"  # noqa: S105 - a file name
MAX_FILE_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A coordinator's entry port and the owner's token for it; no token means no TLS. ``use_proxy``: by way
    of the environment's proxy."""

    host: str
    port: int
    token: JoinToken | None = field(default=None, repr=False)
    use_proxy: bool = False

    @property
    def address(self) -> str:
        """HOST:PORT, an IPv6 host in brackets."""
        return join_address(self.host, self.port)

    @property
    def here(self) -> bool:
        """Whether the coordinator is on this machine, as far as its address shows."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)
        except OSError:
            return False
        return any(_is_own(family, address) for family, *_, address in found)

    def channel(self) -> grpc.Channel:
        """A channel to the entry port; it connects at the first call."""
        return cast("grpc.Channel", self._open(grpc))

    def async_channel(self) -> grpc.aio.Channel:
        """The same for a program on an event loop, which must run."""
        return cast("grpc.aio.Channel", self._open(grpc.aio))

    def _open(self, library: Any) -> Any:
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_reconnect_backoff_ms", 1000),  # a restarted coordinator is found at once
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            proxy_option(self.use_proxy),
        ]
        if self.token is None:
            return library.insecure_channel(self.address, options=options)
        options += name_options(COORDINATOR)
        return library.secure_channel(self.address, channel_credentials(self.token.ca_pem), options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every owner's call."""
        return () if self.token is None else self.token.metadata


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    """Whether an address is one of this machine's: nobody can bind another's."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def default_state_dir() -> Path:
    """Return a coordinator's default state folder."""
    return Path.home() / ".local" / "state" / "atoll"


def remember(state_dir: Path, host: str, port: int, *, insecure: bool) -> None:
    """Leave the address of the coordinator that has its state in ``state_dir``.

    Raises StorageError when the folder cannot be written.
    """
    # An address to listen on everywhere is reached on this machine at the loopback.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    path = state_dir / ADDRESS_FILE
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(json.dumps({"host": reachable, "port": port, "insecure": insecure}) + "\n")
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise refusal(error, f"write {path}", "choose another --state-dir") from None


def find_endpoint(
    coordinator: str | None = None,
    token: str | None = None,
    state_dir: Path | None = None,
    *,
    insecure: bool = False,
    use_proxy: bool = False,
) -> Endpoint:
    """The endpoint that the options name; what they leave out was remembered in ``state_dir``.

    UsageError says which option is missing; AccessDenied when the token is no token.
    """
    state_dir = state_dir or default_state_dir()
    remembered = _recall(state_dir)
    if coordinator is not None:
        host, port = parse_address(coordinator)
    elif remembered is not None:
        host, port = remembered[0], remembered[1]
        insecure = insecure or remembered[2]
    else:
        raise UsageError(
            f"no coordinator is known in {state_dir}; give --coordinator HOST:PORT and --token, "
            f"or start one here with `atoll serve`"
        )
    if insecure:
        return Endpoint(host, port, None, use_proxy)
    text = token or _read(state_dir / TOKEN_FILE)
    if not text:
        raise UsageError(
            f"no owner token for {host}:{port} in {state_dir}; give --token "
            f"(`atoll serve` keeps it in its state folder, file {TOKEN_FILE})"
        )
    return Endpoint(host, port, JoinToken.decode(text), use_proxy)


def _recall(state_dir: Path) -> tuple[str, int, bool] | None:
    text = _read(state_dir / ADDRESS_FILE)
    if not text:
        return None
    try:
        found = json.loads(text)
        host, port, insecure = found["host"], found["port"], found["insecure"]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{state_dir / ADDRESS_FILE} is damaged; remove it, or give --coordinator") from None
    if not (isinstance(host, str) and isinstance(port, int) and isinstance(insecure, bool)):
        raise UsageError(f"{state_dir / ADDRESS_FILE} is damaged; remove it, or give --coordinator")
    return host, port, insecure


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise refusal(error, f"read {path}", "is it another user's?") from None
    with os.fdopen(descriptor, "r", encoding="utf-8", errors="replace") as file:
        return file.read(MAX_FILE_BYTES).strip()
