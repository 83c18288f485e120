"""Named arrays in one file: what a broadcast or an update of a federated round is stored and sent as.

Dense: safetensors, tensors by falling element size, data aligned to 64 bytes. Coded:

    magic "ATOLLPK1" | payloads, each from a multiple of 64 bytes | directory | u64 where it begins

    directory = u8 version | 32 bytes base | 32 bytes digest | u32 entries |
                entries of (u16 name length, name, u16 header length, packet header, u64 payload bytes)

Payloads stand in the directory's order without other gaps. ``base`` and ``digest`` are SHA-256 sums
that a delta needs (``compressors.model_file``), else zeros. The same arrays give the same bytes, so a
file's SHA-256 names its content. A reader knows what it expects: every length is compared with that
before anything is allocated, and arrays are views of the mapped file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from atoll.errors import BadFrame
from atoll.opdag import DTYPE_BYTES, TensorMeta
from compressors.base import MAX_HEADER_BYTES, Packet, parse_packet
from hostos.files.refusals import disk

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Array = NDArray[Any]

MAGIC = b"ATOLLPK1"
VERSION = 1
ALIGNMENT = 64
MAX_NAME_BYTES = 4096
DIGEST_BYTES = 32
NO_DIGEST = bytes(DIGEST_BYTES)
_DIRECTORY = struct.Struct(f"<B{DIGEST_BYTES}s{DIGEST_BYTES}sI")
_LENGTH, _SIZE = struct.Struct("<H"), struct.Struct("<Q")
_ENTRY_BYTES = 256  # of a dense header's entry beside its name
SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}

Metas = Mapping[str, TensorMeta]


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that was written: its content's SHA-256 and its bytes."""

    hash: str
    size: int


class HashingFile:
    """A new file beside ``path`` whose bytes are hashed as they go; ``finish`` puts it in place.

    Left without ``finish`` it is deleted. StorageError when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._digest = hashlib.sha256()
        self.size = 0
        with disk(f"write {path}", "free space or choose another folder"):
            self._file = self._scratch.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        with disk(f"write {self.path}", "free space or choose another folder"):
            self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def pad(self, to: int) -> None:
        """Zeros up to the next multiple of ``to``."""
        self.write(bytes(-self.size % to))

    def finish(self, *, durable: bool = False) -> Stored:
        """Replace ``path``; ``durable``: so that it survives a power cut."""
        with disk(f"write {self.path}", "free space or choose another folder"):
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())
            self._file.close()
            self._scratch.replace(self.path)
        return Stored(self._digest.hexdigest(), self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)


# ---------------------------------------------------------------- dense


class DenseWriter:
    """A safetensors file whose tensors are given one after another, in the order of ``names``."""

    def __init__(self, path: Path, metas: Metas) -> None:
        self.names = sorted(metas, key=lambda name: (-DTYPE_BYTES[metas[name].dtype], name))
        self._metas = metas
        self._due = iter(self.names)
        header: dict[str, Any] = {}
        at = 0
        for name in self.names:
            meta = metas[name]
            header[name] = {
                "dtype": SAFETENSORS[meta.dtype],
                "shape": list(meta.shape),
                "data_offsets": [at, at + meta.nbytes],
            }
            at += meta.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(_SIZE.size + len(text)) % ALIGNMENT)
        self._file = HashingFile(path)
        self._file.write(_SIZE.pack(len(text)))
        self._file.write(text)

    def add(self, name: str, array: Array) -> None:
        """The next tensor; ValueError when it is another than the next, or not what was announced."""
        due, meta = next(self._due, None), TensorMeta(tuple(array.shape), str(array.dtype))
        if name != due or meta != self._metas[name]:
            raise ValueError(f"{name!r} of {meta}; next is {due!r}")
        self._file.write(bytes_of(array))

    def finish(self, *, durable: bool = False) -> Stored:
        """Put the file in place; ValueError when tensors are missing."""
        left = next(self._due, None)
        if left is not None:
            raise ValueError(f"{left!r} was not written")
        return self._file.finish(durable=durable)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)


def write_dense(path: Path, arrays: Mapping[str, Array], *, durable: bool = False) -> Stored:
    """``arrays`` as a safetensors file. Streams: no second copy of a contiguous array is made."""
    metas = {name: TensorMeta(tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}
    with DenseWriter(path, metas) as file:
        for name in file.names:
            file.add(name, arrays[name])
        return file.finish(durable=durable)


def read_dense(path: Path, expected: Metas) -> dict[str, Array]:
    """The arrays of ``write_dense``, writable views of a private mapping: unwritten pages cost no memory.

    BadFrame unless the file holds exactly ``expected``, without gaps or overlaps.
    """
    mapped = _mapped(path)
    if len(mapped) < _SIZE.size:
        raise BadFrame(f"a model file of {len(mapped)} bytes")
    (length,) = _SIZE.unpack_from(mapped)
    most = sum(len(name.encode()) * 6 + _ENTRY_BYTES for name in expected) + 4096
    if length > min(most, len(mapped) - _SIZE.size):
        raise BadFrame(f"a header of {length} bytes in a file of {len(mapped)}; at most {most} are expected")
    begin = _SIZE.size + length
    header = _json(bytes(mapped[_SIZE.size : begin]))
    header.pop("__metadata__", None)
    check_names(header, expected)
    total = sum(meta.nbytes for meta in expected.values())
    if begin + total != len(mapped):
        raise BadFrame(f"{len(mapped) - begin} bytes of tensors; {total} are expected")
    spans, found = [], {}
    for name, meta in expected.items():
        start, end = _entry(name, header[name], meta, total)
        spans.append((start, end))
        found[name] = np.frombuffer(mapped, meta.dtype, meta.elements, begin + start).reshape(meta.shape)
    filled = [span for span in sorted(spans) if span[0] != span[1]]
    if any(a[1] != b[0] for a, b in pairwise(filled)):
        raise BadFrame("tensors of a model file overlap")
    return found


def drop_pages(arrays: Iterable[Array]) -> None:
    """Give back the memory of mapped arrays. Values come again from the mapped file, or are zero where
    there is none: what was written to them is lost. Arrays that are not mapped stay as they are."""
    found = {id(mapped): mapped for array in arrays if (mapped := _mapping_of(array)) is not None}
    for mapped in found.values():
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED)


def _mapping_of(array: Array) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base if isinstance(base, mmap.mmap) else None


def dense_metas(path: Path, most_header_bytes: int = 64 << 20) -> dict[str, TensorMeta]:
    """Return the tensors that a dense file of this machine's own declares, for ``read_dense``."""
    mapped = _mapped(path)
    (length,) = _SIZE.unpack_from(mapped) if len(mapped) >= _SIZE.size else (0,)
    if not 2 <= length <= min(most_header_bytes, len(mapped) - _SIZE.size):
        raise BadFrame(f"{path.name} has a header of {length} bytes in {len(mapped)}")
    header = _json(bytes(mapped[_SIZE.size : _SIZE.size + length]))
    named = {code: dtype for dtype, code in SAFETENSORS.items()}
    try:
        return {
            name: TensorMeta(tuple(map(int, entry["shape"])), named[entry["dtype"]])
            for name, entry in header.items()
        }
    except (KeyError, TypeError, ValueError):
        raise BadFrame(f"{path.name} has a damaged header") from None


def _entry(name: str, entry: object, meta: TensorMeta, total: int) -> tuple[int, int]:
    found = entry if isinstance(entry, dict) else {}
    wanted = (SAFETENSORS.get(meta.dtype), list(meta.shape))
    given = (found.get("dtype"), found.get("shape"))
    if given != wanted:
        raise BadFrame(f"{name!r} is {str(given)[:120]}; expected {wanted}")
    match found.get("data_offsets"):
        case [int(start), int(end)] if 0 <= start <= end <= total and end - start == meta.nbytes:
            return start, end
    raise BadFrame(
        f"{name!r} lies at {str(found.get('data_offsets'))[:80]}; it has {meta.nbytes} bytes of {total}"
    )


# ---------------------------------------------------------------- coded


@dataclass(frozen=True)
class Coded:
    """The packets of a coded file by name; payloads are views of the mapped file."""

    packets: Mapping[str, Packet]
    base: bytes
    digest: bytes


def write_coded(
    path: Path,
    packets: Iterator[tuple[str, Packet]],
    *,
    base: bytes = NO_DIGEST,
    digest: Callable[[], bytes] = lambda: NO_DIGEST,
) -> Stored:
    """Write packets one after another, as they are made; ``digest`` is called after the last."""
    entries = []
    with HashingFile(path) as file:
        file.write(MAGIC)
        for name, packet in packets:
            file.pad(ALIGNMENT)
            payload = memoryview(packet.payload).cast("B") if len(packet.payload) else b""
            file.write(payload)
            key, header = name.encode(), packet.header
            entries.append(
                b"".join(
                    (_LENGTH.pack(len(key)), key, _LENGTH.pack(len(header)), header, _SIZE.pack(len(payload)))
                )
            )
        at = file.size
        file.write(_DIRECTORY.pack(VERSION, base, digest(), len(entries)))
        for entry in entries:
            file.write(entry)
        file.write(_SIZE.pack(at))
        return file.finish()


def is_coded(path: Path) -> bool:
    """Which of the two forms a file has."""
    with disk(f"read {path}"), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_coded(path: Path, expected: Metas) -> Coded:
    """BadFrame unless there is exactly one packet of the right shape for every expected name and the
    payloads fill the file; what the packets hold is the codecs' to judge."""
    mapped = _mapped(path)
    view = memoryview(mapped)
    least = len(MAGIC) + _DIRECTORY.size + _SIZE.size
    if len(view) < least or bytes(view[: len(MAGIC)]) != MAGIC:
        raise BadFrame(f"no coded model file: {len(view)} bytes, magic {bytes(view[: len(MAGIC)])!r}")
    (at,) = _SIZE.unpack_from(view, len(view) - _SIZE.size)
    most = sum(len(name.encode()) + MAX_HEADER_BYTES + 12 for name in expected) + _DIRECTORY.size
    if not len(MAGIC) <= at <= len(view) - _SIZE.size - _DIRECTORY.size or len(view) - at > most + _SIZE.size:
        raise BadFrame(f"a directory at {at} of {len(view)} bytes; it has at most {most} bytes")
    version, base, digest, count = _DIRECTORY.unpack_from(view, at)
    if version != VERSION or count != len(expected):
        raise BadFrame(f"a coded file of version {version} with {count} tensors; {len(expected)} expected")
    packets, payload_at = {}, len(MAGIC)
    reader = _Directory(view[at + _DIRECTORY.size : len(view) - _SIZE.size])
    for _ in range(count):
        name, header, size = reader.entry()
        payload_at += -payload_at % ALIGNMENT
        if size > at - payload_at:
            raise BadFrame(f"{name[:80]!r} has a payload of {size} bytes; {max(0, at - payload_at)} are left")
        packets[name] = parse_packet(header, view[payload_at : payload_at + size])
        payload_at += size
    if payload_at != at or reader.left:
        raise BadFrame(f"{at - payload_at} bytes of payload and {reader.left} of directory too many")
    check_names(packets, expected)
    for name, meta in expected.items():
        if packets[name].meta != meta:
            raise BadFrame(f"{name!r} is {packets[name].meta}; expected {meta}")
    return Coded(packets, base, digest)


class _Directory:
    """Entries one after another; BadFrame where one does not fit."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def entry(self) -> tuple[str, memoryview, int]:
        name = self._take(self._length(MAX_NAME_BYTES))
        header = self._take(self._length(MAX_HEADER_BYTES))
        (size,) = _SIZE.unpack(self._take(_SIZE.size))
        try:
            return bytes(name).decode(), header, size
        except UnicodeDecodeError:
            raise BadFrame("a coded file names a tensor in bytes that are no text") from None

    def _length(self, most: int) -> int:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > most:
            raise BadFrame(f"a directory field of {length} bytes; at most {most}")
        return int(length)

    def _take(self, size: int) -> memoryview:
        if size > self.left:
            raise BadFrame(f"a directory ends {size - self.left} bytes early")
        self._at += size
        return self._data[self._at - size : self._at]


# ---------------------------------------------------------------- both


def check_names(given: Mapping[str, object], expected: Metas) -> None:
    """BadFrame unless the names are the expected ones."""
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        word = "lacks" if missing else "holds unknown"
        shown = [name[:80] for name in (missing or unknown)[:3]]
        raise BadFrame(f"a model file {word} {len(missing or unknown)} tensors, such as {shown}")


def bytes_of(array: Array) -> memoryview:
    """An array's elements in row-major order, little-endian; its own memory where it is contiguous."""
    contiguous = np.ascontiguousarray(array)
    return memoryview(contiguous.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def dense_bytes(expected: Metas) -> int:
    """Bytes of arrays."""
    return sum(meta.elements * DTYPE_BYTES[meta.dtype] for meta in expected.values())


def most_file_bytes(expected: Metas) -> int:
    """No file that a reader takes for ``expected`` is longer, whatever its codecs: what to download."""
    return 2 * dense_bytes(expected) + sum(len(n.encode()) * 6 + 8192 for n in expected) + 65_536


def _mapped(path: Path) -> mmap.mmap:
    with disk(f"read {path}"), path.open("rb") as file:
        try:
            # Private and writable: torch warns of memory it may not write to.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise BadFrame("a model file of 0 bytes") from None


def _json(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a model file's header is not JSON: {str(error)[:80]}") from None
    if not isinstance(header, dict):
        raise BadFrame(f"a model file's header is a {type(header).__name__}")
    return header
