"""Results that cost little to compute again: a micro-batch in flight keeps the call, not the result.

Selective recomputation (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
Models, section 5) for ops whose backward keeps their arguments anyway. Of a GELU or a normalisation the
result is kept only for the op behind it, and one pass over the arguments gives it again. The kernel and its
arguments are the same, so the bits are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from atoll.effects import may_alias
from atoll.opdag import op_refs
from atoll.ops import DEEPEST, cheap_again

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from atoll.program import StageProgram


def repeatable(program: StageProgram, written: Collection[int]) -> dict[int, int]:
    """Ops whose results may be computed again, and how many of their leading arguments must then need a
    gradient. ``written``: ops whose results some op writes, whose memory says nothing any more."""
    found: dict[int, int] = {}
    depths: dict[int, int] = {}  # of results that are not kept, and of their views
    for op, node in program.ops:
        refs = set(op_refs(node))
        depth = max((depths.get(ref, 0) for ref in refs), default=0)
        needed = cheap_again(node)
        if needed and depth < DEEPEST and not {op, *refs} & set(written):
            found[op], depths[op] = needed, depth + 1
        elif depth and may_alias(node):
            depths[op] = depth
    return found


class _Again:
    """Call that computes its result once more."""

    __slots__ = ("__weakref__", "args", "call", "memory", "mode")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], memory: Repeats) -> None:
        self.call, self.memory = call, memory
        self.args = [memory.pack(arg.detach()) if isinstance(arg, Tensor) else arg for arg in args]
        device = memory.device_type
        self.mode = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def result(self) -> Tensor:
        args = [self.memory.unpack(arg) for arg in self.args]
        enabled, dtype = self.mode
        # No cast cache: as in the forward (``Executor``).
        cast = torch.autocast(self.memory.device_type, dtype, enabled=enabled, cache_enabled=False)
        with torch.no_grad(), cast:
            found: Tensor = self.call(*args)
        return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """In place of a tensor: the result it lies in, and where."""

    again: _Again
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def tensor(self) -> Tensor:
        result = self.again.memory.result(self.again)
        if result.dtype is not self.dtype:
            result = result.view(self.dtype)
        return result.as_strided(self.size, self.stride, self.offset)


class _Known(NamedTuple):
    """Memory of a result; bytes of what is row-major can be read as another type."""

    storage: StorageWeakRef
    again: _Again
    dtype: torch.dtype
    row_major: bool


class Repeats:
    """Repeatable calls of a micro-batch; the graph of its forward, run under ``hooks``, holds them."""

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        # The weak reference keeps an address from being used twice, not the memory behind it.
        self._known: dict[int, _Known] = {}
        # Not the call itself, which knows these Repeats: no ring that only the garbage collector would break.
        self._newest: tuple[ref[_Again], Tensor] | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Return the saved-tensor hooks under which a forward runs."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def note(self, call: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> None:
        """``call(*args)`` gave ``result``, in memory of its own."""
        storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
        row_major = result.dim() > 0 and result.is_contiguous()
        self._known[storage.cdata] = _Known(storage, _Again(call, args, self), result.dtype, row_major)

    def pack(self, tensor: Tensor) -> object:
        """The tensor, or what gives it again."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is None or not (found.dtype is tensor.dtype or found.row_major):
            # Cut off: an op's own result would hold its node, and nobody sees that ring.
            return tensor.detach()
        at = int(tensor.storage_offset())
        return _Kept(found.again, tensor.dtype, tensor.size(), tensor.stride(), at)

    def unpack(self, kept: object) -> Any:
        """The tensor that was packed; anything else as it is."""
        return kept.tensor() if isinstance(kept, _Kept) else kept

    def result(self, again: _Again) -> Tensor:
        """Computed again, once for ops in a row that read the same: a norm feeds several products."""
        if self._newest is None or self._newest[0]() is not again:
            self._newest = ref(again), again.result()
        return self._newest[1]

    def close(self) -> None:
        """The forward is over."""
        self._known.clear()

    def forget(self) -> None:
        """The backward is over."""
        self._newest = None
