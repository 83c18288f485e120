"""Every exchange rule by name: what it exchanges, over which collective, and how many bytes that takes.

No torch here: the coordinator plans with these facts. A rule's class is found by ``rule`` only where
tensors are at hand; the conformance suite holds each fact against the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from atoll.errors import PlanError, UsageError
from atoll.exchange import Content, Exchange, Partners, Pattern
from atoll.opdag import TensorMeta
from compressors.catalogue import codec
from compressors.contrib.low_rank.ranks import acp_bytes, powersgd_bytes
from compressors.contrib.sparse.sizes import chunk_size, dct_blocks, dct_kept
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
    rule: str  # its class, called with the Exchange: "module:Class"
    source: str  # paper and section
    volume: Volume
    content: Content = Content.GRADIENT
    partners: Partners = Partners.ALL
    pattern: Pattern = Pattern.OWNERS
    exact: bool = False  # the same model as one machine, bit for bit
    alike: bool = True  # every rank holds the same bits after a complete round
    together: bool = False  # a round counts for all of a group or for none
    phases: int = 1  # collectives a round, at most
    own_results: bool = False  # each rank computes its result of the totals: bits agree in a device class
    works_as: str = ""  # codec that takes as long; none: the exchange's own
    by_rates: bool = False  # pairs are drawn by how fast they are
    everybody_every: int = 0  # rounds of groups, of which the last is everybody's; 0: never
    check: Callable[[Exchange], None] = lambda exchange: None  # raises PlanError for settings not meant
    efficiencies: tuple[tuple[int, float], ...] = ()  # (steps between rounds, ...), ascending; see below
    # Copies of the trained parameters that a peer with local steps has beside model, gradients and optimizer
    # when a commit uses a round's result, which is when it has most: the peak of a process's memory, measured
    # with 64 MiB of parameters over three rounds, the last of which joins all; with a lossy codec where the
    # rule takes one. Of a rule of gradients those that a replica has beside what exact sums need.
    own_copies: int = 0
    # And further ones over the ratio, where values travel with positions (8 bytes each in memory).
    pair_copies: int = 0

    def copies(self, exchange: Exchange) -> float:
        """Copies of the trained parameters that ``own_copies`` and ``pair_copies`` come to."""
        return self.own_copies + self.pair_copies / exchange.ratio

    def efficiency_at(self, every: int) -> float:
        """Tokens that an exact way needs to the same held-out loss, over those that this rule needs with a
        round every ``every`` steps. Measured by benchmarks/local_steps.py on the demo's text, interpolated in
        the logarithm, held constant outside. 1 for an exact rule and where nothing was measured."""
        if not self.efficiencies:
            return 1.0
        below = [at for at in self.efficiencies if at[0] <= every] or [self.efficiencies[0]]
        above = [at for at in self.efficiencies if at[0] >= every] or [self.efficiencies[-1]]
        (low, at_low), (high, at_high) = below[-1], above[0]
        if low == high:
            return at_low
        share = (log(every) - log(low)) / (log(high) - log(low))
        return at_low + share * (at_high - at_low)


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


def coded_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """2 (R - 1) / R of one fragment through the exchange's codec."""
    meta = TensorMeta((elements_of(shapes) // exchange.fragments,), "float32")
    return codec(exchange.codec).size(meta, exchange.ratio) * 2.0 * (ranks - 1) / ranks


def no_codec(exchange: Exchange) -> None:
    """Refuse a codec where the rule itself decides how values travel."""
    if exchange.codec != "none":
        raise PlanError(
            f"exchange {exchange.rule!r} with codec {exchange.codec!r}: it has its own; set its ratio alone"
        )


def dense_codec(exchange: Exchange) -> None:
    """Refuse codecs that keep a state from tensor to tensor, or some elements alone."""
    facts = codec(exchange.codec)
    if facts.stateful or facts.size_on is not None:
        raise PlanError(
            f"exchange {exchange.rule!r} with codec {exchange.codec!r}: it takes dense codecs without state "
            "(none, fp16, int8_block, int4_block, ...)"
        )


def check_gradient_rule(exchange: Exchange) -> None:
    """Raise PlanError or UsageError for a rule of gradients that workers do not run as it is set."""
    facts = exchange_facts(exchange.rule)
    if facts.content is not Content.GRADIENT or exchange.quorum < 1.0:
        raise PlanError(
            f"{exchange.rule} with a quorum of {exchange.quorum} is no rule of gradients on workers"
        )
    facts.check(exchange)
    dense_codec(exchange)


def at_once(exchange: Exchange) -> None:
    """Refuse fragments and delays too."""
    dense_codec(exchange)
    if exchange.fragments > 1 or exchange.delay:
        raise PlanError(
            f"exchange {exchange.rule!r} with {exchange.fragments} fragments and a delay of {exchange.delay} "
            "steps: it takes the model at once; 'streaming_diloco' has both"
        )


def own_codec_at_once(exchange: Exchange) -> None:
    """Refuse codecs, fragments and delays."""
    no_codec(exchange)
    at_once(exchange)


def factor_volume(bytes_of: Callable[[TensorMeta, float], float]) -> Volume:
    """2 (R - 1) / R of what ``bytes_of`` says of each tensor at the exchange's ratio."""

    def volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
        once = sum(bytes_of(TensorMeta(tuple(shape), "float32"), exchange.ratio) for shape in shapes)
        return once * 2.0 * (ranks - 1) / ranks

    return volume


def random_k_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """2 (R - 1) / R of the values that are drawn."""
    meta = TensorMeta((elements_of(shapes),), "float32")
    return 4.0 * random_k_of(meta, exchange.ratio) * 2.0 * (ranks - 1) / ranks


def tree_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """Bytes of the root, which sends k pairs (position, value) ``tree_hops`` times; others send less."""
    elements = elements_of(shapes)
    return vector_bytes(vector_kept(elements, exchange.ratio), elements) * tree_hops(ranks)


def tree_hops(ranks: int) -> int:
    """Hops of a binomial tree, one way."""
    return (ranks - 1).bit_length()


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


def masked_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """Values at the mask, to one peer, in the mean."""
    return 4.0 * elements_of(shapes) / exchange.ratio


def byte_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """A byte an element, to one reader."""
    return float(elements_of(shapes))


def chunk_volume(shapes: Shapes, exchange: Exchange, ranks: int) -> float:
    """A rank's coded chunks of each tensor, to each other one."""
    metas = (TensorMeta((elements_of((shape,)),), "float32") for shape in shapes)
    return sum(chunk_size(meta, exchange.ratio) for meta in metas if meta.elements) * (ranks - 1)


EXCHANGES: dict[str, ExchangeFacts] = {
    facts.name: facts
    for facts in (
        ExchangeFacts(
            name="sum",
            summary="exact data parallelism: gradients of blocks of micro-batches, added in one order",
            rule="strategies.exchanges.mean:Sum",
            source="papers/compression.md 7 (butterfly), in a fixed order",
            volume=dense_volume,
            exact=True,
            together=True,
        ),
        ExchangeFacts(
            name="mean",
            summary="weighted mean of gradients, with error feedback where the codec is lossy",
            rule="strategies.exchanges.mean:Mean",
            source="papers/compression.md 3 (error feedback), 5 (8-bit all-reduce)",
            volume=coded_volume,
            own_copies=3,
        ),
        ExchangeFacts(
            name="powersgd",
            summary="mean of gradients as two factors of low rank, one averaged after the other",
            rule="strategies.exchanges.low_rank.powersgd:PowerSgd",
            source="papers/compression.md 4 (PowerSGD)",
            volume=factor_volume(powersgd_bytes),
            together=True,
            phases=2,
            own_results=True,
            works_as="low_rank",
            check=no_codec,
            own_copies=3,
            efficiencies=((1, 0.35),),
        ),
        ExchangeFacts(
            name="acp_sgd",
            summary="mean of gradients as one factor of low rank a round, the sides alternating",
            rule="strategies.exchanges.low_rank.acp_sgd:AcpSgd",
            source="papers/compression.md 4 (ACP-SGD)",
            volume=factor_volume(acp_bytes),
            together=True,
            own_results=True,
            works_as="low_rank",
            check=no_codec,
            own_copies=3,
            efficiencies=((1, 0.46),),
        ),
        ExchangeFacts(
            name="random_k",
            summary="gradients at positions drawn from the seed, one in ``ratio``; no position travels",
            rule="strategies.exchanges.random_k:RandomK",
            source="papers/compression.md 3 (random-k)",
            volume=random_k_volume,
            works_as="fp16",
            check=no_codec,
            own_copies=3,
            efficiencies=((1, 0.05),),
        ),
        ExchangeFacts(
            name="gtopk",
            summary="the k largest elements of the sum of all top-k's, merged along a binomial tree",
            rule="strategies.exchanges.sparse.gtopk:GTopK",
            source="papers/compression.md 3 (gTop-k)",
            pattern=Pattern.TREE,
            volume=tree_volume,
            works_as="topk",
            check=no_codec,
            own_copies=2,
            pair_copies=9,
            efficiencies=((1, 0.20),),
        ),
        ExchangeFacts(
            name="ok_topk",
            summary="about the k largest elements of the sum, by re-used thresholds and balanced regions",
            rule="strategies.exchanges.sparse.ok_topk:OkTopK",
            source="papers/compression.md 3 (Ok-Topk)",
            volume=region_volume,
            together=True,
            phases=2,
            works_as="topk",
            check=no_codec,
            own_copies=2,
            pair_copies=9,
            efficiencies=((1, 0.20),),
        ),
        ExchangeFacts(
            name="demo",
            summary="signs of the mean of the momenta's largest cosine coefficients, for plain SGD",
            rule="strategies.exchanges.sparse.demo:Demo",
            source="papers/decentralized.md 8.6 (DeMo)",
            volume=demo_volume,
            own_results=True,
            works_as="dct_topk",
            check=no_codec,
            own_copies=3,
            pair_copies=9,
            efficiencies=((1, 0.47),),
        ),
        ExchangeFacts(
            name="diloco",
            summary="many local steps, then an outer Nesterov step along the mean change",
            rule="strategies.exchanges.diloco:DiLoCo",
            source="papers/decentralized.md 8.4",
            content=Content.DELTA,
            volume=coded_volume,
            check=at_once,
            own_copies=15,
            efficiencies=((10, 0.38), (50, 0.58), (100, 0.48)),
        ),
        ExchangeFacts(
            name="streaming_diloco",
            summary="DiLoCo a fragment at a time, used some steps later: lower peaks, no waiting",
            rule="strategies.exchanges.streaming_diloco:StreamingDiLoCo",
            source="papers/decentralized.md 8.5",
            content=Content.DELTA,
            volume=coded_volume,
            alike=False,
            check=dense_codec,
            own_copies=15,
            efficiencies=((12, 0.67),),
        ),
        ExchangeFacts(
            name="sparseloco",
            summary="many local steps, then the mean of the largest changes of chunks; the rest decays",
            rule="strategies.exchanges.sparseloco:SparseLoCo",
            source="papers/peers.md 7.5 (SparseLoCo), decentralized.md 8.4",
            content=Content.DELTA,
            pattern=Pattern.GATHERED,
            volume=chunk_volume,
            together=True,
            check=own_codec_at_once,
            own_copies=13,
            efficiencies=((10, 0.28), (50, 0.12)),
        ),
        ExchangeFacts(
            name="saps",
            summary="pairs average the elements that a shared seed draws, one in ``ratio``",
            rule="strategies.exchanges.saps:SapsPsgd",
            source="papers/compression.md 2.2",
            content=Content.MODEL,
            partners=Partners.PAIRS,
            pattern=Pattern.PAIRWISE,
            volume=masked_volume,
            alike=False,
            together=True,
            by_rates=True,
            check=no_codec,
            own_copies=7,
            efficiencies=((1, 0.68),),
        ),
        ExchangeFacts(
            name="swarm",
            summary="bursts of local steps, then the mean with the model that another peer published last; "
            "nobody waits",
            rule="strategies.exchanges.swarm:SwarmSgd",
            source="papers/compression.md 7 (SwarmSGD)",
            content=Content.MODEL,
            partners=Partners.PAIRS,
            pattern=Pattern.PUBLISHED,
            volume=byte_volume,
            alike=False,
            check=no_codec,
            own_copies=16,
            efficiencies=((5, 0.59),),
        ),
        ExchangeFacts(
            name="wagma",
            summary="changing groups average models, everybody every tenth round; late ranks hold nobody up",
            rule="strategies.exchanges.wagma:Wagma",
            source="papers/compression.md 7 (WAGMA-SGD)",
            content=Content.MODEL,
            partners=Partners.GROUPS,
            volume=dense_volume,
            everybody_every=10,
            check=no_codec,
            own_copies=7,
            efficiencies=((1, 0.81),),
        ),
    )
}


def exchange_facts(name: str) -> ExchangeFacts:
    """Facts of the rule of that name. Raises UsageError with the known ones."""
    if name not in EXCHANGES:
        raise UsageError(f"exchange {name!r} is not known; there are: {', '.join(sorted(EXCHANGES))}")
    return EXCHANGES[name]
