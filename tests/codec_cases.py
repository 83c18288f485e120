"""What the conformance suite runs over: every codec's settings, tensors of every kind, and bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from atoll.opdag import TensorMeta
from compressors import CODECS, make_compressor
from compressors.base import TORCH_DTYPES, Compressor, Packet, check_packet, meta_of, parse_packet
from compressors.sparse_sizes import topk_kept

Doubles = npt.NDArray[np.float64]

FLOATS = ("float32", "bfloat16", "float16")
_RATIOS = {"qsgd": (4.0, 8.0)}
_RATED = (8.0, 60.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One codec with one setting."""

    name: str
    ratio: float = 1.0

    def make(self) -> Compressor:
        return make_compressor(self.name, self.ratio)

    def __str__(self) -> str:
        return f"{self.name}-{self.ratio:g}" if CODECS[self.name].rated else self.name


CASES = [
    Case(name, ratio)
    for name, facts in sorted(CODECS.items())
    for ratio in (_RATIOS.get(name, _RATED) if facts.rated else (1.0,))
]


def over_the_wire(codec: Compressor, packet: Packet) -> Packet:
    """The packet as the other end of a link has it: bytes, parsed and checked."""
    received = parse_packet(packet.header, bytes(packet.payload))
    check_packet(received, codec.name, packet.meta, codec.max_payload_bytes(packet.meta))
    return received


def round_trip(codec: Compressor, tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Through the wire, both ends without a state."""
    packet, _ = codec.compress(tensor, seed=seed)
    decoded = codec.decompress(over_the_wire(codec, packet))
    assert meta_of(decoded) == meta_of(tensor)
    assert decoded.device.type == "cpu"
    return decoded


# ---------------------------------------------------------------- tensors


def normal(meta: TensorMeta, seed: int = 4711, scale: float = 1.0) -> torch.Tensor:
    """Seeded values of any dtype: Gaussian, or 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[meta.dtype]
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(meta.shape, generator=generator) * scale).to(dtype)
    return torch.randint(0, 2, meta.shape, generator=generator).to(dtype)


def _kind(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = normal(TensorMeta(shape, "float32"), seed)
    match kind:
        case "zeros":
            return values * 0.0
        case "constant":
            return torch.full(shape, 0.37)
        case "heavy":
            return values**5
        case "sparse":
            return values * (values.abs() > 1.5)
        case "ties":
            return values.sign() * values.abs().round()
        case _:
            return values


def _layout(layout: str, shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    """A tensor of ``shape`` whose memory lies otherwise."""
    if not shape or layout == "plain":
        return _kind(kind, shape, seed)
    if layout == "transposed":
        return _kind(kind, shape[::-1], seed).permute(*range(len(shape) - 1, -1, -1))
    if layout == "every second":
        return _kind(kind, (*shape[:-1], shape[-1] * 2 + 1), seed)[..., 1::2]
    return _kind(kind, (1, *shape[1:]), seed).expand(shape)


_SHAPES = st.one_of(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.tuples(st.integers(1, 5), st.integers(60, 700)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(250, 260)),
    st.sampled_from([(1,), (64,), (257,), (2000,), (512, 8)]),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any shape, layout, dtype, distribution and scale that a dtype holds comfortably."""
    shape, dtype = draw(_SHAPES), draw(st.sampled_from(FLOATS))
    kind = draw(st.sampled_from(["normal", "normal", "heavy", "sparse", "ties", "zeros", "constant"]))
    layout = draw(st.sampled_from(["plain", "transposed", "every second", "expanded"]))
    exponent = draw(st.integers(-6, 2) if dtype == "float16" else st.integers(-30, 25))
    values = _layout(layout, shape, kind, draw(st.integers(0, 2**32)))
    largest = torch.finfo(TORCH_DTYPES[dtype]).max
    return (values * 10.0**exponent).clamp(-largest, largest).to(TORCH_DTYPES[dtype])


# ---------------------------------------------------------------- bounds


def doubles(tensor: torch.Tensor) -> Doubles:
    """Elements in row-major order."""
    flat: Doubles = tensor.to(torch.float64).reshape(-1).numpy()
    return flat


def block_largest(x: Doubles, block: int) -> Doubles:
    """For each element, the largest magnitude in its block of row-major neighbours."""
    starts = np.arange(0, x.size, block)
    largest: Doubles = np.repeat(np.maximum.reduceat(np.abs(x), starts), block)[: x.size]
    return largest


def _terngrad(x: Doubles) -> Doubles:
    magnitudes = np.abs(x)
    return np.maximum(magnitudes, min(magnitudes.max(), 2.5 * np.sqrt(np.mean(x * x))))


def _qsgd(x: Doubles, ratio: float) -> Doubles:
    return block_largest(x, 512) / (127 if ratio <= 4 else 7)


ELEMENTWISE: dict[str, Callable[[Doubles, float], Doubles]] = {
    "none": lambda x, ratio: np.zeros_like(x),
    "lossless": lambda x, ratio: np.zeros_like(x),
    "fp16": lambda x, ratio: np.abs(x) * 2.0**-11 + np.abs(x).max() * 2.0**-39,
    "bf16": lambda x, ratio: np.abs(x) * 2.0**-8,
    "int8_block": lambda x, ratio: block_largest(x, 256) / 254,
    "int4_block": lambda x, ratio: block_largest(x, 64) / 14,
    "sign": lambda x, ratio: np.abs(np.abs(x) - np.abs(x).mean()),
    "qsgd": _qsgd,
    "terngrad": lambda x, ratio: _terngrad(x),
    "natural": lambda x, ratio: np.abs(x),
    # Either nothing arrives of an element or d/k of it.
    "random_k": lambda x, ratio: np.abs(x) * max(1.0, min(2.0 * ratio, x.size)),
}
"""The largest error of each element that the codec's docstring allows, before the dtype's rounding."""


def _topk(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    return float(np.sqrt(max(0.0, 1.0 - topk_kept(meta, ratio) / x.size)))


CONTRACTIONS: dict[str, Callable[[Doubles, TensorMeta, float], float]] = {
    "topk": _topk,
}
"""The largest ||x - x'|| / ||x||; 1 for what is not named here: never worse than sending nothing."""

TWO_LEVELS = {"topk2": 0.6}
"""Sparse codecs that send a sign and one of two levels: the largest ||v - v'|| / ||v|| of Gaussian values."""

REACH = {"powersgd": 2.0**60, "acp_sgd": 2.0**60}
"""Codecs that multiply elements with each other: of values beyond this a product may be infinite."""
HEADROOM = {"random_k": 128.0}
"""Codecs whose decoded values are so many times larger than those given."""


def assert_within_bound(case: Case, x: torch.Tensor, y: torch.Tensor) -> None:
    """Hold a decoded tensor against what its codec states."""
    meta, before, after = meta_of(x), doubles(x), doubles(y)
    if not before.size:
        return
    error = np.abs(before - after)
    info = torch.finfo(x.dtype)
    # A half of the last place of the dtype (twice, for the sums of tests), and of float32 within.
    rounding = (np.abs(before) + np.abs(after)) * (info.eps + 2.0**-20) + info.smallest_normal * info.eps
    if case.name in ELEMENTWISE:
        allowed = ELEMENTWISE[case.name](before, case.ratio)
        if not CODECS[case.name].exact:
            # Blocks and scales below 2**-100 may vanish.
            allowed = allowed * (1 + 2.0**-16) + rounding + 2.0**-100
        assert (error <= allowed).all()
        return
    share = CONTRACTIONS.get(case.name, lambda *_: 1.0)(before, meta, case.ratio)
    room = float(np.linalg.norm(rounding)) + 2.0**-10 * float(np.linalg.norm(before))
    assert np.linalg.norm(error) <= share * np.linalg.norm(before) + room
