"""One set of tensors in which any client of a federated job trains, one after the other."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atoll.errors import UsageError
from compressors.container import drop_pages

if TYPE_CHECKING:
    from strategies.layout import Array, Arrays

MAPPED_BYTES = 1 << 16


class WorkingTensors:
    """Tensors by name, aligned and contiguous; each begins as the broadcast gives it, else as the job did."""

    def __init__(
        self,
        given: Mapping[str, Tensor],
        names: Iterable[str],
        sent: Collection[str],
        device: torch.device,
    ) -> None:
        """``given``: the job's own. ``sent``: set by every broadcast and unread here, since the job's own
        value may be a file that no round needs in memory. UsageError for missing tensors."""
        names = list(names)
        missing = sorted(n for n in names if n not in given)
        if missing:
            raise UsageError(f"the job lacks {len(missing)} tensors: {missing[:5]}")
        self._given, self._device = given, device
        self._scratch: list[Array] = []
        self.values: dict[str, Tensor] = {}
        self.written: set[str] = set()  # names that training changes
        self._set: set[str] = set()  # names whose value is not the job's own
        for name in names:
            like = given[name].detach()
            if name in sent:
                self.values[name] = self._empty(like)
            else:
                self.values[name] = torch.empty(like.shape, dtype=like.dtype, device=device).copy_(like)

    def _empty(self, like: Tensor) -> Tensor:
        """On a CPU large ones lie in a mapping of their own, which ``rest`` can empty."""
        nbytes = like.numel() * like.element_size()
        if self._device.type != "cpu" or nbytes < MAPPED_BYTES:
            return torch.empty(like.shape, dtype=like.dtype, device=self._device)
        self._scratch.append(np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE), np.uint8))
        return torch.from_numpy(self._scratch[-1]).view(like.dtype).view(like.shape)

    def begin(self, start: Arrays, carried: Collection[str]) -> None:
        """Set every tensor as ``start`` gives it, ``carried`` as it is, else as the job gave it."""
        for name in sorted((self._set | self.written) - start.keys() - {*carried}):
            self.values[name].copy_(self._given[name])
        self._set &= {*carried}
        self.put(start)

    def put(self, arrays: Arrays) -> None:
        """Set these; a strategy may also set what no op reads (MOON: the copies' heads)."""
        for name, array in arrays.items():
            if name in self.values:
                self.values[name].copy_(self.tensor(array))
                self._set.add(name)

    def tensor(self, array: Array) -> Tensor:
        """Return ``array`` on the device; shares memory where it can."""
        shareable = array.flags.writeable and array.flags.c_contiguous
        return torch.from_numpy(array if shareable else np.array(array, order="C")).to(self._device)

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Return these as numpy sees them; on a CPU they are views."""
        return {name: self.values[name].detach().cpu().numpy() for name in names}

    def kept(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``weights``, which ``arrays`` gave, such that further training leaves them as they are."""
        changed = self.written | self._set
        return {n: a.copy() if n in changed else a for n, a in weights.items()}

    def rest(self) -> None:
        """Give the system the memory of all that the next broadcast sets anyway."""
        drop_pages(self._scratch)
