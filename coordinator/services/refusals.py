"""How the coordinator ends a call that it refuses: a status code, the message, the error's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import grpc

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

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

ERROR_NAME = (
    "atoll-error"  # trailing metadata: the class of atoll.errors; coordinator/client/calls.py reads it
)
_CODES: tuple[tuple[type[AtollError], grpc.StatusCode], ...] = (
    (AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (ProtocolMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (PlanError, grpc.StatusCode.FAILED_PRECONDITION),
    (ConnectionFailed, grpc.StatusCode.UNAVAILABLE),
    (StorageError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (BadFrame, grpc.StatusCode.INVALID_ARGUMENT),
)


async def refuse(context: Context, error: AtollError) -> NoReturn:
    """End the call with what ``error`` says."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.ABORTED)
    context.set_trailing_metadata(((ERROR_NAME, type(error).__name__),))
    await context.abort(code, str(error))
    raise AssertionError("abort returned")
