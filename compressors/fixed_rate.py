"""Shared part of the codecs whose payload length follows from the number of elements alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from atoll.opdag import TensorMeta
from compressors.base import Compressor, Packet, State, meta_of
from compressors.packing import (
    Bytes,
    empty,
    payload_array,
    require_float_packet,
    require_floats,
    require_length,
    require_no_params,
    zeros,
)

if TYPE_CHECKING:
    import torch


class FixedRate(Compressor, ABC):
    """A lossy codec of float32, bfloat16 and float16 without state or parameters.

    A subclass gives ``length``, ``encode`` and ``decode``; the last two never see an empty tensor,
    and ``decode`` only a payload of the right length.
    """

    name: str

    @abstractmethod
    def length(self, elements: int) -> int:
        """Payload bytes of so many elements; 0 for none."""

    @abstractmethod
    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        """Fill ``payload`` of ``length(tensor.numel())``."""

    @abstractmethod
    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        """Fill ``target``, a contiguous CPU tensor. Raises BadFrame for codes never made."""

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """Raises UsageError for other dtypes than the three."""
        meta = meta_of(tensor)
        require_floats(self.name, meta)
        payload = np.empty(self.length(meta.elements), np.uint8)
        if meta.elements:
            with np.errstate(all="ignore"):  # infinities and NaN are values here
                self.encode(tensor, payload, seed)
        return Packet(self.name, meta, memoryview(payload)), None  # type: ignore[arg-type]

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        """Raises BadFrame before it allocates anything unless the payload has the exact length."""
        require_float_packet(packet)
        require_no_params(packet)
        if packet.zero:
            return zeros(packet.meta)
        require_length(packet, self.length(packet.meta.elements))
        target = empty(packet.meta)
        if packet.meta.elements:
            with np.errstate(all="ignore"):
                self.decode(payload_array(packet, np.uint8), target)
        return target

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return self.length(meta.elements)
