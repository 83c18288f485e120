"""Optimizer states beside the device's memory, which come to it one parameter at a time."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

import torch

from atoll.errors import StorageError
from atoll.job import Place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    State = dict[str, Tensor]

LEAST_BYTES = mmap.PAGESIZE
"""Of a tensor that goes elsewhere: step counts stay."""


class StatesElsewhere:
    """Homes of states: files without a name that are mapped, or pinned memory.

    On a CPU a state is stepped where it lies: pages come with the step and are dropped behind it, so that one
    parameter's are resident at a time, and the file's cache is the kernel's to take back. On a GPU a state
    goes to the device for its step and back (untried on one), so the bits are those of states that stay.
    """

    def __init__(self, folder: Path | None, device: torch.device, *, pinned: bool) -> None:
        self._folder, self._device, self._pinned = folder, device, pinned
        self._homes: dict[tuple[str, str], Tensor] = {}
        self._maps: dict[int, mmap.mmap] = {}  # by address

    def reserve(self, name: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        """Hold the room of a state to come. StorageError where the disk has none."""
        for key, shape in shapes.items():
            like = torch.empty(shape, dtype=dtype, device="meta")
            if like.nbytes >= LEAST_BYTES and (name, key) not in self._homes:
                self._homes[name, key] = self._new(like)

    def take(self, state: State) -> State:
        """Return a parameter's state on the device."""
        return {key: tensor.to(self._device) for key, tensor in state.items()}

    def put(self, name: str, state: State) -> State:
        """Return a parameter's state as it lies elsewhere, none of it resident."""
        found = {}
        for key, tensor in state.items():
            if tensor.nbytes < LEAST_BYTES:
                found[key] = tensor
                continue
            home = self._homes.get((name, key))
            if home is None or (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
                home = self._homes[name, key] = self._new(tensor)
            if home is not tensor:
                home.copy_(tensor)
            found[key] = home
        self.rest(found)
        return found

    def rest(self, state: Mapping[str, Tensor]) -> None:
        """Drop the pages of states that were read or written; what was written is in the file."""
        for tensor in state.values():
            if tensor.data_ptr() in self._maps:
                self._maps[tensor.data_ptr()].madvise(mmap.MADV_DONTNEED)

    def _new(self, like: Tensor) -> Tensor:
        if self._pinned:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, like.nbytes)
            except OSError as error:
                raise StorageError(f"no room for optimizer state: {error.strerror}") from None
            mapped = mmap.mmap(file.fileno(), like.nbytes)
        found = torch.frombuffer(mapped, dtype=like.dtype).view(like.shape)
        self._maps[found.data_ptr()] = mapped
        return found


def states_elsewhere(place: Place, folder: Path | None, device: torch.device) -> StatesElsewhere | None:
    """Return the homes of states; None where they stay on the device."""
    if place is Place.DEVICE:
        return None
    return StatesElsewhere(folder, device, pinned=place is Place.HOST and device.type != "cpu")
