"""The coordinator's Data service as what a stage's feed expects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import grpc

from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.grpc_errors import to_atoll_error
from worker.stage.batches import Arrived, Fetch

if TYPE_CHECKING:
    from collections.abc import Sequence


def data_fetch(channel: grpc.Channel, metadata: Sequence[tuple[str, str]], address: str, job: str) -> Fetch:
    """``Fetch`` of one job over one channel."""
    stub: Any = rpc.DataStub(channel)

    def fetch(evaluation: bool, inputs: tuple[str, ...], first_step: int, count: int) -> Iterable[Arrived]:
        request = pb.BatchRequest(
            job=job, evaluation=evaluation, inputs=inputs, first_step=first_step, count=count
        )
        call = stub.Batches(request, metadata=metadata)
        try:
            for b in call:
                yield Arrived(b.step, b.micro, b.input, b.dtype, tuple(b.shape), b.data)
        except grpc.RpcError as error:
            raise to_atoll_error(error, address) from None
        finally:
            call.cancel()

    return fetch
