"""The memory order of a tensor on the wire.

Kernels choose their summation order by strides, so a value or gradient that arrived contiguous
where the producer's was, say, a transposed view would end in other bits than the uncut model.
A tensor therefore travels as its bytes in memory order plus that order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import BadFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory; ascending for a contiguous tensor.

    Dimensions of one element keep their place; a tensor with gaps or overlaps (expanded, sliced)
    counts as contiguous, as its copy will be.
    """
    identity = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return identity
    strides = tensor.stride()
    order = tuple(sorted(identity, key=lambda d: (-strides[d], d)))
    return order if tensor.permute(order).is_contiguous() else identity


def to_wire(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A contiguous tensor whose bytes are sent, and the order that ``from_wire`` needs.

    Shares memory with ``tensor`` where no copy is needed.
    """
    order = memory_order(tensor)
    return tensor.detach().permute(order).contiguous(), order


def from_wire(data: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor whose ``to_wire`` gave (data, order); BadFrame when order is no permutation."""
    if sorted(order) != list(range(data.dim())):
        raise BadFrame(f"memory order {tuple(order)} does not permute {data.dim()} dimensions")
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return data.permute(inverse)
