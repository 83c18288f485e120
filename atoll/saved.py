"""Forms in which a micro-batch in flight keeps what its ops saved: in few bits, or elsewhere.

Values in few bits are never what cheap results are computed again from (``atoll.repeats``): what a backward
reads would then depend on whether a cut lies between the two ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from atoll.few_bits import LEAST, Packed, pack, takes, unpack
from atoll.repeats import Repeats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Shelf(Protocol):
    """Memory elsewhere for what one micro-batch saves, read in reverse."""

    def put(self, data: Tensor) -> int:
        """Take a tensor of bytes; return its number, counted from 0."""

    def get(self, number: int) -> Tensor:
        """Return what was put away under a number."""


@dataclass(frozen=True)
class OpContext:
    """Weights of the op that runs, and the size of what it reads."""

    storages: frozenset[int]  # of its weights
    leaves: frozenset[tuple[int, torch.dtype]]  # their elements and types
    largest: int = 0  # elements of its largest argument


NO_OP = OpContext(frozenset(), frozenset())


def context_of(leaves: list[Tensor]) -> OpContext:
    """Return the context of an op that reads these weights."""
    storages = frozenset(leaf.untyped_storage()._cdata for leaf in leaves)
    return OpContext(storages, frozenset((leaf.numel(), leaf.dtype) for leaf in leaves))


def largest_of(args: tuple[Any, ...]) -> int:
    """Return the elements of the largest tensor among an op's arguments."""
    return max((tensor.numel() for tensor in _tensors(args)), default=0)


def _tensors(args: tuple[Any, ...] | list[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple | list):
            yield from _tensors(arg)


@dataclass(frozen=True, slots=True)
class _Away:
    """In place of a tensor: the memory that it lies in, put on the shelf, and where in it."""

    number: int
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@dataclass(frozen=True, slots=True)
class _FewBits:
    """In place of a tensor: its values in few bits, and its form."""

    codes: _Codes
    dtype: torch.dtype
    size: torch.Size


@dataclass(frozen=True, slots=True)
class _Codes:
    data: Tensor | _Away
    bits: int
    elements: int


class _Known(NamedTuple):
    storage: StorageWeakRef  # keeps the address from being used twice, not the memory behind it
    form: Any  # codes, or a number on the shelf


class Saved(Repeats):
    """What the graph of a micro-batch holds in place of tensors; ``op`` is set before each op runs."""

    def __init__(
        self,
        device: torch.device,
        bits: int,
        shelf: Shelf | None = None,
        weights: frozenset[int] = frozenset(),
    ) -> None:
        """``weights``: storages of received values that stay as they are, like the weights of an op."""
        super().__init__(device)
        self.op, self._weights = NO_OP, weights
        self._bits, self._shelf = bits, shelf
        self._forms: dict[object, _Known] = {}
        # What was made whole last: once for ops in a row that read the same.
        self._whole: tuple[_Codes, torch.dtype, Tensor] | None = None
        self._fetched: tuple[int, Tensor] | None = None

    def pack(self, tensor: Tensor) -> object:
        """The tensor, or what stands for it."""
        kept = super().pack(tensor)
        if not isinstance(kept, Tensor):
            return kept
        storage = kept.untyped_storage()._cdata
        if storage in self.op.storages or storage in self._weights:
            return kept
        if self._bits and takes(kept, self.op.largest, self.op.leaves):
            return self._in_few_bits(kept)
        return self._away(kept)

    def unpack(self, kept: object) -> Any:
        """The tensor that was packed."""
        if isinstance(kept, _Away):
            return self._fetch(kept)
        if not isinstance(kept, _FewBits):
            return super().unpack(kept)
        codes, whole = kept.codes, self._whole
        if whole is None or whole[0] is not codes or whole[1] is not kept.dtype:
            data = self._fetch(codes.data) if isinstance(codes.data, _Away) else codes.data
            values = unpack(Packed(data, codes.bits, codes.elements), kept.dtype)
            whole = self._whole = codes, kept.dtype, values
        return whole[2].view(kept.size)

    def close(self) -> None:
        """The forward is over."""
        super().close()
        self._forms.clear()
        self.op = NO_OP

    def forget(self) -> None:
        """The backward is over."""
        super().forget()
        self._whole = self._fetched = None

    def _in_few_bits(self, tensor: Tensor) -> _FewBits:
        """Once for tensors with the same values in the same order."""
        storage = tensor.untyped_storage()
        strides = None if tensor.is_contiguous() else (tensor.size(), tensor.stride())
        key = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor._version, strides)
        if key not in self._forms:
            packed = pack(tensor, self._bits)
            codes = _Codes(self._away(packed.data), packed.bits, packed.elements)
            self._forms[key] = _Known(StorageWeakRef(storage), codes)  # type: ignore[no-untyped-call]
        return _FewBits(self._forms[key].form, tensor.dtype, tensor.size())

    def _away(self, tensor: Tensor) -> Tensor | _Away:
        """A tensor of some size on the shelf, with all of the memory that it lies in: strides stay."""
        storage = tensor.untyped_storage()
        if self._shelf is None or storage.nbytes() < LEAST:
            return tensor
        key = storage._cdata, tensor._version
        if key not in self._forms:
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            known = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._forms[key] = _Known(known, self._shelf.put(data))
        where = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _Away(self._forms[key].form, *where)

    def _fetch(self, away: _Away) -> Tensor:
        """The tensor, in memory that was read from the shelf."""
        assert self._shelf is not None  # noqa: S101  it has taken this
        if self._fetched is None or self._fetched[0] != away.number:
            self._fetched = away.number, self._shelf.get(away.number)
        return self._fetched[1].view(away.dtype).as_strided(away.size, away.stride, away.offset)
