"""gRPC failures as errors a user can act on, and retries of calls that may be repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from atoll import errors
from atoll.errors import (
    AccessDenied,
    AtollError,
    ConnectionFailed,
    PlanError,
    ProtocolMismatch,
    StorageError,
    UsageError,
)
from protos.app_words import clean
from protos.certificate_words import refused_server
from protos.credentials import JoinToken

ERROR_NAME = "atoll-error"  # trailing metadata: the class of atoll.errors that the server raised
RETRY_FOR_S = 60.0
MAX_DETAILS_CHARS = 16_384
_NOT_VERIFIED = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "Peer name")
_NOT_TLS = ("WRONG_VERSION_NUMBER", "wrong version number", "handshake", "Handshake", "SSL")
_BY_CODE: dict[grpc.StatusCode, type[AtollError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.NOT_FOUND: UsageError,
    grpc.StatusCode.ALREADY_EXISTS: UsageError,
    grpc.StatusCode.OUT_OF_RANGE: UsageError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.FAILED_PRECONDITION: PlanError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StorageError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolMismatch,
}
T = TypeVar("T")


def told(error: Exception, address: str, token: JoinToken | None = None) -> AtollError:
    """The error of ``atoll.errors`` that a failed call to ``address`` stands for.

    ``token``: the one it was made with, where why a certificate was refused is to be found out.
    """
    if not isinstance(error, grpc.Call):
        return ConnectionFailed(f"the call to {address} failed: {error}; try again")
    details = clean(error.details() or "", MAX_DETAILS_CHARS, lines=True)
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unreachable(details, error, address, token)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ConnectionFailed(
            f"the coordinator at {address} did not answer in time; is the address right, and the "
            f"machine not overloaded? try again"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolMismatch(f"{address} does not know this call ({details}); update the older side")
    kind = _named(error) or _BY_CODE.get(code, AtollError)
    return kind(details or f"the coordinator at {address} answered {code.name}; see its log")


def _unreachable(details: str, error: grpc.Call, address: str, token: JoinToken | None) -> AtollError:
    everything = details + str(getattr(error, "debug_error_string", lambda: "")())
    if any(word in everything for word in _NOT_VERIFIED):
        return refused_server(address, token.ca_pem if token else None)
    if any(word in everything for word in _NOT_TLS):
        return AccessDenied(
            f"no TLS session with {address}; if that coordinator runs with --insecure, give --insecure here"
        )
    return ConnectionFailed(
        f"no coordinator answers at {address}; start one with `atoll serve`, or check the address, "
        f"the port and the firewall"
    )


def _named(error: grpc.Call) -> type[AtollError] | None:
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_NAME:
            kind = getattr(errors, str(value), None)
            if isinstance(kind, type) and issubclass(kind, AtollError):
                return kind
    return None


@contextmanager
def calling(address: str, token: JoinToken | None = None) -> Iterator[None]:
    """Inside it, a failed call raises an error of ``atoll.errors``; ``token``: as in ``told``."""
    try:
        yield
    except grpc.RpcError as error:
        raise told(error, address, token) from None


def passing(error: Exception) -> bool:
    """Whether the same call may succeed a moment later, for instance after a restart."""
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE


class Patience:
    """How long to go on trying; each success starts it anew."""

    def __init__(
        self,
        limit_s: float = RETRY_FOR_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._since_s: float | None = None
        self._pause_s = 0.1

    def success(self) -> None:
        """Something was received: the next failure is a new one."""
        self._since_s = None
        self._pause_s = 0.1

    def failed(self, error: grpc.RpcError) -> None:
        """Wait before the next try; raises ``error`` when it will not pass or has lasted too long."""
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        if not passing(error) or now_s - self._since_s >= self.limit_s:
            raise error
        self._sleep(self._pause_s)
        self._pause_s = min(2.0, 2 * self._pause_s)
