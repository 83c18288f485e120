"""The coordinator's greeting, which anybody may ask for: versions, clock, authorities."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from atoll.errors import ProtocolMismatch
from atoll.version import __version__
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos.grpc_errors import to_atoll_error
from protos.text_limits import clean
from worker.control.calls import answer

CALL_TIMEOUT_S = 5.0


def greet(
    stub: Any,
    address: str,
    ca_pem: bytes | None,
    timeout_s: float = CALL_TIMEOUT_S,
    stopped: Callable[[float], bool] = lambda _: False,
) -> tuple[pb.HelloReply, float]:
    """The coordinator's greeting, and the seconds it took; ``ca_pem``: what it is checked against.

    Raises ProtocolMismatch, AccessDenied, ConnectionFailed.
    """
    request = pb.HelloRequest(protocol=PROTOCOL_VERSION, version=__version__)
    started_s = time.perf_counter()
    try:
        reply: pb.HelloReply = answer(stub.Hello.future(request, timeout=timeout_s), stopped)
    except grpc.RpcError as error:
        raise to_atoll_error(error, address, ca_pem) from None
    took_s = time.perf_counter() - started_s
    if reply.protocol != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"{address} speaks protocol {reply.protocol} (atoll {clean(reply.version, 20)}), this worker "
            f"{PROTOCOL_VERSION} (atoll {__version__}); update the older of the two"
        )
    return reply, took_s
