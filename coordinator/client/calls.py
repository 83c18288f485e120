"""gRPC failures as errors a user can act on, and retries of calls that may be repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from protos.credentials import JoinToken
from protos.grpc_errors import to_atoll_error

RETRY_FOR_S = 60.0


@contextmanager
def calling(address: str, token: JoinToken | None = None) -> Iterator[None]:
    """Inside it, a failed call raises an error of ``atoll.errors``.

    ``token``: the one it was made with, where why a certificate was refused is to be found out.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise to_atoll_error(error, address, token.ca_pem if token else None, lines=True) from None


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
