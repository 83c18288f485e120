"""Every kind of message is read as it was written, and no bytes make a reader do worse than refuse."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atoll.dataset_spec import DataSpec
from atoll.errors import AtollError
from atoll.federated import FederatedSpec
from atoll.job import TrainingSpec
from atoll.messages import from_worker as told
from atoll.messages import to_worker as asked
from atoll.opdag import OpNode
from atoll.plan import Plan
from atoll.program import StageProgram
from protos import atoll_control_pb2 as pb
from protos import session
from tests.protos import recorded
from tests.protos.values import WORDS, values

TICKETS = st.builds(
    asked.RelayOffer,
    st.just((("", 7702), ("192.0.2.1", 7702))),
    st.just(b"t" * 75),
    st.just(b"k" * 32),
    st.booleans(),
    st.floats(0, 60),
    st.floats(0, 1e6),
)
OWN: dict[Any, st.SearchStrategy[Any]] = {
    Plan: st.sampled_from([recorded.PLAN, recorded.REPLICAS]),
    StageProgram: st.just(recorded.program()),
    OpNode: st.just(recorded.LAST),
    TrainingSpec: st.just(recorded.TRAINING),
    DataSpec: st.just(recorded.DATA),
    FederatedSpec: st.just(recorded.FEDERATED),
    asked.RelayOffer: TICKETS,
    told.PeerJoined: st.builds(told.PeerJoined, WORDS, st.sampled_from(["", "direct", "relayed"]), WORDS),
}
HASHES = st.sets(st.binary(min_size=32, max_size=32), max_size=3)
OWN[told.HeldWeights] = HASHES.map(lambda found: told.HeldWeights(b"".join(sorted(found))))
OWN[asked.Assign] = values(asked.Assign, OWN).map(lambda found: replace(found, rank=0))
OWN[asked.Reconfigure] = values(asked.Reconfigure, OWN).map(
    lambda found: replace(found, job=found.plan.job, version=found.plan.version)
)
KINDS = [
    *((name, kind, pb.FromWorker) for name, kind in session.FROM_WORKER.items()),
    *((name, kind, pb.ToWorker) for name, kind in session.TO_WORKER.items()),
]
"""Every kind of a session's stream."""


def sent(value: Any, stream: Any) -> Any:
    """Return what the other end reads."""
    write, read = {
        pb.FromWorker: (session.to_coordinator, session.from_worker),
        pb.ToWorker: (session.said_to_worker, session.to_worker),
    }[stream]
    return read(stream.FromString(write(value).SerializeToString()))  # type: ignore[operator]


@pytest.mark.parametrize(("name", "kind", "stream"), KINDS, ids=lambda value: str(value)[:24])
def test_every_message_is_read_as_it_was_written(name: str, kind: type, stream: Any) -> None:
    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(values(kind, OWN))
    def comes_back(value: Any) -> None:
        try:
            found = sent(value, stream)
        except AtollError:  # some of its fields do not go together
            assume(False)
        assert found == value

    comes_back()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([session.from_worker, session.to_worker]), st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(read: Any, raw: bytes) -> None:
    stream = pb.FromWorker if read is session.from_worker else pb.ToWorker
    with contextlib.suppress(AtollError, DecodeError):
        read(stream.FromString(raw))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(recorded.recorded().items())), st.data())
def test_a_message_with_some_bytes_changed_is_read_or_refused(
    frame: tuple[str, list[str]], data: st.DataObject
) -> None:
    _, (kind, digits) = frame
    readers = {"FromWorker": session.from_worker, "ToWorker": session.to_worker}
    assume(kind in readers)
    raw = bytearray.fromhex(digits)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(AtollError, DecodeError):
        readers[kind](getattr(pb, kind).FromString(bytes(raw)))
