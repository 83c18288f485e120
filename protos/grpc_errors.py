"""gRPC failures as errors of ``atoll.errors``: how a server ends a call, and what its caller makes of it.

The status code is for gRPC and for peers of other versions; the error's own class travels by name in the
trailing metadata, so that both ends speak of the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from atoll import errors
from atoll.errors import (
    AccessDenied,
    AtollError,
    BadFrame,
    ConnectionFailed,
    PlanError,
    ProtocolMismatch,
    StorageError,
    UsageError,
)
from protos.certificate_words import refused_server
from protos.text_limits import clean

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

Ended = grpc.Call | grpc.aio.AioRpcError
"""A call that has, of either kind, with its status."""
ERROR_NAME = "atoll-error"  # trailing metadata: the class of atoll.errors that the server raised
MAX_TEXT_CHARS = 16_384
MAX_LINE_CHARS = 400
_CODES: tuple[tuple[type[AtollError], grpc.StatusCode], ...] = (
    (AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (ProtocolMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (PlanError, grpc.StatusCode.FAILED_PRECONDITION),
    (ConnectionFailed, grpc.StatusCode.UNAVAILABLE),
    (StorageError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (BadFrame, grpc.StatusCode.INVALID_ARGUMENT),
)
# Of calls that no handler of ours ended, or one of a version that sends no name.
_KINDS: dict[grpc.StatusCode, type[AtollError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.NOT_FOUND: UsageError,
    grpc.StatusCode.ALREADY_EXISTS: UsageError,
    grpc.StatusCode.OUT_OF_RANGE: UsageError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.FAILED_PRECONDITION: PlanError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StorageError,
    grpc.StatusCode.ABORTED: AtollError,
}
_NOT_VERIFIED = ("certificate_verify_failed", "verify failed", "peer name")
# A connection that breaks during a handshake also mentions it: only these are about TLS itself.
_NOT_TLS = ("certificate", "wrong_version_number", "ssl_error_ssl")


async def refuse(context: Context, error: AtollError) -> NoReturn:
    """End a call with a status code, the error's words, and its class's name in the trailing metadata."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.ABORTED)
    context.set_trailing_metadata(((ERROR_NAME, type(error).__name__),))
    await context.abort(code, str(error))
    raise AssertionError("abort returned")


def to_atoll_error(
    error: Exception | Ended, address: str, ca_pem: bytes | None = None, *, lines: bool = False
) -> AtollError:
    """Return the error that a failed call to ``address`` stands for: what went wrong, and what to do.

    ``ca_pem``: what the server's certificate was checked against, where a reason for refusing it shall be
    looked up, which connects once more. ``lines``: words of several lines are welcome, up to 16 KiB.
    """
    if not isinstance(error, Ended):
        return ConnectionFailed(f"the call to {address} failed: {error}; try again")
    code = error.code()
    words = clean(error.details() or "", MAX_TEXT_CHARS if lines else MAX_LINE_CHARS, lines=lines)
    kind = _named(error) or _KINDS.get(code)
    if kind is not None:
        return kind(words or f"{address} answered {code.name}; see its log")
    match code:
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(f"{address} does not know this call ({words}); update the older side")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ConnectionFailed(
                f"{address} did not answer in time; is the address right, and the machine not overloaded? "
                "try again"
            )
        case grpc.StatusCode.UNAVAILABLE:
            return _unreachable(words, error, address, ca_pem)
        case grpc.StatusCode.CANCELLED:
            return ConnectionFailed(
                f"{address} ended the call, as one that stops does; is `atoll serve` running there? try again"
            )
    return ConnectionFailed(f"{address} answered {code.name}: {words}; try again, and see its log")


def _named(error: Ended) -> type[AtollError] | None:
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == ERROR_NAME:
            kind = getattr(errors, str(value), None)
            if isinstance(kind, type) and issubclass(kind, AtollError):
                return kind
    return None


def _unreachable(words: str, error: Ended, address: str, ca_pem: bytes | None) -> AtollError:
    everything = (words + str(getattr(error, "debug_error_string", str)())).lower()
    if any(word in everything for word in _NOT_VERIFIED):
        return refused_server(address, ca_pem)
    # The transport library's chain of causes: only the last says what happened.
    cause = words.rpartition("remote host: ")[2].rpartition("last error: ")[2].rstrip(") ")[:160]
    if any(word in everything for word in _NOT_TLS):
        return AccessDenied(
            f"no TLS session with {address} ({cause}); is it the coordinator's entry port? if it was started "
            "with --insecure, give --insecure here"
        )
    return ConnectionFailed(
        f"no coordinator answers at {address} ({cause or 'unavailable'}); is `atoll serve` running there, "
        "and is the port open?"
    )
