"""The memory layout of a tensor on the wire.

Kernels choose their summation order by strides (and some by alignment), so a value or gradient
that arrived contiguous where the producer's was, say, one third of a split projection would end
in other bits than the uncut model. Measured: GPT-2 cut between that split and its attention was
off by 5e-6 after 5 AdamW steps. A tensor therefore travels as its elements in memory order, without
gaps, beside the layout that the receiver restores.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch

from atoll.errors import BadFrame

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64  # bytes; what torch's CPU allocator gives and vector kernels look at
MAX_STRETCH = 64  # a layout spans at most this many times the tensor's elements


@dataclass(frozen=True, slots=True)
class Layout:
    """Strides in elements (0 for a repeated dimension), and the first element's distance, in
    elements, from the last boundary of ALIGNMENT bytes."""

    strides: tuple[int, ...]
    lead: int = 0

    @classmethod
    @lru_cache(maxsize=256)
    def contiguous(cls, shape: tuple[int, ...]) -> Layout:
        """The layout of a new contiguous tensor."""
        strides = [1] * len(shape)
        for dim in range(len(shape) - 1, 0, -1):
            strides[dim - 1] = strides[dim] * max(shape[dim], 1)
        return cls(tuple(strides))

    def to_bytes(self) -> bytes:
        """Return one byte of lead, eight a stride."""
        return struct.pack(f"!B{len(self.strides)}Q", self.lead, *self.strides)

    @classmethod
    def from_bytes(cls, data: bytes, dims: int) -> Layout:
        """BadFrame unless ``data`` has the length of a layout of ``dims`` dimensions."""
        if len(data) != 1 + 8 * dims:
            raise BadFrame(f"layout of {len(data)} bytes for {dims} dimensions; expected {1 + 8 * dims}")
        lead, *strides = struct.unpack(f"!B{dims}Q", data)
        return cls(tuple(strides), lead)


def to_wire(tensor: Tensor) -> tuple[Tensor, Layout]:
    """A flat contiguous tensor of all elements, and the layout that ``from_wire`` restores.

    Shares memory with ``tensor`` where it is dense. Layouts that no receiver would take (spread
    too far, or overlapping) are made contiguous first.
    """
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    lead = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
    usual = Layout.contiguous(shape)
    if not lead and tensor.stride() == usual.strides:
        return tensor.view(-1), usual
    layout = Layout(tensor.stride(), lead)
    if _fault(shape, layout, tensor.element_size()):
        tensor = tensor.contiguous()
        layout = Layout(tensor.stride())
    return tensor.permute(_memory_order(layout.strides)).reshape(-1).contiguous(), layout


def from_wire(data: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """The tensor whose ``to_wire`` gave ``data`` (flat) and ``layout``; may share its memory.

    BadFrame when the sizes differ or the layout is overlapping, negative or spread too far.
    """
    if data.numel() != prod(shape):
        raise BadFrame(f"{data.numel()} elements do not fill a tensor of shape {shape}")
    aligned = data.data_ptr() % ALIGNMENT == layout.lead * data.element_size()
    if aligned and layout == Layout.contiguous(shape):
        return data.view(shape)
    fault = _fault(shape, layout, data.element_size())
    if fault:
        raise BadFrame(f"layout {layout} of a tensor of shape {shape} {fault}")
    order = _memory_order(layout.strides)
    span = _span(shape, layout.strides)
    if span == data.numel() and (aligned or data.device.type != "cpu"):
        return data.as_strided(shape, layout.strides, data.storage_offset())
    memory = torch.empty(layout.lead + span, dtype=data.dtype, device=data.device)
    target = once = memory.as_strided(shape, layout.strides, layout.lead)
    source = data.view([shape[d] for d in order]).permute(sorted(range(len(order)), key=lambda d: order[d]))
    for dim, stride in enumerate(layout.strides):
        if stride == 0 and shape[dim] > 1:
            once, source = once.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    once.copy_(source)
    return target


def _memory_order(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of memory from the first to the last, both included."""
    if prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _fault(shape: tuple[int, ...], layout: Layout, element_size: int) -> str:
    """Return why a layout is not acceptable, "" when it is."""
    strides = layout.strides
    if len(strides) != len(shape) or any(stride < 0 for stride in strides):
        return "does not have one non-negative stride a dimension"
    if not 0 <= layout.lead * element_size < ALIGNMENT:
        return f"leads by more than {ALIGNMENT} bytes"
    if _span(shape, strides) > MAX_STRETCH * max(1, prod(shape)):
        return f"spans more than {MAX_STRETCH} times its elements"
    reach = 1
    for dim in reversed(_memory_order(strides)):
        if shape[dim] > 1 and strides[dim] > 0:
            if strides[dim] < reach:
                return "overlaps itself"
            reach = 1 + (shape[dim] - 1) * strides[dim] + (reach - 1)
    return ""
