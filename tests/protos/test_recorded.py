"""The bytes of every message are those of the commit before: peers of the same protocol read each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protos import atoll_control_pb2 as pb
from protos import session
from tests.protos import recorded

if TYPE_CHECKING:
    from google.protobuf.message import Message

READ_ONLY = {"spans", "log", "consent", "update", "update of a host", "update of nobody"}
UNUSED = {"BlobRef.offset", "WorkerLog.time_s"}


@pytest.fixture(scope="module")
def written() -> dict[str, Message]:
    return recorded.written()


def test_every_message_is_written_with_the_bytes_of_before(written: dict[str, Message]) -> None:
    before = recorded.recorded()
    assert {name: recorded.frame_of(said) for name, said in written.items()} == before


def fields_set(message: Message) -> set[str]:
    """``Kind.field`` of each that is set somewhere in a message."""
    found: set[str] = set()
    for field, value in message.ListFields():
        found.add(f"{message.DESCRIPTOR.name}.{field.name}")
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            found |= fields_set(part)
    return found


def all_fields(descriptor: object, known: set[str]) -> set[str]:
    """The same of all there are in a kind of message."""
    found: set[str] = set()
    if descriptor.name in known:  # type: ignore[attr-defined]
        return found
    known.add(descriptor.name)  # type: ignore[attr-defined]
    for field in descriptor.fields:  # type: ignore[attr-defined]
        found.add(f"{descriptor.name}.{field.name}")  # type: ignore[attr-defined]
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            found |= all_fields(field.message_type, known)
    return found


def test_no_field_is_left_out_of_what_is_recorded(written: dict[str, Message]) -> None:
    shown = set().union(*map(fields_set, written.values()))
    known: set[str] = set()
    there = all_fields(pb.ToWorker.DESCRIPTOR, known) | all_fields(pb.FromWorker.DESCRIPTOR, known)
    assert there - shown == UNUSED


def test_what_workers_say_is_written_again_as_it_was_read() -> None:
    for name, (kind, frame) in recorded.recorded().items():
        if kind != "FromWorker" or name in READ_ONLY or name.startswith("introduction"):
            continue
        message = pb.FromWorker.FromString(bytes.fromhex(frame))
        assert session.to_coordinator(session.from_worker(message)) == message, name
