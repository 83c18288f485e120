"""A tensor message's key on the pipe."""

from __future__ import annotations

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from worker.transport.frames import Direction, MessageKey


def to_key(key: MessageKey) -> pb.Key:
    """Encode a key."""
    return pb.Key(
        job=key.job,
        plan_version=key.plan_version,
        step=key.step,
        micro=key.micro,
        edge=key.edge,
        direction=key.direction,
    )


def from_key(key: pb.Key) -> MessageKey:
    """Decode a key. Raises BadFrame."""
    try:
        direction = Direction(key.direction)
    except ValueError:
        raise BadFrame(f"direction {key.direction} of a message") from None
    return MessageKey(key.job, key.plan_version, key.step, key.micro, key.edge, direction)
