"""Flower's records as small messages and content-addressed parts, and back; no pickle anywhere.

An array's bytes travel as the app made them (dtype, shape and serialisation beside them), as a
part named by their SHA-256, so what the other end already has is not sent again. What arrives is
bounded and checked; numbers, texts and short bytes stand in the message itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from atoll.errors import BadFrame
from protos import atoll_apps_pb2 as pb
from protos import bounds

MAX_CONTENT_BYTES = 16 << 20  # of one message without its parts
MAX_PART_BYTES = 64 << 30
MAX_PARTS = 100_000
MAX_DIMS = 64
MAX_KEY_CHARS = 4096
SHORT_BYTES = 4096  # longer bytes of a config travel as a part
INLINE_PART_BYTES = 256 << 10
INLINE_BYTES = 1 << 20  # of all parts in one message
_INT64 = range(-(2**63), 2**63)
_HASH_SLOT = "_atoll_hash"
Record = ArrayRecord | MetricRecord | ConfigRecord


@dataclass(slots=True)
class Encoded:
    """A record dict on its way: the message's body and what it refers to, by hash."""

    content: bytes = b""
    parts: dict[str, bytes] = field(default_factory=dict)


def part_hash(data: bytes) -> str:
    """The name of a part."""
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------- out


def encode(records: RecordDict) -> Encoded:
    """The records as content and parts; ValueError for what no message can hold."""
    made = Encoded()
    content = pb.AppContent(records=[_record(name, record, made) for name, record in records.items()])
    made.content = content.SerializeToString()
    if len(made.content) > MAX_CONTENT_BYTES or len(made.parts) > MAX_PARTS:
        raise ValueError(
            f"a message of {len(made.content)} bytes beside {len(made.parts)} arrays; at most "
            f"{MAX_CONTENT_BYTES} bytes and {MAX_PARTS} arrays are possible: put numbers into arrays"
        )
    return made


def _record(name: str, record: Record, made: Encoded) -> pb.AppRecord:
    if isinstance(record, ArrayRecord):
        arrays = [_array(key, array, made) for key, array in record.items()]
        return pb.AppRecord(name=name, kind=pb.APP_RECORD_ARRAYS, arrays=arrays)
    kind = pb.APP_RECORD_METRICS if isinstance(record, MetricRecord) else pb.APP_RECORD_CONFIGS
    entries = [pb.AppEntry(key=key, value=_value(value, made)) for key, value in record.items()]
    return pb.AppRecord(name=name, kind=kind, entries=entries)


def _array(key: str, array: Array, made: Encoded) -> pb.AppArray:
    name = _array_hash(array)
    made.parts[name] = array.data
    return pb.AppArray(
        key=key, dtype=array.dtype, shape=array.shape, stype=array.stype, hash=name, size=len(array.data)
    )


def _array_hash(array: Array) -> str:
    """Return the hash of the array's bytes, cached on the array, since a model is sent to many nodes and
    often twice. An array whose bytes were replaced is hashed again."""
    known = array.__dict__.get(_HASH_SLOT)
    if known is not None and known[0] is array.data:
        return str(known[1])
    name = part_hash(array.data)
    array.__dict__[_HASH_SLOT] = (array.data, name)
    return name


def value_to_proto(value: Any) -> pb.AppValue:
    """A number, bool, text or short bytes, or a list of them; ValueError for others."""
    return _value(value, Encoded())


def _value(value: Any, made: Encoded) -> pb.AppValue:
    if isinstance(value, bool):
        return pb.AppValue(flag=value)
    if isinstance(value, int):
        if int(value) not in _INT64:
            raise ValueError(f"{value} needs more than 64 bits; put it into a text")
        return pb.AppValue(integer=int(value))
    if isinstance(value, float):
        return pb.AppValue(number=float(value))
    if isinstance(value, str):
        return pb.AppValue(text=value)
    if isinstance(value, bytes):
        if len(value) <= SHORT_BYTES:
            return pb.AppValue(data=value)
        name = part_hash(value)
        made.parts[name] = value
        return pb.AppValue(part=pb.Part(hash=name, size=len(value)))
    if isinstance(value, list):
        return pb.AppValue(list=pb.AppList(values=[_value(item, made) for item in value]))
    raise ValueError(f"{type(value).__name__} cannot travel in a record")


def inlined(parts: Mapping[str, bytes], known: Iterable[str] = ()) -> list[pb.Part]:
    """The parts of a message, small ones with their bytes as far as there is room; those that are
    ``known`` at the other end without."""
    there, room = set(known), INLINE_BYTES
    found = []
    for name, data in parts.items():
        fits = name not in there and len(data) <= min(INLINE_PART_BYTES, room)
        room -= len(data) if fits else 0
        found.append(pb.Part(hash=name, size=len(data), data=data if fits else b""))
    return found


# ---------------------------------------------------------------- in


def decode(content: bytes, read: Callable[[str, int], bytes]) -> RecordDict:
    """The records of a message; ``read(hash, size)`` gives a part's bytes.

    BadFrame when it is no content or breaks a bound.
    """
    if len(content) > MAX_CONTENT_BYTES:
        raise BadFrame(f"a message of {len(content)} bytes; at most {MAX_CONTENT_BYTES} are accepted")
    message = pb.AppContent()
    try:
        message.ParseFromString(content)
    except Exception as error:  # noqa: BLE001 - protobuf's own error class is not public
        raise BadFrame(f"a message that is no content: {error}") from None
    found = RecordDict()
    for record in bounds.count("records", list(message.records), MAX_PARTS):
        found[bounds.text("record name", record.name, MAX_KEY_CHARS)] = _read_record(record, read)
    return found


def _read_record(record: pb.AppRecord, read: Callable[[str, int], bytes]) -> Record:
    if record.kind == pb.APP_RECORD_ARRAYS:
        arrays = bounds.count("arrays", list(record.arrays), MAX_PARTS)
        return ArrayRecord({_key(a.key): _read_array(a, read) for a in arrays})
    values = {_key(entry.key): _read_value(entry.value, read) for entry in record.entries}
    try:
        return MetricRecord(values) if record.kind == pb.APP_RECORD_METRICS else ConfigRecord(values)
    except TypeError as error:
        raise BadFrame(f"record {record.name[:80]!r}: {error}") from None


def _read_array(array: pb.AppArray, read: Callable[[str, int], bytes]) -> Array:
    shape = tuple(int(n) for n in bounds.count("dimensions", list(array.shape), MAX_DIMS))
    data = read(bounds.blob_hash("array", array.hash), part_size(array.size))
    made = Array(bounds.text("dtype", array.dtype, 100), shape, bounds.text("stype", array.stype, 100), data)
    made.__dict__[_HASH_SLOT] = (data, array.hash)
    return made


def _read_value(value: pb.AppValue, read: Callable[[str, int], bytes], depth: int = 0) -> Any:
    kind = value.WhichOneof("body")
    if kind == "part":
        return read(bounds.blob_hash("part", value.part.hash), part_size(value.part.size))
    if kind == "list" and depth == 0:
        return [_read_value(item, read, 1) for item in value.list.values]
    if kind is None or kind == "list":
        raise BadFrame("a record's value without content, or a list within a list")
    return getattr(value, kind)


def value_from_proto(value: pb.AppValue) -> Any:
    """The Python value; BadFrame when it is none, or refers to a part."""
    if value.WhichOneof("body") == "part":
        raise BadFrame("a configuration value that refers to a part")
    return _read_value(value, lambda name, size: b"")


def part_size(size: int) -> int:
    """A part's size within the bound."""
    return bounds.within("bytes of a part", size, 0, MAX_PART_BYTES)


def _key(key: str) -> str:
    return bounds.text("key", key, MAX_KEY_CHARS)
