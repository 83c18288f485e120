"""What this machine has given to its coordinator's jobs, as the coordinator has added it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc
from protos.credentials import authorities_in
from protos.grpc_errors import to_atoll_error
from protos.receipts import Receipt, checked
from worker.control.calls import answer
from worker.control.enroll import join

if TYPE_CHECKING:
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership

ANSWER_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Given:
    """Sums over all days that the coordinator keeps, at most 400."""

    since: str  # UTC day, "" where nothing was given
    days: int
    steps: int
    samples: int
    compute_s: float
    bytes_in: int
    bytes_out: int
    pending_steps: int
    discarded_steps: int
    energy_j: float = 0.0  # 0: not measured


def ask_given(config: WorkerConfig) -> Given:
    """Ask the coordinator that this machine joined. Raises ConnectionFailed or AccessDenied."""
    return summed(_asked(config, _member(config), lambda stub: stub.Given))


def ask_receipt(config: WorkerConfig) -> Receipt:
    """Ask for a receipt of what this machine has given, and check it. Raises ConnectionFailed or
    AccessDenied."""
    member = _member(config)
    reply: pb.ReceiptReply = _asked(config, member, lambda stub: stub.Receipt)
    receipt = Receipt(reply.statement, reply.signature, reply.authority_pem)
    if member.identity is not None:
        checked(receipt, authorities_in(member.identity.ca_pem))
    return receipt


def _member(config: WorkerConfig) -> Membership:
    """The membership that this machine has; one that was refused is not waited for."""
    return join(replace(config, connect_timeout_s=0.0), lambda _: True)


def _asked(config: WorkerConfig, member: Membership, method: Callable[[Any], Any]) -> Any:
    """The reply to a call of ``rpc.WorkStub`` that takes nothing."""
    with member.channel(config) as channel:
        call = method(rpc.WorkStub(channel)).future(
            pb.Empty(), timeout=ANSWER_WITHIN_S, metadata=member.metadata
        )
        try:
            return answer(call, lambda _: False)
        except grpc.RpcError as error:
            raise to_atoll_error(error, member.work_address) from None


def summed(reply: pb.CreditList) -> Given:
    """Return the sums of a machine's devices, owners and days. What is not stored yet counts, too."""
    rows = reply.credits
    days = {row.day for row in rows}
    done = [work for row in rows for work in (row.useful, row.pending)]
    return Given(
        since=min(days, default=""),
        days=len(days),
        steps=sum(work.steps for work in done),
        samples=sum(work.samples for work in done),
        compute_s=sum(work.computed_ms for work in done) / 1e3,
        bytes_in=sum(work.received_bytes for work in done),
        bytes_out=sum(work.sent_bytes for work in done),
        pending_steps=sum(row.pending.steps for row in rows),
        discarded_steps=sum(row.discarded.steps for row in rows),
        energy_j=sum(work.energy_mj for work in done) / 1e3,
    )
