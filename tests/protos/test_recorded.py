"""The bytes of every message are those of the commit before: peers of the same protocol read each other."""

from __future__ import annotations

from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos import session
from protos.convert import from_proto, to_proto
from tests.protos import recorded

READ_ONLY = {"spans", "log"}
FRAMES = recorded.recorded()


def test_what_a_coordinator_says_is_written_with_the_bytes_of_before() -> None:
    for name, message in recorded.to_workers().items():
        assert recorded.frame_of(message) == FRAMES[name], name


def test_what_a_coordinator_says_is_written_again_as_it_was_read() -> None:
    for name, (kind, frame) in FRAMES.items():
        if kind != "ToWorker":
            continue
        message = pb.ToWorker.FromString(bytes.fromhex(frame))
        assert session.said_to_worker(session.to_worker(message)) == message, name


def test_what_workers_say_is_written_again_as_it_was_read() -> None:
    for name, (kind, frame) in FRAMES.items():
        if kind != "FromWorker" or name in READ_ONLY or name.startswith("introduction"):
            continue
        message = pb.FromWorker.FromString(bytes.fromhex(frame))
        assert session.to_coordinator(session.from_worker(message)) == message, name


def test_jobs_graphs_and_plans_are_written_again_as_they_were_read() -> None:
    for name, (kind, frame) in FRAMES.items():
        if hasattr(job_pb, kind):
            message = getattr(job_pb, kind).FromString(bytes.fromhex(frame))
            assert to_proto(from_proto(message)).SerializeToString(deterministic=True).hex() == frame, name
