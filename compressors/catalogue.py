"""Every codec by name: what it is, what it is valid for, and how many bytes it takes.

No torch here: the coordinator plans with these facts, and its process never loads torch. A codec's
class is found by ``builder`` only where tensors are at hand. The conformance suite holds each fact against
the class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from atoll.errors import UsageError
from atoll.opdag import TensorMeta
from compressors import rates, sparse_sizes
from compressors.contrib.low_rank.ranks import acp_bytes, cut_bytes, powersgd_bytes
from compressors.contrib.sparse import sizes

MIN_BYTES = 4096
"""Tensors below this cross a link as they are: latency, not rate, is what they cost."""
FLOATS = frozenset({"float32", "bfloat16", "float16"})
"""Dtypes that lossy codecs take; others travel uncompressed."""


class Use(StrEnum):
    """Use of a tensor in training, which decides how lossy its codec may be."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    DELTA = "delta"  # a change of a model since an agreed version
    MODEL = "model"


EVERYTHING = frozenset(Use)
CHANGES = frozenset({Use.GRADIENT, Use.DELTA})

Size = Callable[[TensorMeta, float], float]
"""(meta, ratio) -> expected payload bytes."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Facts of one codec. ``ratio`` in the sizes: dense bytes / wire bytes aimed at, >= 1."""

    name: str
    summary: str  # one line for users
    builder: str  # "module:Class" below ``compressors``; called with ``ratio=`` when ``rated``
    source: str  # paper and section, or where the idea is described
    size: Size
    size_on: Size | None = None  # of a gradient at the value's positions; None: not sparse
    rated: bool = False  # whether ``ratio`` changes what is sent
    valid_for: frozenset[Use] = EVERYTHING
    exact: bool = False  # bit for bit
    linear: bool = False  # decoding a sum of packets gives the sum: secure aggregation may take it
    unbiased: bool = False  # E[decode(encode(x))] = x over seeds
    stateful: bool = False  # ``compress`` carries a state from tensor to tensor
    shared_state: bool = False  # decoding needs that state too

    def payload_bytes(self, meta: TensorMeta, ratio: float) -> float:
        """Expected payload of ``meta``; dense where this codec would not take or not shrink it."""
        if not takes(self, meta):
            return float(meta.nbytes)
        return min(float(meta.nbytes), self.size(meta, ratio))


def _dense(meta: TensorMeta, ratio: float) -> float:
    return float(meta.nbytes)


_LOSSLESS_SHARE = {"float32": 0.83, "bfloat16": 0.665, "float16": 0.84}


def _lossless(meta: TensorMeta, ratio: float) -> float:
    """Measured on Gaussians; gradients and activations of the demo take a little less. What is no float
    is counted dense."""
    return meta.nbytes * _LOSSLESS_SHARE.get(meta.dtype, 1.0)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec(
            name="none",
            summary="the tensor's own bytes",
            builder="none:Uncompressed",
            source="-",
            size=_dense,
            exact=True,
            linear=True,
            unbiased=True,
        ),
        Codec(
            name="lossless",
            summary="exponents entropy coded apart from the noise of the mantissas; the same bits",
            builder="lossless:Lossless",
            source="ZipCCL, arXiv 2604.27844; ZipNN; compression.md 5",
            size=_lossless,
            exact=True,
            unbiased=True,
        ),
        Codec(
            name="fp16",
            summary="half precision, scaled by a power of two for each 65,536 elements",
            builder="fp16:HalfPrecision",
            source="compression.md 4 (fp16); mixed precision's loss scale, here a chunk's own",
            size=rates.size_of(rates.fp16_bytes),
        ),
        Codec(
            name="bf16",
            summary="the upper half of a float32: its range, 8 bits of precision",
            builder="bf16:BrainFloat",
            source="compression.md 1.1 and 4 (bf16)",
            size=rates.size_of(rates.bf16_bytes),
        ),
        Codec(
            name="int8_block",
            summary="8 bits a value, linear within blocks of 256",
            builder="int8_block:Int8Block",
            source="compression.md 1.1 and 4 (int8 blockwise linear)",
            size=rates.size_of(rates.int8_bytes),
        ),
        Codec(
            name="int4_block",
            summary="4 bits a value, linear within blocks of 64",
            builder="contrib.quantised.int4_block:Int4Block",
            source="compression.md 4 (int8 blockwise linear), at 4 bits",
            size=rates.size_of(rates.int4_bytes),
            valid_for=EVERYTHING - {Use.MODEL},
        ),
        Codec(
            name="eden",
            summary="1/32 to 4 bits a value: blocks turned until they look Gaussian, then Lloyd-Max levels",
            builder="eden:Eden",
            source="EDEN, arXiv 2108.08842 (not checked against the paper); scale and rates our own",
            size=rates.eden_size,
            rated=True,
            valid_for=EVERYTHING - {Use.MODEL},
        ),
        Codec(
            name="sign",
            summary="1 bit a value and the mean magnitude; behind an error feedback",
            builder="contrib.quantised.sign:Sign",
            source="EF-SignSGD; compression.md 4",
            size=rates.size_of(rates.sign_bytes),
            valid_for=CHANGES,
        ),
        Codec(
            name="qsgd",
            summary="8 bits a value (4 above ratio 4), rounded at random so that the mean stays",
            builder="contrib.quantised.qsgd:Qsgd",
            source="QSGD; compression.md 4 (buckets of 512, max norm)",
            size=rates.qsgd_size,
            rated=True,
            valid_for=EVERYTHING - {Use.MODEL},
            unbiased=True,
        ),
        Codec(
            name="terngrad",
            summary="-s, 0 or s at random, five values a byte; s clipped at 2.5 sigma",
            builder="contrib.quantised.terngrad:TernGrad",
            source="TernGrad; compression.md 4",
            size=rates.size_of(rates.terngrad_bytes),
            valid_for=CHANGES,
        ),
        Codec(
            name="natural",
            summary="sign and power of two in 8 bits, rounded at random so that the mean stays",
            builder="contrib.quantised.natural:Natural",
            source="natural compression; compression.md 4 (7-bit exponent)",
            size=rates.size_of(rates.natural_bytes),
            valid_for=CHANGES,
            unbiased=True,
        ),
        Codec(
            name="powersgd",
            summary="two thin factors of a gradient's matrix, one power iteration a step",
            builder="contrib.low_rank.powersgd:PowerSGD",
            source="PowerSGD, arXiv 1905.13727; compression.md 4",
            size=powersgd_bytes,
            rated=True,
            valid_for=CHANGES,
            stateful=True,
        ),
        Codec(
            name="acp_sgd",
            summary="PowerSGD with one factor a step, the sides alternating",
            builder="contrib.low_rank.acp_sgd:AcpSGD",
            source="ACP-SGD, arXiv 2306.08881; compression.md 4",
            size=acp_bytes,
            rated=True,
            valid_for=CHANGES,
            linear=True,
            stateful=True,
            shared_state=True,
        ),
        Codec(
            name="low_rank",
            summary="two thin factors of each tensor by itself, in fp16",
            builder="contrib.low_rank.low_rank:LowRank",
            source="SFT, arXiv 2211.16703; decentralized.md 5",
            size=cut_bytes,
            rated=True,
            valid_for=EVERYTHING - {Use.MODEL},
        ),
        Codec(
            name="topk",
            summary="the largest elements of each row, 16-bit values, positions coded by density",
            builder="topk:TopK",
            source="AdaTopK (decentralized.md 1.7); arXiv 1911.08772; compression.md 1.3, 3",
            size=sparse_sizes.topk_size,
            size_on=sparse_sizes.topk_size_on,
            rated=True,
            valid_for=EVERYTHING - {Use.MODEL},
        ),
        Codec(
            name="topk2",
            summary="the largest elements of each row, two bits a value: three times as many as topk",
            builder="contrib.sparse.topk2:TopK2",
            source="AdaTopK (decentralized.md 1.7); two bits: peers.md 7.5, compression.md 4",
            size=sizes.topk2_size,
            size_on=sizes.topk2_size_on,
            rated=True,
            valid_for=EVERYTHING - {Use.MODEL},
        ),
        Codec(
            name="random_k",
            summary="elements drawn by a shared seed, times d/k; no positions travel",
            builder="random_k:RandomK",
            source="compression.md 3 (random-k), 2.2 (SAPS-PSGD's shared mask, arXiv 2002.09692)",
            size=sparse_sizes.random_k_size,
            size_on=sparse_sizes.random_k_size,
            rated=True,
            valid_for=CHANGES,
            linear=True,
            unbiased=True,
        ),
        Codec(
            name="gaussian_k",
            summary="the largest elements by a Gaussian's threshold, lowered until the budget is met",
            builder="contrib.sparse.gaussian_k:GaussianK",
            source="Gaussian-k, arXiv 1911.08772; compression.md 1.2, 3",
            size=sparse_sizes.whole_size,
            size_on=sparse_sizes.whole_size_on,
            rated=True,
            valid_for=CHANGES,
        ),
        Codec(
            name="chunk_topk",
            summary="a fixed k of every 4,096 elements in 2 bits, positions near their entropy",
            builder="contrib.sparse.chunk_topk:ChunkTopK",
            source="peers.md 7.5 (SparseLoCo's and Psyche's mathematics); ranking: Cover 1973",
            size=sizes.chunk_size,
            rated=True,
            valid_for=CHANGES,
        ),
        Codec(
            name="dct_topk",
            summary="the largest cosine coefficients of blocks of up to 64 by 64",
            builder="contrib.sparse.dct_topk:DctTopK",
            source="DeMo; decentralized.md 8.6",
            size=sizes.dct_size,
            rated=True,
            valid_for=CHANGES,
        ),
        Codec(
            name="chain",
            summary="codecs one behind the other: top-k, 16-bit values, zstd",
            builder="contrib.chain:DefaultChain",
            source="compression.md 0, 1.3",
            size=sizes.chain_size,
            rated=True,
            valid_for=EVERYTHING - {Use.MODEL},
        ),
        Codec(
            name="error_feedback",
            summary="top-k of the whole tensor by a reused threshold; what is left out waits for the next",
            builder="error_feedback:ErrorFeedback",
            source="EF-SGD; Ok-Topk, arXiv 2201.07598; compression.md 3, 8",
            size=sparse_sizes.whole_size,
            rated=True,
            valid_for=CHANGES,
            stateful=True,
        ),
    )
}
"""Name -> facts. A new codec: its file, its entry here, a line in docs/compression.md."""


def codec(name: str) -> Codec:
    """The codec of that name. Raises UsageError with the known ones."""
    if name not in CODECS:
        raise UsageError(f"codec {name!r} is not known; there are: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def link_codecs() -> list[str]:
    """Names of the codecs that a plan may put on a link of a pipeline."""
    return sorted(name for name, facts in CODECS.items() if for_links(facts))


def for_links(codec: Codec) -> bool:
    """Return whether a plan may put it on a link: both directions of a stage pair use one codec where they
    can, so it must take activations."""
    # A link repeats a step's packets after a discard and after a loss: no state may tie its ends.
    return Use.ACTIVATION in codec.valid_for and not codec.shared_state


def takes(codec: Codec, meta: TensorMeta) -> bool:
    """Return whether a link with this codec compresses a tensor of ``meta``, or sends it uncompressed.

    Both ends ask this, so a packet's codec needs no negotiation.
    """
    if codec.name == "none" or meta.nbytes < MIN_BYTES:
        return False
    return codec.exact or meta.dtype in FLOATS
