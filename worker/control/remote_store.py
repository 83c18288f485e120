"""The coordinator's Data service: micro-batches as they come, for whoever looks into them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.grpc_errors import to_atoll_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.manners.traffic import Traffic


def batches(
    channel: grpc.Channel, metadata: Sequence[tuple[str, str]], address: str, request: pb.BatchRequest
) -> Iterator[pb.Batch]:
    """Yield what was asked for. ConnectionFailed may be tried again."""
    stub: Any = rpc.DataStub(channel)
    call = stub.Batches(request, metadata=metadata)
    try:
        yield from call
    except grpc.RpcError as error:
        raise to_atoll_error(error, address) from None
    finally:
        call.cancel()


def metered(
    batches: Callable[[pb.BatchRequest], Iterable[pb.Batch]], traffic: Traffic
) -> Callable[[pb.BatchRequest], Iterator[pb.Batch]]:
    """Return ``batches`` at the pace at which this machine may receive."""

    def paced(request: pb.BatchRequest) -> Iterator[pb.Batch]:
        for batch in batches(request):
            yield batch
            time.sleep(traffic.received(batch.ByteSize()))

    return paced
