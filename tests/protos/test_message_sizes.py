"""A message costs what its kind may, which is found out before it is parsed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from atoll.errors import BadFrame
from protos import atoll_apps_pb2 as apps_pb
from protos import atoll_compute_pb2 as compute_pb
from protos import atoll_control_pb2 as pb
from protos import atoll_job_pb2 as job_pb
from protos.message_sizes import COUNTED_FROM, MOST_BYTES, SMALL_BYTES, read
from tests.interrupts import ROOT

if TYPE_CHECKING:
    from google.protobuf.message import Message

ENVELOPES: list[type[Message]] = [
    pb.FromWorker, pb.ToWorker, compute_pb.FromCompute, compute_pb.ToCompute,
    apps_pb.FromApp, apps_pb.ToApp, apps_pb.FromNode, apps_pb.ToNode,
]  # fmt: skip
REQUESTS: list[type[Message]] = [
    pb.SubmitRequest, pb.PlanRequest, pb.ForgetJobsRequest, pb.BlobList, pb.BatchRequest, pb.EnrollReply,
    pb.HelloReply, apps_pb.PartList,
]  # fmt: skip
HOSTILE_BYTES = 24 << 20


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def hostile(n_bytes: int, part: bytes = b"\x0a\x00") -> bytes:
    return part * (n_bytes // len(part))


def kinds() -> Iterator[tuple[type[Message], int]]:
    """Each kind, and its number in an envelope, 0 where it has none."""
    for envelope in ENVELOPES:
        for one in envelope.DESCRIPTOR.fields:
            if one.message_type is not None:
                yield envelope, one.number
    for request in REQUESTS:
        yield request, 0


@pytest.mark.parametrize("part", [b"\x0a\x00", b"\x12\x00", b"\x0a\x02\x0a\x00"], ids=["1", "2", "nested"])
def test_24_mib_of_empty_parts_are_refused_unparsed_whatever_they_are_called(part: bytes) -> None:
    content, tried = hostile(HOSTILE_BYTES, part), 0
    for kind, number in kinds():
        parsed = list[bytes]()
        recording: Any = type("Recording", (), {"DESCRIPTOR": kind.DESCRIPTOR, "FromString": parsed.append})
        with pytest.raises(BadFrame, match="bytes"):
            read(recording, field(number, content) if number else content)
        assert parsed == []
        tried += 1
    assert tried > 80


def test_a_kind_that_comes_in_many_pieces_counts_as_one() -> None:
    piece = field(pb.ToWorker.KEEP_COPIES_FIELD_NUMBER, hostile(SMALL_BYTES))
    with pytest.raises(BadFrame, match=r"more than 64 fields"):
        read(pb.ToWorker, piece * 200)
    with pytest.raises(BadFrame, match=r"Standbys of \d+ bytes; at most"):
        read(pb.ToWorker, field(100, hostile(SMALL_BYTES)) * 40)


def test_numbers_that_are_packed_count_as_well() -> None:
    with pytest.raises(BadFrame, match="parts in its first"):
        read(pb.BatchRequest, field(3, b"x" * 10) + hostile(1 << 20)[: MOST_BYTES["BatchRequest"] - 100])
    shape = field(5, b"\x01" * (8 << 20))
    with pytest.raises(BadFrame, match="parts in its first"):
        read(pb.Batch, shape)


def op(rng: Random, number: int) -> job_pb.PlacedOp:
    name = f"add_tensor_{number}"
    args = [
        job_pb.Arg(op=rng.randrange(10_000)),
        job_pb.Arg(leaf=job_pb.LeafRef(source="param", name=f"transformer.h.{number % 48}.attn.weight")),
        job_pb.Arg(tuple=job_pb.ArgTuple(items=[job_pb.Arg(integer=rng.randrange(4096)) for _ in range(4)])),
    ]
    outputs = [job_pb.TensorMeta(shape=[4, 128, 768], dtype="float32")]
    node = job_pb.OpNode(name=name, kind="op", target="aten.add.Tensor", args=args, outputs=outputs)
    return job_pb.PlacedOp(position=number, node=node)


def test_large_honest_messages_pass_unchanged() -> None:
    rng = Random(4711)
    program = job_pb.StageProgram(ops=[op(rng, number) for number in range(12_000)])
    blobs = [pb.BlobRef(hash=f"{number:064x}", size=rng.randrange(1 << 30)) for number in range(50_000)]
    roster = [pb.RosterEntry(client=f"client-{number}", n_samples=number) for number in range(100_000)]
    digests = [pb.StepDigest(gradients=bytes(8), inputs=bytes(8)) for _ in range(8192)]
    spans = [
        pb.Span(kind="recv", step=number, start_s=0.5, end_s=1.5, peer="w-0123456789abcdef", bytes=1 << 20)
        for number in range(2000)
    ]
    timings = [
        pb.OpTiming(signature=f"{number:064x}", forward_s=0.5, backward_s=0.5) for number in range(4096)
    ]
    copies = [pb.StageCopy(job="job-1", name=f"copy-{number}", blobs=blobs[:300]) for number in range(100)]
    for message in (
        pb.ToWorker(assign=pb.Assign(job="j", program=program, eval_program=program)),
        pb.ToWorker(keep_copies=pb.KeepCopies(copies=copies)),
        pb.FromWorker(loaded=pb.Loaded(job="j", clients=roster, repeated_digests=digests)),
        pb.FromWorker(spans=pb.Spans(job="j", spans=spans)),
        pb.FromWorker(ops_probed=pb.OpsProbed(timings=timings)),
        pb.BlobList(blobs=blobs),
        pb.Batch(data=bytes(20 << 20), shape=[4, 1 << 20]),
        compute_pb.FromCompute(fetch=compute_pb.FetchBlobs(blobs=blobs)),
        compute_pb.ToCompute(load=pb.Assign(job="j", program=program)),
    ):
        data = message.SerializeToString()
        assert len(data) > SMALL_BYTES
        assert read(type(message), data) == message


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
def test_a_large_message_that_is_cut_off_is_refused_in_words(cut: int) -> None:
    blobs = [pb.BlobRef(hash=f"{number:064x}", size=7) for number in range(10_000)]
    data = pb.BlobList(blobs=blobs).SerializeToString()
    assert len(data) > COUNTED_FROM
    with pytest.raises(BadFrame, match="BlobList"):
        read(pb.BlobList, data[:-cut])


def test_random_bytes_are_refused_or_parsed_and_never_raise_anything_else() -> None:
    rng = Random(4711)
    for _ in range(300):
        data = bytearray(field(4, rng.randbytes(rng.randrange(SMALL_BYTES, 2 * COUNTED_FROM))))
        data[0:2] = varint(rng.randrange(1 << 14))
        for kind in (pb.ToWorker, pb.BlobList, pb.Assign):
            with suppress(BadFrame):
                read(kind, bytes(data))


PEAK = """
import resource, sys
from atoll.errors import BadFrame
from protos import atoll_control_pb2 as pb
from protos.message_sizes import read
number, n_bytes = int(sys.argv[1]), 24 << 20
inner = b"\\x0a\\x00" * (n_bytes // 2)
head = pb.ToWorker(keep_copies=pb.KeepCopies()).SerializeToString()[:-1]
def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128]); value >>= 7
    return out + bytes([value])
data = varint(number << 3 | 2) + varint(n_bytes) + inner
del inner
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read(pb.ToWorker, data)
except BadFrame:
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("body", ["keep_copies", "assign"])
def test_the_memory_that_a_hostile_message_takes_is_less_than_its_own_size(body: str) -> None:
    number = pb.ToWorker.DESCRIPTOR.fields_by_name[body].number
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, str(number)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert int(ran.stdout) * 1024 < HOSTILE_BYTES
