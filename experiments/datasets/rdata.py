"""Tables out of R's lazy-load databases (``data/Rdata.rdx`` and ``.rdb`` of an R package): columns as arrays.

    index    name -> (offset, length) in the database, itself a serialized list, compressed
    entry    4 bytes of size, big-endian; then zlib, or b"Z" and raw LZMA2, or b"2" and bzip2
    inside   R's serialization in XDR, versions 2 and 3

Nothing in these files is run: what is no vector, list or attribute is refused. Pure.
Source: R Internals 1.8 (serialization formats), R's src/main/serialize.c and lazyload.R.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 64 << 20  # of one entry, unpacked
MAX_DEPTH = 50
_NIL, _REFERENCE, _SYMBOL, _PAIRS, _ENVIRONMENT = 254, 255, 1, 2, 4
_CHARACTERS, _LOGICAL, _INTEGER, _REAL, _STRINGS, _LIST, _COMPACT = 9, 10, 13, 14, 16, 19, 238
_PLACES = frozenset({253, 242, 241, 251, 252})  # environments and marks that have no content
_HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400


@dataclass(slots=True)
class Value:
    """A vector or list of R's with its attributes."""

    content: Any
    attributes: dict[str, Any] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        """Elements of a list by their names."""
        names = self.attributes.get("names")
        if not isinstance(self.content, list) or not isinstance(names, Value):
            raise UsageError("an R object without names where a list with names was expected")
        return dict(zip(names.content, self.content, strict=True))


def table(index: bytes, database: bytes, name: str) -> dict[str, NDArray[Any] | list[str]]:
    """Columns of the data frame ``name``: numbers as arrays, texts as lists, factors as their codes from 0.

    UsageError when there is none, or when the files are not what such files are.
    """
    try:
        places = _read(_unpacked(index)).named()["variables"].named()
        if name not in places:
            raise UsageError(
                f"the package has no table {name[:60]!r}; it has {', '.join(sorted(places)[:20])}"
            )
        offset, length = (int(number) for number in places[name].content)
        columns = _read(_entry(database[offset : offset + length])).named()
        return {column: _column(value) for column, value in columns.items()}
    except (struct.error, zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        raise UsageError(f"R's database is damaged: {error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(f"R's database holds something else than tables: {error!r}") from None


def _column(value: Value) -> NDArray[Any] | list[str]:
    content = value.content
    if isinstance(content, list):
        return [str(text) for text in content]
    codes: NDArray[Any] = content - 1 if "levels" in value.attributes else content
    return codes


def _unpacked(data: bytes) -> bytes:
    if data[:2] == b"\x1f\x8b":
        return _bounded(zlib.decompressobj(zlib.MAX_WBITS | 16), data)
    if data[:6] == b"\xfd7zXZ\x00":
        return _bounded(lzma.LZMADecompressor(), data)
    return _bounded(zlib.decompressobj(), data)


def _entry(data: bytes) -> bytes:
    (size,) = struct.unpack_from(">I", data)
    if data[4:5] == b"Z":
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
        found = _bounded(lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters), data[5:])
    elif data[4:5] == b"2":
        found = _bounded(bz2.BZ2Decompressor(), data[5:])
    else:
        found = _bounded(zlib.decompressobj(), data[4:])
    if len(found) != size:
        raise UsageError(f"an entry unpacks to {len(found)} bytes, announced were {size}")
    return found


def _bounded(unpacker: Any, data: bytes) -> bytes:
    found: bytes = unpacker.decompress(data, MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise UsageError(f"an entry unpacks to more than {MAX_BYTES:,} bytes")
    return found


def _read(data: bytes) -> Value:
    reader = _Reader(data)
    reader.header()
    found = reader.item()
    if not isinstance(found, Value):
        raise UsageError("an entry that is no vector or list")
    return found


class _Reader:
    """One serialized object; lengths are checked against what is left before memory is taken."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._known: list[Any] = []
        self._depth = 0

    def header(self) -> None:
        if self._data[:2] != b"X\n":
            raise UsageError("an entry that is not in R's XDR format")
        self._at = 2
        version, _, _ = self._integer(), self._integer(), self._integer()
        if version == 3:
            self._take(self._integer())  # the native encoding's name
        elif version != 2:
            raise UsageError(f"R's serialization of version {version}; 2 and 3 are known")

    def item(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UsageError(f"an entry that is nested more than {MAX_DEPTH} times")
        try:
            return self._item(self._integer())
        finally:
            self._depth -= 1

    def _item(self, flags: int) -> Any:
        kind = flags & 255
        if kind == _NIL or kind in _PLACES:
            return None
        if kind == _REFERENCE:
            return self._known[(flags >> 8 or self._integer()) - 1]
        if kind == _SYMBOL:
            self._known.append(self.item())
            return self._known[-1]
        if kind == _ENVIRONMENT:
            self._integer()
            self._known.append(None)
            for _ in range(4):
                self.item()
            return None
        if kind == _PAIRS:
            return self._pairs(flags)
        if kind == _CHARACTERS:
            length = self._integer()
            return None if length == -1 else self._take(length).decode("utf-8", "replace")
        if kind == _COMPACT:
            return self._compact()
        return self._vector(kind, flags)

    def _vector(self, kind: int, flags: int) -> Value:
        length = self._integer()
        if length < 0:
            raise UsageError(f"a vector of {length} elements")
        content: Any
        if kind in (_LOGICAL, _INTEGER):
            content = np.frombuffer(self._take(4 * length), ">i4").astype(np.int64)
        elif kind == _REAL:
            content = np.frombuffer(self._take(8 * length), ">f8").astype(np.float64)
        elif kind in (_STRINGS, _LIST):
            if 4 * length > len(self._data) - self._at:
                raise UsageError(f"a list of {length} elements in {len(self._data) - self._at} bytes")
            content = [self.item() for _ in range(length)]
        else:
            raise UsageError(f"an R object of type {kind}; tables of numbers and texts are read")
        return Value(content, self._attributes() if flags & _HAS_ATTRIBUTES else {})

    def _attributes(self) -> dict[str, Any]:
        found = self.item()
        return found if isinstance(found, dict) else {}

    def _pairs(self, flags: int) -> dict[str, Any]:
        """A pair list by its tags; elements without one by their position."""
        found: dict[str, Any] = {}
        while flags & 255 == _PAIRS:
            if flags & _HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & _HAS_TAG else None
            found[str(tag) if tag is not None else str(len(found))] = self.item()
            flags = self._integer()
        if flags & 255 != _NIL:
            raise UsageError("a pair list that ends in something else")
        return found

    def _compact(self) -> Value:
        """A vector in one of R's short forms (ALTREP)."""
        facts, state, attributes = self.item(), self.item(), self.item()
        name = str(next(iter(facts.values())))
        attributes = attributes if isinstance(attributes, dict) else {}
        if name == "compact_intseq":
            length, first, step = (int(number) for number in state.content)
            if not 0 <= length <= MAX_BYTES // 8:
                raise UsageError(f"a sequence of {length} numbers")
            return Value(first + step * np.arange(length, dtype=np.int64), attributes)
        if name.startswith("wrap_"):
            inner = next(iter(state.values())) if isinstance(state, dict) else state.content[0]
            return Value(inner.content, inner.attributes | attributes)
        raise UsageError(f"R's short form {name[:40]!r} is not read")

    def _integer(self) -> int:
        (found,) = struct.unpack(">i", self._take(4))
        return int(found)

    def _take(self, length: int) -> bytes:
        if not 0 <= length <= len(self._data) - self._at:
            raise UsageError(f"an entry that ends {length} bytes before it should")
        self._at += length
        return self._data[self._at - length : self._at]


def numbers(columns: Mapping[str, Any], name: str) -> NDArray[Any]:
    """A column of numbers. UsageError when the table has none of this name."""
    found = columns.get(name)
    if not isinstance(found, np.ndarray):
        raise UsageError(f"the table has no column of numbers {name!r}; it has {', '.join(columns)}")
    return found
