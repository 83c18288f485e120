"""Calls to the coordinator: failures as errors a user can act on, and retries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from hostos.retries import retrying, stop_after_pauses
from protos.credentials import JoinToken
from protos.grpc_errors import to_atoll_error

if TYPE_CHECKING:
    from tenacity import Retrying

RETRY_FOR_S = 60.0
PAUSE_MOST_S = 2.0


@contextmanager
def calling(address: str, token: JoinToken | None = None) -> Iterator[None]:
    """Inside it, a failed call raises an error of ``atoll.errors``.

    ``token``: the one it was made with, where why a certificate was refused is to be found out.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise to_atoll_error(error, address, token.ca_pem if token else None, lines=True) from None


def patiently() -> Retrying:
    """Attempts of a call that may be repeated, while the coordinator is away for a minute at most."""
    return retrying(stop_after_pauses(RETRY_FOR_S), most_s=PAUSE_MOST_S)
