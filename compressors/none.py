"""The codec that changes nothing: the tensor's own bytes, native order (little-endian), and its
memory layout, on which the last bits of what is computed from it depend (``layout.py``)."""

from __future__ import annotations

import sys

import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Compressor, Packet, State, meta_of
from compressors.layout import Layout, from_wire, to_wire
from compressors.packing import TORCH_DTYPES

# Every platform torch runs on; a big-endian one would need a swap here.
assert sys.byteorder == "little"  # noqa: S101


class Uncompressed(Compressor):
    """``decompress(compress(x))`` is ``x``, bit for bit and stride for stride; neither copies CPU
    memory that is dense and aligned."""

    name = "none"

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        """The payload shares a dense CPU tensor's memory: leave it alone until it is sent."""
        meta = meta_of(tensor)
        flat, layout = to_wire(tensor)
        flat = flat.cpu()
        if not flat.numel():
            return Packet(self.name, meta), None
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        payload = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        usual = layout == Layout.contiguous(meta.shape)
        return Packet(self.name, meta, payload, b"" if usual else layout.to_bytes()), None

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        """Raises BadFrame when the payload is not exactly the tensor, or its layout none that
        ``compress`` makes."""
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
        layout = Layout.contiguous(meta.shape)
        if packet.params:
            layout = Layout.from_bytes(packet.params, len(meta.shape))
        return from_wire(torch.frombuffer(payload, dtype=dtype), meta.shape, layout)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return meta.nbytes
