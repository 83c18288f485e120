"""Fetching the authority that a short token pins: from whoever answers, and checked before it is used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from atoll.errors import AccessDenied, ConnectionFailed
from protos import atoll_control_pb2_grpc as rpc
from protos.certificate_words import shown_certificate
from protos.credentials import MAX_PEM_BYTES, opened
from worker.control.calls import LOOK_S, open_channel
from worker.control.greeting import greet

if TYPE_CHECKING:
    from protos.credentials import JoinToken
    from protos.short_tokens import ShortToken
    from worker.config import WorkerConfig

MAX_REPLY_BYTES = 2 * MAX_PEM_BYTES  # of a greeting by someone who has proven nothing yet


def opened_token(
    config: WorkerConfig, token: ShortToken, stopped: Callable[[float], bool] = lambda _: False
) -> JoinToken:
    """Return the long form of ``token``, by the authority that the coordinator's greeting shows.

    The greeting goes to whoever answers and holds no secret. Raises AccessDenied where the authority is not
    the token's or cannot be looked at, ConnectionFailed, ProtocolMismatch.
    """
    if config.use_proxy:
        raise AccessDenied(
            "a short token's authority cannot be fetched behind a proxy; take a long token, which holds it: "
            "`atoll token create --long` makes one"
        )
    address = config.entry_address
    shown = _awaited(lambda: shown_certificate(address), stopped)
    with open_channel(address, shown, None, MAX_REPLY_BYTES, use_proxy=False) as channel:
        reply, _ = greet(rpc.EntryStub(channel), address, shown, stopped=stopped)
    return opened(token, reply.authorities.ca_pem)


def _awaited(work: Callable[[], bytes], stopped: Callable[[float], bool]) -> bytes:
    """The result of ``work``, which a worker that stops need not wait for. Raises ConnectionFailed then."""
    found: Future[bytes] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            found.set_exception(error)

    threading.Thread(target=run, name="atoll-shown", daemon=True).start()
    while True:
        try:
            return found.result(LOOK_S)
        except TimeoutError:
            if found.done():
                raise
            if stopped(0.0):
                raise ConnectionFailed("stopped while waiting for an answer") from None
