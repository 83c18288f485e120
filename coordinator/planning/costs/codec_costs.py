"""Effect of the links' codecs on a cut: bytes on the wires, seconds at both ends.

Sizes come from ``compressors.catalogue``, so they are expectations; speeds are bytes of dense
tensor a second, measured by each worker, or the defaults below. Encoding and decoding run on the
compute thread of their stage, so they count as its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING

from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Mask
from compressors.catalogue import CODECS, codec, takes
from coordinator.planning.costs.quota import core_share
from coordinator.planning.costs.traffic import Hop

if TYPE_CHECKING:
    from coordinator.planning.costs.fleet import Device
    from coordinator.planning.costs.traffic import Crossing, LinkLoad
    from coordinator.planning.costs.workload import Workload

DENSE = "none"
Speed = tuple[float, float]  # encode, decode; dense bytes a second

DEFAULT_SPEEDS: Mapping[str, Speed] = {
    "fp16": (5.5e9, 3.2e9),
    "bf16": (4.7e9, 3.0e9),
    "int8_block": (1.2e9, 3.1e9),
    "int4_block": (0.9e9, 2.0e9),
    "eden": (0.2e9, 0.4e9),
    "topk": (0.25e9, 15e9),
    "topk2": (0.2e9, 6e9),
    "chain": (0.25e9, 10e9),
    "qsgd": (0.29e9, 3.0e9),
    "low_rank": (0.4e9, 0.8e9),
    "lossless": (0.79e9, 1.5e9),
}
"""Speeds of a worker that has reported none: one modest core (compression.md 1.1, measured; the quantisers'
decoders, int4 and low_rank estimated)."""
UNKNOWN_SPEED: Speed = (0.25e9, 1e9)
CALL_CPU_S = 2e-4  # one encode or decode of a tensor, whatever its size: dispatch, allocation, header
SPEED_RANGE = (1e5, 1e13)  # bytes a second: outside, a report cannot be true


def judge_speeds(speeds: Mapping[str, Speed]) -> str | None:
    """Return why these codec speeds cannot be true, None when they can."""
    low, high = SPEED_RANGE
    for name, speed in speeds.items():
        for what, value in zip(("encodes", "decodes"), speed, strict=True):
            if not isfinite(value) or not low <= value <= high:
                return (
                    f"codec {name[:60]} that {what} {value:.3g} bytes/s; possible are {low:.0e} to {high:.0e}"
                )
    return None


def speed_of(device: Device, name: str) -> Speed:
    """Encode and decode bytes/s of a codec on a device, slowed by what training taught of it."""
    encode, decode = device.codec_speeds.get(name) or DEFAULT_SPEEDS.get(name, UNKNOWN_SPEED)
    return encode / device.codec_scale, decode / device.codec_scale


def tensor_bytes(tensor: Crossing, spec: LinkSpec, backward: bool) -> float:
    """Expected payload of one tensor under ``spec``; dense where its codec does not take it."""
    same = backward and tensor.direct and spec.mask is Mask.SAME
    return _payload(spec.codec, spec.ratio, tensor.meta, same)


def load_bytes(load: LinkLoad, spec: LinkSpec) -> float:
    """Expected payload bytes of everything a link carries for one micro-batch."""
    return sum(tensor_bytes(tensor, spec, load.backward) for tensor in load.tensors)


def taken(load: LinkLoad, name: str) -> list[Crossing]:
    """The tensors of ``load`` that a codec touches."""
    facts = codec(name)
    return [tensor for tensor in load.tensors if takes(facts, tensor.meta)]


def ends_s(load: LinkLoad, spec: LinkSpec, sender: Device, receiver: Device) -> tuple[float, float]:
    """Seconds of (encoding, decoding) what ``load`` sends for one micro-batch.

    A gradient at its value's positions needs no selection: both ends take the decoder's pace.
    """
    if spec.codec == DENSE:
        return 0.0, 0.0
    encode_rate, decode_rate = speed_of(sender, spec.codec)[0], speed_of(receiver, spec.codec)[1]
    gather_rate = max(speed_of(sender, spec.codec))
    encode_call_s, decode_call_s = (CALL_CPU_S * d.codec_scale / core_share(d) for d in (sender, receiver))
    encode = decode = 0.0
    for tensor in taken(load, spec.codec):
        same = load.backward and tensor.direct and spec.mask is Mask.SAME
        encode += encode_call_s + tensor.meta.nbytes / (gather_rate if same else encode_rate)
        decode += decode_call_s + tensor.meta.nbytes / decode_rate
    return encode, decode


def coded(
    work: Workload, loads: Sequence[LinkLoad], specs: Sequence[LinkSpec], devices: Sequence[Device]
) -> Workload:
    """``work`` with what ``specs`` make of its hops; ``devices`` by stage.

    Stages compute longer by their encoders and decoders, hops carry fewer bytes.
    """
    by_pair = {(spec.source, spec.target): spec for spec in specs if spec.codec != DENSE}
    if not by_pair:
        return work
    forward_s = [stage.forward_s for stage in work.stages]
    backward_s = [stage.backward_s for stage in work.stages]
    sizes: dict[tuple[int, int], int] = {}
    for load in loads:
        spec = by_pair.get((load.source, load.target))
        if spec is None:
            continue
        sizes[load.source, load.target] = round(load_bytes(load, spec))
        encode, decode = ends_s(load, spec, devices[load.source], devices[load.target])
        seconds = backward_s if load.backward else forward_s
        seconds[load.source] += encode
        seconds[load.target] += decode
    stages = tuple(
        replace(stage, forward_s=f, backward_s=b, codec_s=f + b - stage.forward_s - stage.backward_s)
        for stage, f, b in zip(work.stages, forward_s, backward_s, strict=True)
    )
    return replace(
        work, stages=stages, forward=_resized(work.forward, sizes), backward=_resized(work.backward, sizes)
    )


def _resized(hops: Sequence[Hop], sizes: Mapping[tuple[int, int], int]) -> tuple[Hop, ...]:
    return tuple(replace(hop, n_bytes=sizes.get((hop.source, hop.target), hop.n_bytes)) for hop in hops)


def _payload(name: str, ratio: float, meta: TensorMeta, same: bool) -> float:
    facts = CODECS[name]
    if same and facts.size_on is not None:
        return _size_on(name, ratio, meta)
    return _size(name, ratio, meta)


# A model's blocks repeat, so the same few shapes are asked for in every cut; sizes depend on
# nothing but these arguments as long as the catalogue stands, and it never changes in a process.
@lru_cache(maxsize=65536)
def _size(name: str, ratio: float, meta: TensorMeta) -> float:
    return CODECS[name].payload_bytes(meta, ratio)


@lru_cache(maxsize=65536)
def _size_on(name: str, ratio: float, meta: TensorMeta) -> float:
    facts = CODECS[name]
    if facts.size_on is None or not takes(facts, meta):
        return float(meta.nbytes)
    return min(float(meta.nbytes), facts.size_on(meta, ratio))
