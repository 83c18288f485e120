"""Tensors of a checkpoint's safetensors, and the bytes that each has as a blob of its own.

Owner and worker find the same hash for the same tensor, as both ask here: a blob is a safetensors file of one
tensor, named ``VALUE``. Nothing is read but headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import UsageError

VALUE = "value"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
MAX_DTYPE_CHARS = 16
MOST_DIMS = 64
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor's bytes [offset, offset + n_bytes) in a file; ``dtype``: the format's own name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    n_bytes: int

    @property
    def blob_bytes(self) -> int:
        """Size of its blob."""
        return len(blob_head(self.dtype, self.shape, self.n_bytes)) + self.n_bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of its blob. Raises OSError, and UsageError where the file ends too early."""
        yield blob_head(self.dtype, self.shape, self.n_bytes)
        left = self.n_bytes
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                piece = file.read(min(left, READ_BYTES))
                if not piece:
                    raise UsageError(f"{self.path} ends within {self.name!r}: it changed while it was read")
                left -= len(piece)
                yield piece


def blob_head(dtype: str, shape: Sequence[int], n_bytes: int) -> bytes:
    """Return what stands in a tensor's blob before its values: the length of a header, and that."""
    value = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, n_bytes]}
    text = json.dumps({VALUE: value}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors of a folder, those that its index names where it has one; of a file that file.
    Raises UsageError where there are none, or the index is none."""
    index = folder / INDEX
    if not index.is_file():
        paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UsageError(f"{str(folder)!r} holds no .safetensors; name a checkpoint's folder")
        return paths
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise UsageError(f"{index} has {index.stat().st_size} bytes, at most {MAX_INDEX_BYTES} are read")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(folder / Path(name).name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is not an index of safetensors: {error}; fetch it again") from None


def tensors_of(path: Path) -> list[FileTensor]:
    """Return the tensors of a safetensors file, by its header. Raises UsageError for what is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise TypeError("its header is not an object")
        begin, room = 8 + length, size - 8 - length
        named = ((name, entry) for name, entry in header.items() if name != "__metadata__")
        return [_tensor(path, name, entry, begin, room) for name, entry in named]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as safetensors: {error}; fetch it again") from None


def _tensor(path: Path, name: str, entry: Any, begin: int, room: int) -> FileTensor:
    dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = (first, end, *shape)
    whole = all(type(number) is int and number >= 0 for number in numbers) and first <= end <= room
    if not whole or len(shape) > MOST_DIMS or not isinstance(dtype, str) or len(dtype) > MAX_DTYPE_CHARS:
        raise ValueError(f"{name[:80]!r} is not a tensor of it")
    return FileTensor(name, dtype, tuple(shape), path, begin + first, end - first)
