"""What the replicas of a plan exchange: which rank holds what, in which messages, and who adds.

Every trained parameter has one holder in each replica: the stage of its first use, which folds the uses of
later stages as well. Parameters with the same holders are a group. Its gradients follow each other from the
last op to the first, as backwards finish them, and are merged into buckets; a bucket is cut among its
holders, each of which adds one segment (``collective.owners``). All ranks derive the same from the plan and
the ops of their own stage.

Where another rule than exact sums joins them (``Exchange.keeps``), each replica brings one contribution, all
of its blocks, under the replica's number. What its round left out is stored under ``kept_name``.

A part is the sum over one block of micro-batches, or over all blocks of the replica that begins the step
(``block_sums``). Blocks are added in ascending order, so a total has the bits of one machine. Behind its
elements a bucket has one mark for each parameter: whether anything reached it. A parameter without a gradient
is not stepped, and that is not the same as a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from atoll.collective import TOTAL, Collective, Send, cut, even_shares, owner_shares, owners, site_owners
from atoll.job import stepwise_groups
from atoll.microbatch import own_blocks
from atoll.opdag import FLOATING, Source, leaf_refs

if TYPE_CHECKING:
    from atoll.exchange import Exchange
    from atoll.job import Optimizer
    from atoll.opdag import StateMeta
    from atoll.plan import Plan
    from atoll.program import StageProgram

ELEMENT_BYTES = 4  # gradients are float32
BESIDE = "@"


def kept_name(name: str, replica: int) -> str:
    """Name that a checkpoint has for what a replica's rule of exchange keeps of a parameter; no model has
    such a name beside the parameter's."""
    return f"{name}{BESIDE}{replica}"


def kept_of(name: str) -> tuple[str, int] | None:
    """Return the parameter and the replica of a ``kept_name``, None for another name."""
    base, _, replica = name.rpartition(BESIDE)
    return (base, int(replica)) if base and replica.isascii() and replica.isdecimal() else None


class Arriving(NamedTuple):
    """A message of a bucket, and the replica that sends it."""

    segment: int
    label: int  # block, or ``collective.TOTAL``
    source: int
    phase: int = 0  # of a rule that has several


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, as one of their holders sees them.

    ``op`` tells its messages from those of other buckets: the last one that first uses any of these
    parameters. Ranks of the ``collective`` are numbers of replicas, and its segments their owners'.
    """

    op: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements of each
    replica: int  # this holder's
    holders: tuple[int, ...]  # ranks of the plan, by replica
    collective: Collective
    arriving: tuple[Arriving, ...]
    labels: tuple[int, ...]  # parts that this holder has

    @property
    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(parameter, first element, end) in the bucket."""
        return (
            (name, *span)
            for name, span in zip(self.names, pairwise((0, *accumulate(self.sizes))), strict=True)
        )

    @property
    def elements(self) -> int:
        """Number of elements, without the marks."""
        return sum(self.sizes)

    @property
    def passed_on(self) -> frozenset[int]:
        """Segments whose total this holder sends on, whoever made it."""
        sends = (a for a in self.collective.actions[self.replica] if isinstance(a, Send))
        return frozenset(send.segment for send in sends if send.label == TOTAL)


def joining(
    exchange: Exchange, ranks: Sequence[int], labels: Mapping[int, Sequence[int]], elements: int
) -> Collective:
    """Return the collective in which replicas join so many elements.

    ``ranks`` of the plan that hold them, ``labels`` of their parts, both by replica. Where the ranks of one
    site exchange among themselves first, each segment has one gateway a site; else one owner.
    """
    rates = [exchange.rates[rank] for rank in ranks] if exchange.rates else [1.0] * len(ranks)
    sites = _sites([exchange.sites[rank] for rank in ranks]) if exchange.inner and exchange.sites else ()
    if sites:
        gateways = zip(*sites, strict=False)  # of each segment: as many as the smallest site has ranks
        slowest = [min(rates[replica] for replica in those) for those in gateways]
        return site_owners(labels, cut(elements, slowest), sites)
    shares = owner_shares(rates) if exchange.rates else even_shares(len(ranks))
    return owners(labels, cut(elements, shares), range(len(ranks)))


def _sites(site_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Replicas of each site in the order of their blocks. None where there is one site, where none has two
    replicas, or where another's blocks lie between those of one: then a sum in their order would cross
    between sites more often than an exchange without sites."""
    runs = [tuple(at for at, _ in run) for _, run in groupby(enumerate(site_of), key=lambda entry: entry[1])]
    return tuple(runs) if 1 < len(runs) == len(set(site_of)) < len(site_of) else ()


def part_labels(plan: Plan, replica: int) -> tuple[int, ...]:
    """Return the parts that a replica has of every gradient: its blocks, or 0 alone where they begin the
    step."""
    blocks = own_blocks(plan.n_micro, plan.blocks, plan.replicas[replica].micros)
    return (0,) if 0 in blocks else tuple(blocks)


def contributions(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the labels of what each replica contributes to an exchange: its parts, or one of all."""
    return {
        number: (number,) if plan.keeps else part_labels(plan, number) for number in range(len(plan.replicas))
    }


def first_uses(programs: Iterable[StageProgram]) -> dict[str, int]:
    """Return the op that first uses each parameter of a stage, of those whose first use is in this stage;
    ``programs``: of its pieces, in their order."""
    found: dict[str, int] = {}
    for program in programs:
        elsewhere = {tied.name for tied in program.tied if tied.holders[0] != program.stage}
        for op, node in program.ops:
            for leaf in leaf_refs(node):
                if leaf.source is Source.PARAMETER and leaf.name not in elsewhere:
                    found.setdefault(leaf.name, op)
    return found


def buckets(
    plan: Plan, replica: int, programs: Sequence[StageProgram], elements: Mapping[str, int]
) -> tuple[Bucket, ...]:
    """Return what a stage of these pieces exchanges in a replica, in the order in which it is finished.

    ``elements``: of the trained parameters. Empty in a plan of one replica, and where peers exchange changes.
    """
    if len(plan.replicas) < 2 or plan.exchange is None or plan.local:
        return ()
    uses = {name: op for name, op in first_uses(programs).items() if name in elements}
    held = _by_holders(plan, uses)
    own = part_labels(plan, replica)
    labels = contributions(plan)
    found = []
    for ranks, names in held.items():  # from the last op to the first
        by_op = (list(same) for _, same in groupby(names, key=lambda name: uses[name]))
        for bucket in _merged(by_op, elements, plan.exchange.bucket_bytes):
            sizes = tuple(elements[name] for name in bucket)
            marks = 0 if plan.keeps else len(sizes)
            collective = joining(plan.exchange, ranks, labels, sum(sizes) + marks)
            arriving = tuple(
                Arriving(segment, label, source)
                for (segment, label), source in collective.sources(replica).items()
            )
            op = max(uses[name] for name in bucket)
            found.append(Bucket(op, tuple(bucket), sizes, replica, ranks, collective, arriving, own))
    return tuple(sorted(found, key=lambda bucket: -bucket.op))


def _by_holders(plan: Plan, uses: dict[str, int]) -> dict[tuple[int, ...], list[str]]:
    """Return parameters by who holds them, a rank of each replica, those of the last op first; ``uses``: the
    op that first uses each."""
    pieces = [other.pieces for other in plan.replicas]
    firsts = list(accumulate((len(other.stages) for other in plan.replicas), initial=0))
    held: dict[tuple[int, ...], list[str]] = {}
    for name, op in reversed(uses.items()):
        ranks = tuple(
            first + next(p.stage for p in reversed(placed) if p.piece.start <= op)
            for first, placed in zip(firsts, pieces, strict=False)
        )
        held.setdefault(ranks, []).append(name)
    return held


@dataclass(frozen=True)
class Slice:
    """Trained parameters that have the same holder in each replica; peers with local steps exchange them as
    one row, in this order. ``op`` tells its messages from those of other slices: the last one that first uses
    any of them."""

    op: int
    names: tuple[str, ...]
    holders: tuple[int, ...]  # ranks of the plan, by replica


def slices(plan: Plan, programs: Sequence[StageProgram], trained: Iterable[str]) -> tuple[Slice, ...]:
    """Return what a stage of these pieces exchanges of its ``trained`` parameters, from the last op on. Where
    each replica is one stage, that is the whole model."""
    wanted = frozenset(trained)
    uses = {name: op for name, op in first_uses(programs).items() if name in wanted}
    return tuple(
        Slice(max(uses[name] for name in names), tuple(names), ranks)
        for ranks, names in _by_holders(plan, uses).items()
    )


def _merged(
    by_op: Iterable[Sequence[str]], elements: Mapping[str, int], most_bytes: int
) -> Iterator[list[str]]:
    """Merge parameters in their order up to so many bytes; those of one op stay together."""
    bucket: list[str] = []
    for names in by_op:
        n_bytes = ELEMENT_BYTES * sum(elements[name] for name in (*bucket, *names))
        if bucket and n_bytes > most_bytes:
            yield bucket
            bucket = []
        bucket += names
    if bucket:
        yield bucket


def trained_elements(
    names: Iterable[str], states: Mapping[str, StateMeta], optimizer: Optimizer
) -> dict[str, int]:
    """Return the number of elements of each parameter that is trained."""
    groups = stepwise_groups(tuple(names), optimizer)
    return {
        name: prod(states[name].meta.shape)
        for name, group in groups.items()
        if states[name].requires_grad and not group.frozen and states[name].meta.dtype in FLOATING
    }
