"""What a message may cost, found out before it is parsed.

Parsed, a message of many empty parts takes up to 35 times its bytes: a part of two bytes becomes an object of
some 60. So each kind has a bound of bytes, small where nothing large belongs into it. In a message that is
larger than most the parts are counted on the bytes themselves: they may be as dense as those of the graphs,
plans and lists that honest machines send, and no denser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from atoll.errors import BadFrame
from hostos.units import MIB

KIB = 2**10
SMALL_BYTES = 64 * KIB  # of a kind that is not named below
COUNTED_FROM = 256 * KIB  # bytes of a message: a smaller one takes 9 MB at most
FREE_PARTS = 65_536  # of any message, beside ...
BYTES_A_PART = 5  # ... one in so many bytes; graphs have one in 7 to 12, lists of blobs one in 35
MOST_PARTS = 2_000_000  # of any message: 160 MB; 140,000 ops
NUMBERS_A_PART = 4  # packed: each becomes 4 or 8 bytes
MAX_DEPTH = 64
MAX_FIELDS = 64  # of an envelope: a kind that comes again is merged with what was before
M = TypeVar("M", bound=Message)

MOST_BYTES: Mapping[str, int] = {
    # a worker's session, to the coordinator
    "Introduction": MIB,
    "OpsProbed": 8 * MIB,
    "Loaded": 16 * MIB,
    "StepReady": 2 * MIB,
    "StateStored": 16 * MIB,
    "Spans": 4 * MIB,
    "WorkerLog": 256 * KIB,
    "HeldWeights": MIB,
    "UpdateReady": 4 * MIB,
    "SecureAnswer": 2 * MIB,
    "ClientEvaluated": 16 * MIB,
    # and to the worker
    "ProbeOps": 32 * MIB,
    "Assign": 64 * MIB,
    "Participate": 64 * MIB,
    "Reconfigure": 8 * MIB,
    "KeepCopies": 8 * MIB,
    "Standbys": MIB,
    "StepCommit": 4 * MIB,
    "TrainRound": 2 * MIB,
    "SecureOrder": MIB,
    "EvaluateRound": MIB,
    "RoundTaken": MIB,
    # the owner's calls
    "SubmitRequest": 64 * MIB,
    "PlanRequest": 4 * MIB,
    "ForgetJobsRequest": MIB,
    "EchoChunk": 2 * MIB,
    # blobs, data
    "BlobList": 16 * MIB,
    "BlobPatches": 16 * MIB,
    "BlobChunk": 16 * MIB,
    "BatchRequest": MIB,
    "Batch": 64 * MIB,
    # apps
    "AppOpen": 12 * MIB,
    "AppBegin": 8 * MIB,
    "AppTask": 32 * MIB,
    "AppCancel": 8 * MIB,
    "AppForget": 16 * MIB,
    "AppReply": 32 * MIB,
    "AppStart": 8 * MIB,
    "PartList": 16 * MIB,
    "PartChunk": 16 * MIB,
    # a process and its child
    "ComputeSetup": MIB,
    "MeshLoad": 64 * MIB,
    "ComputeStep": 4 * MIB,
    "ComputeRound": MIB,
    "ComputeJoin": 64 * MIB,
    "Arrived": MIB,
    "FetchedBatch": 64 * MIB,
    "ComputeReady": MIB,
    "Posted": 16 * MIB,
    "FromWorker": 16 * MIB,
    "WantedList": 64 * MIB,
    "Outgoing": MIB,
    "FetchBlobs": 64 * MIB,
    "StoreFiles": 64 * MIB,
    "FetchBatches": MIB,
    "codec_speeds": MIB,
}
"""Bytes of a message of this kind, or of a field that is none."""

_Fields = dict[int, Any]  # of a message: what its parts are; none for text and bytes
_PACKED = object()
_known: dict[str, _Fields] = {}
_NUMBERS = frozenset(
    {
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_BOOL,
        FieldDescriptor.TYPE_ENUM,
    }
)


def read(kind: type[M], data: bytes) -> M:
    """Parse a message, once it is known to be worth it. Raises BadFrame."""
    check(kind.DESCRIPTOR, data)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise BadFrame(f"{len(data)} bytes are no {kind.DESCRIPTOR.name}") from None


def reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """``read`` in place of a message class's FromString; any other function as it is."""
    kind = getattr(parse, "__self__", None)
    return partial(read, kind) if isinstance(kind, type) and issubclass(kind, Message) else parse


class Careful:
    """A channel whose replies are parsed by ``read``."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __enter__(self) -> Careful:
        self._channel.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._channel.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in _CALLS:
            return found

        def opened(path: str, *given: Any, response_deserializer: Any = None, **more: Any) -> Any:
            parse = reader(response_deserializer) if response_deserializer is not None else None
            return found(path, *given, response_deserializer=parse, **more)

        return opened


_CALLS = frozenset({"unary_unary", "unary_stream", "stream_unary", "stream_stream"})


def check(descriptor: Any, data: bytes) -> None:
    """Raise BadFrame for a message that is larger than one of its kind may be, or of more parts."""
    if len(data) <= SMALL_BYTES:
        return
    try:
        if any(oneof.name == "body" for oneof in descriptor.oneofs):
            _check_envelope(descriptor, data)
        elif len(data) > (most := MOST_BYTES.get(descriptor.name, SMALL_BYTES)):
            raise BadFrame(f"a {descriptor.name} of {len(data)} bytes; at most {most} are taken")
        if len(data) > COUNTED_FROM:
            _count(data, _fields(descriptor))
    except IndexError:
        raise BadFrame(f"{len(data)} bytes are no {descriptor.name}: they end too early") from None


def _check_envelope(descriptor: Any, data: bytes) -> None:
    """Bound each kind that is in it, all of its fields together, and their number."""
    at, end, count, of_each = 0, len(data), 0, dict[int, int]()
    while at < end:
        begun = at
        at, tag = _varint(data, at)
        at = _skipped(data, at, tag & 7)
        number = tag >> 3
        of_each[number] = of_each.get(number, 0) + at - begun
        count += 1
        if count > MAX_FIELDS:
            raise BadFrame(f"a {descriptor.name} of more than {MAX_FIELDS} fields")
    for number, n_bytes in of_each.items():
        field = descriptor.fields_by_number.get(number)
        if field is None:
            name, most = f"field {number}", SMALL_BYTES
        else:
            name = field.message_type.name if field.message_type is not None else field.name
            most = MIB if field.is_repeated else MOST_BYTES.get(name, SMALL_BYTES)
        if n_bytes > most:
            raise BadFrame(f"a {descriptor.name} with {name} of {n_bytes} bytes; at most {most} are taken")


def _count(data: bytes, fields: _Fields) -> None:
    """Raise BadFrame where the parts so far are too many for the bytes that they take."""
    at, end, parts = 0, len(data), 0
    outer: list[tuple[int, _Fields]] = []
    while True:
        while at >= end:
            if at > end:
                raise IndexError
            if not outer:
                return
            end, fields = outer.pop()
        tag = data[at]
        at += 1
        if tag > 127:
            at, tag = _varint(data, at - 1)
        if tag & 7 != 2:
            at = _skipped(data, at, tag & 7)
            continue
        size = data[at]
        at += 1
        if size > 127:
            at, size = _varint(data, at - 1)
        if at + size > end:
            raise IndexError
        parts += 1
        inner = fields.get(tag >> 3)
        if inner is None:
            at += size
        elif inner is _PACKED:
            at += size
            parts += size // NUMBERS_A_PART
        else:
            outer.append((end, fields))
            end, fields = at + size, inner
            if len(outer) > MAX_DEPTH:
                raise BadFrame(f"a message whose parts are nested deeper than {MAX_DEPTH}")
        if parts > min(MOST_PARTS, FREE_PARTS + at // BYTES_A_PART):
            raise BadFrame(
                f"a message of {len(data)} bytes with {parts} parts in its first {at}; at most {FREE_PARTS} "
                f"and one in {BYTES_A_PART} bytes are taken, {MOST_PARTS} in all"
            )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Where it ends, and its value."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return at, value
        shift += 7
        if shift > 63:
            raise BadFrame("a number of more than 64 bits")


def _skipped(data: bytes, at: int, wire: int) -> int:
    """Where the field ends whose content begins at ``at``."""
    match wire:
        case 0:
            return _varint(data, at)[0]
        case 1:
            at += 8
        case 2:
            at, size = _varint(data, at)
            at += size
        case 5:
            at += 4
        case _:
            raise BadFrame(f"a field of wire type {wire}")
    if at > len(data):
        raise IndexError
    return at


def _fields(descriptor: Any) -> _Fields:
    """What the parts of a message are, by number; messages may hold their own kind."""
    known = _known.get(descriptor.full_name)
    if known is None:
        known = _known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                known[field.number] = _fields(field.message_type)
            elif field.is_repeated and field.type in _NUMBERS:
                known[field.number] = _PACKED
    return known
