"""What the conformance suite runs over: every codec's settings, tensors of every kind, and bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st

from atoll.opdag import TensorMeta
from compressors import CODECS, eden, make_compressor
from compressors.base import Compressor, Packet, check_packet, meta_of, parse_packet
from compressors.contrib.low_rank import acp_sgd, powersgd
from compressors.contrib.low_rank.factors import sketch
from compressors.contrib.low_rank.ranks import (
    acp_rank,
    activation_matrix,
    cut_rank,
    gradient_matrix,
    powersgd_rank,
)
from compressors.contrib.sparse.sizes import chain_kept, chunk_kept, chunks_of, dct_blocks, dct_ratio
from compressors.packing import TORCH_DTYPES
from compressors.rates import EDEN_BLOCK, eden_widths
from compressors.sparse_sizes import kept_of_row, rows_of, topk_kept

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
    """What is clipped arrives as s for certain, the rest as s or nothing."""
    magnitudes = np.abs(x)
    s = min(magnitudes.max(), 2.5 * np.sqrt(np.mean(x * x)))
    clipped = magnitudes > s * (1 + 2.0**-10)
    found: Doubles = np.where(clipped, magnitudes - s, np.maximum(magnitudes, s - magnitudes))
    return found


def _natural(x: Doubles) -> Doubles:
    """To the farther of the powers of two around; what is below 2**-120 of the largest may vanish."""
    magnitudes = np.abs(x)
    fraction, exponent = np.frexp(magnitudes)
    farther = np.ldexp(np.where(fraction > 0.5, np.maximum(fraction - 0.5, 1.0 - fraction), 0.0), exponent)
    found: Doubles = np.where(magnitudes < 2.0**-120 * magnitudes.max(), magnitudes, farther)
    return found


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
    "natural": lambda x, ratio: _natural(x),
    # Either nothing arrives of an element or d/k of it.
    "random_k": lambda x, ratio: np.abs(x) * max(1.0, min(2.0 * ratio, x.size)),
}
"""The largest error of each element that the codec's docstring allows, before the dtype's rounding."""


def _left(kept: float, total: float) -> float:
    """||x - x'|| / ||x|| where ``kept`` of the energy ``total`` arrives."""
    return float(np.sqrt(max(0.0, 1.0 - kept / total))) if total else 1.0


def _topk(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    return _left(topk_kept(meta, ratio), x.size)


def _whole(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    return _left(kept_of_row(1, x.size, meta.nbytes / ratio, "fp16"), x.size)


def _reused(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    # A sampled threshold that reaches fewer than two thirds of k is replaced by an exact selection.
    return _left(2 * kept_of_row(1, x.size, meta.nbytes / ratio, "fp16") / 3, x.size)


def _chain(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    return _left(chain_kept(meta, ratio), x.size)


def _dct(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    coefficients = dct_blocks(meta).coefficients
    return _left(topk_kept(coefficients, dct_ratio(meta, ratio)), coefficients.elements)


def _low_rank(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    """Of a truncated SVD, which all matrices with a side up to ``low_rank.FULL_SVD`` get."""
    rank, shape = cut_rank(meta, ratio), activation_matrix(meta)
    return _left(rank, min(shape)) if rank and shape else 0.0  # dense


def _powersgd(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    """P P^T M with P = orth(M Q): what M does to the span of Q arrives, and of any P as much as the r
    directions of the least energy hold."""
    rank, shape = powersgd_rank(meta, ratio), gradient_matrix(meta)
    if not rank or not shape:
        return 0.0  # dense
    matrix = x.reshape(shape)
    start = np.linalg.qr(sketch(shape[1], rank, powersgd.START_SEED).double().numpy())[0]
    energies = np.zeros(shape[0])
    energies[: min(shape)] = np.linalg.svd(matrix, compute_uv=False) ** 2
    return _left(max(_energy(matrix @ start), np.sort(energies)[:rank].sum()), _energy(x))


def _acp_sgd(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    """M Q Q^T, Q the orthonormal start."""
    rank, shape = acp_rank(meta, ratio), gradient_matrix(meta)
    if not rank or not shape:
        return 0.0  # dense
    start = np.linalg.qr(sketch(shape[1], rank, acp_sgd.START_SEED).double().numpy())[0]
    return _left(_energy(x.reshape(shape) @ start), _energy(x))


def _eden(x: Doubles, meta: TensorMeta, ratio: float) -> float:
    """1 - c^2 (2 t - t^2) at its worst: all of a turned block in one coordinate, one bit, t at its bound."""
    if eden_widths(ratio)[0] == 0:
        return 1.0
    return _left(eden.MOST_UNBIASED * (2.0 - eden.MOST_UNBIASED), EDEN_BLOCK)


def _energy(x: Doubles) -> float:
    return float(np.sum(x * x))


@dataclass(frozen=True, slots=True)
class _Groups:
    """How a codec of two levels selects: so many groups, elements of each, kept of each."""

    count: int
    width: int
    kept: int

    def largest(self, x: Doubles) -> Doubles:
        """[count, kept] magnitudes; a last group that is short is filled up with zeros."""
        rows = np.zeros(self.count * self.width)
        rows[: x.size] = np.abs(x)
        largest: Doubles = -np.sort(-rows.reshape(self.count, self.width))[:, : self.kept]
        return largest


def _rows(meta: TensorMeta, ratio: float) -> _Groups:
    rows, width = rows_of(meta)
    return _Groups(rows, width, topk_kept(meta, ratio, "2bit") // rows)


def _chunks(meta: TensorMeta, ratio: float) -> _Groups:
    return _Groups(*chunks_of(meta), chunk_kept(meta, ratio))


GROUPS: dict[str, Callable[[TensorMeta, float], _Groups]] = {"topk2": _rows, "chunk_topk": _chunks}
"""Codecs of two levels: one pair for all groups, times each group's own scale."""


def weights_of(case: Case, x: Doubles, meta: TensorMeta) -> Doubles:
    """By what elements are multiplied before norms are compared: 1, or 1 / the scale of the group. The
    levels are means of |v| / scale over all groups, so it is in these units that they cannot do harm."""
    if case.name not in GROUPS:
        return np.ones_like(x)
    groups = GROUPS[case.name](meta, case.ratio)
    means = groups.largest(x).mean(axis=1).astype(np.float32).astype(np.float64)
    # Scales of eight bits end at 2**-31 of the largest; a group below arrives as zeros.
    told = (means > 0.0) & (means >= 2.0**-31 * means.max())
    inverse = np.zeros_like(means)
    inverse[told] = 2.0 ** (np.rint(8.0 * np.log2(means.max() / means[told])) / 8) / means.max()
    return np.repeat(inverse, groups.width)[: x.size]


def _two_levels(name: str) -> Callable[[Doubles, TensorMeta, float], float]:
    """Each level is the mean of its elements, so at least k (mean of the kept)^2 arrives."""

    def share(x: Doubles, meta: TensorMeta, ratio: float) -> float:
        kept = GROUPS[name](meta, ratio).largest(x)
        kept = kept[kept[:, 0] > 0.0]
        return _left(kept.size * kept.mean() ** 2 if kept.size else 0.0, _energy(x))

    return share


CONTRACTIONS: dict[str, Callable[[Doubles, TensorMeta, float], float]] = {
    "topk": _topk,
    "topk2": _two_levels("topk2"),
    "chunk_topk": _two_levels("chunk_topk"),
    "gaussian_k": _whole,
    "error_feedback": _reused,
    "chain": _chain,
    "dct_topk": _dct,
    "low_rank": _low_rank,
    "powersgd": _powersgd,
    "acp_sgd": _acp_sgd,
    "eden": _eden,
}
"""The largest ||x - x'|| / ||x|| of a first packet (no state yet), in exact arithmetic."""

MAY_VANISH = {
    "random_k": "an element arrives only if the seed draws it",
    "eden": "below one bit, of a block that is all in the turned coordinates that are left out",
    "acp_sgd": "of a gradient whose rows are orthogonal to the start Q",
    "powersgd": "of a gradient that Q turns into exact zeros, where the rows that P begins with are zero too",
}
"""Lossy codecs of which nothing may arrive of a tensor that is not zero, and when. No bound can tell a
packet of ``random_k`` from nothing at all, but the mean over its seeds can."""


def eden_law(ratio: float) -> float:
    """||x - x'|| / ||x|| of Gaussian values, from the module's docstring."""
    bits, longer = eden_widths(ratio)
    errors = (1.0, 1 - 2 / np.pi, 0.11748, 0.03454, 0.009497)  # of Lloyd-Max quantisers, Max 1960
    share = longer / EDEN_BLOCK
    arrives = 1.0 - (1 - share) * errors[bits] - share * errors[bits + 1 if share else bits]  # c^2
    return float(np.sqrt(1.0 / arrives - 1.0 if bits else 1.0 - arrives))


GAUSSIAN: dict[str, Callable[[float], float]] = {"eden": eden_law}
"""ratio -> ||x - x'|| / ||x|| of Gaussian values, of codecs that state it."""
GAUSSIAN_NEAR = 0.02
"""How near a tensor of 100,000 elements comes to that."""

TWO_LEVELS = {"topk2": 0.6}
"""Sparse codecs that send a sign and one of two levels: the largest ||v - v'|| / ||v|| of Gaussian values."""

STRICT = 1.0 - 2.0**-10
"""Of a share up to here no rounding makes a loss of all that was given."""
REACH = {"powersgd": 2.0**60, "acp_sgd": 2.0**60}
"""Codecs that multiply elements with each other: of values beyond this a product may be infinite."""
HEADROOM = {"random_k": 128.0}
"""Codecs whose decoded values are so many times larger than those given."""


def assert_within_bound(case: Case, x: torch.Tensor, y: torch.Tensor, *, gaussian: bool = False) -> None:
    """Hold a decoded tensor against what its codec states. ``gaussian``: ``x`` is, of 100,000 elements."""
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
    weights = weights_of(case, before, meta)
    given = float(np.linalg.norm(before * weights))
    share = CONTRACTIONS[case.name](before * weights, meta, case.ratio)
    # Of what arrives, values and factors of 16 bits; of what was given, sums in float32. What is all below
    # 2**-100, or below the dtype's last place, may vanish.
    fine = (np.abs(after) * (info.eps + 2.0**-9) + info.smallest_normal * info.eps + 2.0**-100) * weights
    lost = float(np.linalg.norm(error * weights))
    if gaussian and case.name in GAUSSIAN:
        assert lost == pytest.approx(GAUSSIAN[case.name](case.ratio) * given, rel=GAUSSIAN_NEAR)
    assert lost <= share * given + float(np.linalg.norm(fine)) + 2.0**-16 * given
    if share <= STRICT and given > 2.0**10 * float(np.linalg.norm((after == 0.0) * fine)):
        assert lost < given
