"""Callers as a call shows them: the worker that a certificate names, the address that it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.errors import AccessDenied
from hostos.net.networks import customer
from protos.connections import ends_in
from protos.credentials import peer_name
from protos.devices import named_in

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]


def worker_of(context: Context, insecure: bool) -> str:
    """The worker id that its certificate, or without TLS its metadata, names; the metadata also say which of
    that machine's devices calls. Raises AccessDenied."""
    if insecure:
        found = dict(context.invocation_metadata() or ()).get("atoll-worker", "")
        name: str | None = found if isinstance(found, str) else None
    else:
        name = peer_name({key: list(values) for key, values in context.auth_context().items()})
    if not name:
        raise AccessDenied("this call names no worker; join first with a token")
    return named_in(name, context.invocation_metadata())


def host_of(context: Context) -> str:
    """The caller's own address as we see it, "" when it has none."""
    ends = ends_in(context.peer() or "")
    return ends[0] if ends is not None else ""


def network_of(context: Context) -> str:
    """The caller's address; of IPv6 the /64, which one customer has whole."""
    return customer(host_of(context))
