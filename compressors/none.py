"""The codec that changes nothing: the tensor's own bytes, native order (little-endian)."""

from __future__ import annotations

import sys

import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import TORCH_DTYPES, Packet, meta_of

# Every platform torch runs on; a big-endian one would need a swap here.
assert sys.byteorder == "little"  # noqa: S101


class Uncompressed:
    """``decompress(compress(x))`` is ``x``, bit for bit; neither copies CPU memory."""

    name = "none"

    def compress(self, tensor: torch.Tensor, *, seed: int = 0) -> Packet:
        """The payload shares a contiguous CPU tensor's memory: leave it alone until it is sent."""
        meta = meta_of(tensor)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if not flat.numel():
            return Packet(self.name, meta)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        return Packet(self.name, meta, memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def decompress(self, packet: Packet) -> torch.Tensor:
        """Raises BadFrame when the payload is not exactly the tensor."""
        meta, payload = packet.meta, memoryview(packet.payload)
        dtype = TORCH_DTYPES[meta.dtype]
        if packet.zero:
            return torch.zeros(meta.shape, dtype=dtype)
        if len(payload) != meta.nbytes:
            raise BadFrame(f"payload of {len(payload)} bytes for {meta}, which has {meta.nbytes}")
        if not meta.elements:
            return torch.empty(meta.shape, dtype=dtype)
        if payload.readonly:  # torch demands memory it could write
            payload = memoryview(bytearray(payload))
        return torch.frombuffer(payload, dtype=dtype).reshape(meta.shape)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return meta.nbytes

    def payload_bytes(self, meta: TensorMeta) -> float:
        return float(meta.nbytes)
