"""Codecs of the plainest kind, for tests of what links do with codecs.

``largest`` keeps the n / ratio largest elements, values in full and positions as int64, or values
alone at given positions; ``twice`` and ``threshold`` lose nothing but show seeds and states.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors.base import Packet, State, Support, meta_of
from compressors.catalogue import CODECS, Codec, Use
from compressors.packing import TORCH_DTYPES

if TYPE_CHECKING:
    import pytest

MODULE = "plain_codec_for_tests"


class Largest:
    """``ratio`` elements become one."""

    name = "largest"

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def kept(self, meta: TensorMeta) -> int:
        return max(1, int(meta.elements / self.ratio))

    def init(self, meta: TensorMeta) -> State:
        return None

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        flat = tensor.contiguous().reshape(-1)
        meta = meta_of(tensor)
        positions = flat.abs().float().topk(self.kept(meta)).indices.sort().values
        payload = positions.numpy().tobytes() + raw(flat[positions])
        return Packet(self.name, meta, payload), None

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        support = self.support(packet)
        values = memoryview(packet.payload)[8 * len(support.positions) :]
        return scattered(packet.meta, support, values)

    def support(self, packet: Packet) -> Support:
        kept = self.kept(packet.meta)
        if len(packet.payload) < 8 * kept:
            raise BadFrame("too short")
        positions = torch.frombuffer(bytearray(memoryview(packet.payload)[: 8 * kept]), dtype=torch.int64)
        if bool((positions < 0).any()) or bool((positions >= packet.meta.elements).any()):
            raise BadFrame("position out of range")
        return Support(packet.meta, positions)

    def compress_on(self, tensor: torch.Tensor, support: Support, *, seed: int = 0) -> Packet:
        flat = tensor.contiguous().reshape(-1)
        return Packet(self.name, meta_of(tensor), raw(flat[support.positions]))

    def decompress_on(self, packet: Packet, support: Support) -> torch.Tensor:
        return scattered(packet.meta, support, memoryview(packet.payload))

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return self.kept(meta) * (8 + meta.nbytes // meta.elements)

    def max_payload_bytes_on(self, meta: TensorMeta) -> int:
        return self.kept(meta) * (meta.nbytes // meta.elements)


class Counting:
    """Exact; its params say the seed and how many tensors its state has seen."""

    name = "counting"

    def init(self, meta: TensorMeta) -> State:
        return 0

    def compress(self, tensor: torch.Tensor, state: State = None, *, seed: int = 0) -> tuple[Packet, State]:
        seen = 0 if state is None else int(state)
        payload = raw(tensor.contiguous().reshape(-1))
        return Packet(self.name, meta_of(tensor), payload, f"{seed}:{seen}".encode()), seen + 1

    def decompress(self, packet: Packet, state: State = None) -> torch.Tensor:
        meta = packet.meta
        return torch.frombuffer(bytearray(packet.payload), dtype=TORCH_DTYPES[meta.dtype]).reshape(meta.shape)

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        return meta.nbytes


def raw(flat: torch.Tensor) -> bytes:
    return bytes(flat.detach().view(torch.uint8).numpy().tobytes())


def scattered(meta: TensorMeta, support: Support, values: memoryview) -> torch.Tensor:
    dtype = TORCH_DTYPES[meta.dtype]
    if len(values) != len(support.positions) * dtype.itemsize:
        raise BadFrame(f"{len(values)} bytes for {len(support.positions)} values")
    flat = torch.zeros(meta.elements, dtype=dtype)
    flat[support.positions] = torch.frombuffer(bytearray(values), dtype=dtype)
    return flat.reshape(meta.shape)


def offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the codecs into the catalogue for one test."""
    module = ModuleType(f"compressors.{MODULE}")
    module.Largest, module.Counting = Largest, Counting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"compressors.{MODULE}", module)

    def size(meta: TensorMeta, ratio: float) -> float:
        return meta.nbytes / ratio

    for codec in (
        Codec("largest", "", f"{MODULE}:Largest", "-", size, size_on=size, rated=True),
        Codec("counting", "", f"{MODULE}:Counting", "-", size, exact=True, stateful=True),
        Codec("weights", "", f"{MODULE}:Largest", "-", size, valid_for=frozenset({Use.MODEL})),
        Codec("shared", "", f"{MODULE}:Counting", "-", size, stateful=True, shared_state=True),
    ):
        monkeypatch.setitem(CODECS, codec.name, codec)
