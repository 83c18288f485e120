"""Facts of the gradient rules, as ``strategies.exchanges.catalogue`` has those of the rules of workers."""

from __future__ import annotations

from functools import partial

from atoll.exchange import Content, Exchange, Partners, Pattern
from atoll.opdag import TensorMeta
from compressors.contrib.sizes import dct_blocks, dct_kept
from compressors.sparse_sizes import vector_bytes, vector_kept
from strategies.exchanges.catalogue import ExchangeFacts, Shapes, dense_volume, elements_of, no_codec


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
    elements = sum(block.elements for block in blocks)
    union = round(elements * (1.0 - (1.0 - kept / elements) ** ranks))
    return (vector_bytes(kept, elements) + vector_bytes(union, elements)) * (ranks - 1) / ranks


_of_gradients = partial(
    ExchangeFacts,
    content=Content.GRADIENT,
    partners=Partners.ALL,
    pattern=Pattern.OWNERS,
    check=no_codec,
)
"""A rule that joins the gradients of all ranks in a form of its own, so that no codec goes with it."""

GRADIENT_RULES = (
    ExchangeFacts(
        name="eager",
        summary="mean of the gradients that are ready at a quorum; late ones join the next round",
        module="experiments.exchanges.eager",
        builder="Eager",
        source="papers/compression.md 7 (eager-SGD)",
        content=Content.GRADIENT,
        partners=Partners.ALL,
        pattern=Pattern.OWNERS,
        volume=dense_volume,
    ),
    _of_gradients(
        name="gtopk",
        summary="the k largest elements of the sum of all top-k's, merged along a binomial tree",
        module="experiments.exchanges.gtopk",
        builder="GTopK",
        source="papers/compression.md 3 (gTop-k)",
        pattern=Pattern.TREE,
        volume=tree_volume,
    ),
    _of_gradients(
        name="ok_topk",
        summary="about the k largest elements of the sum, by re-used thresholds and balanced regions",
        module="experiments.exchanges.ok_topk",
        builder="OkTopK",
        source="papers/compression.md 3 (Ok-Topk)",
        volume=region_volume,
        together=True,
        phases=2,
    ),
    _of_gradients(
        name="demo",
        summary="signs of the mean of the momenta's largest cosine coefficients, for plain SGD",
        module="experiments.exchanges.demo",
        builder="Demo",
        source="papers/decentralized.md 8.6 (DeMo)",
        volume=demo_volume,
        efficiencies=((1, 0.47),),
    ),
)
