"""Shared part of the lossy codecs: elements as float32 numpy, chunk by chunk, and checks of a packet's parts.

A chunk of float32 fits a core's second-level cache with room for two or three buffers of the same
size, so that an encoder of several passes reads main memory once: measured 2 to 4 times faster
than whole-tensor passes. A codec keeps its buffers from chunk to chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.errors import BadFrame, UsageError
from atoll.opdag import TensorMeta
from compressors.base import DTYPES, Packet
from compressors.catalogue import FLOATS
from compressors.layout import ALIGNMENT
from compressors.rates import CHUNK

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def require_floats(codec: str, meta: TensorMeta) -> None:
    """Raise UsageError unless ``meta`` is of a dtype that lossy codecs take.

    Every lossy ``compress`` begins with this. A link asks ``catalogue.takes`` and sends anything
    else as it is, so only a direct caller can meet it.
    """
    if meta.dtype not in FLOATS:
        raise UsageError(
            f"codec {codec!r} takes {', '.join(sorted(FLOATS))}, not {meta.dtype}; send it with 'none'"
        )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in row-major order: CPU, contiguous, one dimension, no gradient.

    Shares the memory of a contiguous CPU tensor.
    """
    return tensor.detach().to("cpu").resolve_neg().contiguous().reshape(-1)


def rebuild(values: Floats, meta: TensorMeta) -> torch.Tensor:
    """The tensor of ``meta`` with these elements; shares their memory where it is float32.

    Values beyond the dtype's range become infinite.
    """
    return torch.from_numpy(values).to(TORCH_DTYPES[meta.dtype]).reshape(meta.shape)


def zeros(meta: TensorMeta) -> torch.Tensor:
    """Return the tensor that a packet marked ZERO represents."""
    return torch.zeros(meta.shape, dtype=TORCH_DTYPES[meta.dtype])


def chunks(elements: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(elements)`` in order."""
    for start in range(0, elements, size):
        yield slice(start, min(start + size, elements))


def read_floats(tensor: torch.Tensor, size: int = CHUNK) -> Iterator[tuple[slice, Floats]]:
    """The elements of ``tensor`` chunk by chunk, as float32.

    A chunk is the tensor's own memory, or a buffer that the next chunk overwrites: read only.
    """
    source = flat(tensor)
    if source.dtype == torch.float32:
        whole: Floats = source.numpy()
        for part in chunks(whole.size, size):
            yield part, whole[part]
        return
    buffer = torch.empty(min(size, source.numel()), dtype=torch.float32)
    array: Floats = buffer.numpy()
    for part in chunks(source.numel(), size):
        count = part.stop - part.start
        buffer[:count].copy_(source[part])
        yield part, array[:count]


def write_floats(target: torch.Tensor, size: int = CHUNK) -> Iterator[tuple[slice, Floats]]:
    """Chunks to fill, one for each of ``target`` (contiguous, CPU); run it to its end.

    What stands in a chunk when the next is asked for is stored, cast to the target's dtype.
    """
    flattened = target.view(-1)
    if target.dtype == torch.float32:
        whole: Floats = flattened.numpy()
        for part in chunks(whole.size, size):
            yield part, whole[part]
        return
    buffer = torch.empty(min(size, target.numel()), dtype=torch.float32)
    array: Floats = buffer.numpy()
    for part in chunks(target.numel(), size):
        count = part.stop - part.start
        yield part, array[:count]
        flattened[part].copy_(buffer[:count])


def empty(meta: TensorMeta) -> torch.Tensor:
    """A new CPU tensor of ``meta`` to fill. Only after the payload's length was checked.

    numpy asks the system for huge pages and torch does not: filling 100 MB of fresh memory takes
    a quarter of the time. Aligned as torch's own tensors are (``layout.ALIGNMENT``).
    """
    memory = np.empty(meta.nbytes + ALIGNMENT, np.uint8)
    lead = -memory.ctypes.data % ALIGNMENT
    raw = torch.from_numpy(memory[lead : lead + meta.nbytes])
    return raw.view(TORCH_DTYPES[meta.dtype]).view(meta.shape)


def require_length(packet: Packet, expected_bytes: int) -> None:
    """Raise BadFrame unless the payload has exactly this length: before anything is allocated."""
    if len(packet.payload) != expected_bytes:
        raise BadFrame(
            f"{packet.codec}: payload of {len(packet.payload)} bytes for {packet.meta}; "
            f"it takes {expected_bytes}"
        )


def require_no_params(packet: Packet) -> None:
    """Raise BadFrame if the packet has parameters: for codecs that have none."""
    if packet.params:
        raise BadFrame(f"{packet.codec}: {len(packet.params)} bytes of parameters, it has none")


def require_float_packet(packet: Packet) -> None:
    """Raise BadFrame unless the packet's dtype is one that ``require_floats`` lets through."""
    if packet.meta.dtype not in FLOATS:
        raise BadFrame(f"{packet.codec}: a packet of {packet.meta.dtype}; takes {', '.join(sorted(FLOATS))}")


def read_params(packet: Packet, form: struct.Struct) -> tuple[Any, ...]:
    """The codec's own parameters. BadFrame unless they have exactly the form's length."""
    if len(packet.params) != form.size:
        raise BadFrame(f"{packet.codec}: {len(packet.params)} bytes of parameters, not {form.size}")
    return form.unpack(packet.params)


def payload_array(packet: Packet, dtype: npt.DTypeLike, count: int = -1, offset: int = 0) -> npt.NDArray[Any]:
    """``count`` elements of the payload from byte ``offset``, without a copy; read only.

    BadFrame when the payload is too short.
    """
    kind = np.dtype(dtype)
    have = len(packet.payload) - offset
    if count < 0:
        count = max(have, 0) // kind.itemsize
    if offset < 0 or have < count * kind.itemsize:
        raise BadFrame(f"{packet.codec}: payload of {len(packet.payload)} bytes is cut short")
    if not count:
        return np.empty(0, kind)
    array = np.frombuffer(packet.payload, kind, count, offset)
    array.flags.writeable = False
    return array
