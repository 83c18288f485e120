"""Every exchange rule by name: what it exchanges, over which collective, and how many bytes that takes.

No torch here: the coordinator plans with these facts. A rule's class is found by ``module`` and ``builder``
only where tensors are at hand; the conformance suite holds each fact against the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.exchange import Content, Exchange, Partners, Pattern
from atoll.opdag import TensorMeta
from compressors.contrib.sizes import dct_blocks, dct_kept
from compressors.sparse_sizes import random_k_of, vector_bytes, vector_kept

Shapes = Sequence[tuple[int, ...]]
"""Shapes of the exchanged tensors, in the order in which they follow each other."""
Volume = Callable[[Shapes, Exchange, int], float]
"""(shapes, exchange, ranks) -> bytes that a rank is expected to send a round, shares being even."""


@dataclass(frozen=True, slots=True)
class ExchangeFacts:
    """Facts of one rule."""

    name: str
    summary: str  # one line for users
    module: str  # below ``strategies.exchanges``
    builder: str  # class in it; called with the Exchange
    source: str  # paper and section
    content: Content
    partners: Partners
    pattern: Pattern
    volume: Volume
    exact: bool = False  # the same model as one machine, bit for bit
    alike: bool = True  # every rank holds the same bits after a complete round
    together: bool = False  # a round counts for all of a group or for none
    phases: int = 1  # collectives a round, at most


def elements_of(shapes: Shapes) -> int:
    """Elements of tensors of these shapes."""
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def dense_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """2 (R - 1) / R of the vector, uncompressed."""
    return 4.0 * elements_of(shapes) * 2.0 * (ranks - 1) / ranks


def random_k_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """2 (R - 1) / R of the values that are drawn."""
    meta = TensorMeta((elements_of(shapes),), "float32")
    return 4.0 * random_k_of(meta, exchange.ratio) * 2.0 * (ranks - 1) / ranks


def tree_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """Of the root, which sends k pairs down ceil(log2 R) times; the others send less."""
    elements = elements_of(shapes)
    return vector_bytes(vector_kept(elements, exchange.ratio), elements) * (ranks - 1).bit_length()


def region_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """2 (R - 1) / R of k pairs."""
    elements = elements_of(shapes)
    return vector_bytes(vector_kept(elements, exchange.ratio), elements) * 2.0 * (ranks - 1) / ranks


def demo_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """(R - 1) / R of a rank's pairs and of all that have a mean, positions taken to be independent."""
    metas = [TensorMeta(tuple(shape), "float32") for shape in shapes]
    blocks = [dct_blocks(meta).coefficients for meta in metas]
    kept = sum(b.shape[0] * dct_kept(meta, exchange.ratio) for b, meta in zip(blocks, metas, strict=True))
    return (_pairs(1, kept, blocks) + _pairs(ranks, kept, blocks)) * (ranks - 1) / ranks


def _pairs(ranks: int, kept: int, blocks: Sequence[TensorMeta]) -> float:
    """Bytes of the pairs that at least one of ``ranks`` has, of ``kept`` each."""
    elements = sum(block.elements for block in blocks)
    held = round(elements * (1.0 - (1.0 - kept / elements) ** ranks))
    return vector_bytes(held, elements)


EXCHANGES: dict[str, ExchangeFacts] = {
    facts.name: facts
    for facts in (
        ExchangeFacts(
            name="sum",
            summary="exact data parallelism: gradients of blocks of micro-batches, added in one order",
            module="mean",
            builder="Sum",
            source="papers/compression.md 7 (butterfly), in a fixed order",
            content=Content.GRADIENT,
            partners=Partners.ALL,
            pattern=Pattern.OWNERS,
            volume=dense_volume,
            exact=True,
            together=True,
        ),
        ExchangeFacts(
            name="mean",
            summary="weighted mean of gradients, with error feedback where the codec is lossy",
            module="mean",
            builder="Mean",
            source="papers/compression.md 3 (error feedback), 5 (8-bit all-reduce)",
            content=Content.GRADIENT,
            partners=Partners.ALL,
            pattern=Pattern.OWNERS,
            volume=dense_volume,
        ),
        ExchangeFacts(
            name="random_k",
            summary="gradients at positions drawn from the seed, one in ``ratio``; no position travels",
            module="random_k",
            builder="RandomK",
            source="papers/compression.md 3 (random-k)",
            content=Content.GRADIENT,
            partners=Partners.ALL,
            pattern=Pattern.OWNERS,
            volume=random_k_volume,
        ),
        ExchangeFacts(
            name="gtopk",
            summary="the k largest elements of the sum of all top-k's, merged along a binomial tree",
            module="gtopk",
            builder="GTopK",
            source="papers/compression.md 3 (gTop-k)",
            content=Content.GRADIENT,
            partners=Partners.ALL,
            pattern=Pattern.TREE,
            volume=tree_volume,
        ),
        ExchangeFacts(
            name="ok_topk",
            summary="about the k largest elements of the sum, by re-used thresholds and balanced regions",
            module="ok_topk",
            builder="OkTopK",
            source="papers/compression.md 3 (Ok-Topk)",
            content=Content.GRADIENT,
            partners=Partners.ALL,
            pattern=Pattern.OWNERS,
            volume=region_volume,
            together=True,
            phases=2,
        ),
        ExchangeFacts(
            name="demo",
            summary="signs of the mean of the momenta's largest cosine coefficients, for plain SGD",
            module="demo",
            builder="Demo",
            source="papers/decentralized.md 8.6 (DeMo)",
            content=Content.GRADIENT,
            partners=Partners.ALL,
            pattern=Pattern.OWNERS,
            volume=demo_volume,
        ),
    )
}


def exchange_facts(name: str) -> ExchangeFacts:
    """Facts of the rule of that name. Raises UsageError with the known ones."""
    if name not in EXCHANGES:
        raise UsageError(f"exchange {name!r} is not known; there are: {', '.join(sorted(EXCHANGES))}")
    return EXCHANGES[name]
