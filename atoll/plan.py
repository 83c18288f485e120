"""Plan, Replica, StageSpec, LinkSpec: who computes what, with whom, in which order; and why.

A Plan is fenced by (job, version): every message carries both, and a worker drops what does not
match. It has one or more replicas of the pipeline, each for a share of the step's micro-batches and each
with a cut of its own; what several of them have in common is joined by the plan's exchange. A stage is one
piece or several: a piece is an interval of the training DAG's canonical op order and one of the evaluation
DAG's. Pieces are numbered in that order, and links are named by them; where each stage has one piece, these
are the stages' own numbers. ``validate`` is the shared rule that planner and worker both check.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

from atoll.bounded import MAX_ARGS, MAX_STAGES, At, Coded, Most, Name, OptionalBlob, Unsent, Unset, Within
from atoll.compression import MAX_RATIO
from atoll.errors import PlanError
from atoll.exchange import SIGN_RULES, Exchange, check_exchange
from atoll.job import EXACTLY, Keeping, TrainingSpec
from atoll.microbatch import Action, Depth, ScheduleName, Work, block_ranges, in_turn
from atoll.opdag import FLOATING, OpDag, Source, leaf_refs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MAX_MICROS = 4096  # of a step
MAX_PIECES = 16  # of a stage
MAX_MEMORY_TERMS = 32
MAX_MEMORY_SCALE = 1e3
Micros = Annotated[int, Within(0, MAX_MICROS)]
Stage = Annotated[int, Within(0, MAX_STAGES - 1)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Half-open op intervals that a worker runs in one go."""

    start: int
    stop: int
    eval_start: int
    eval_stop: int
    warmup: Micros  # forwards before the first backward; n_micro for GPipe
    held: Micros = 0  # zero-bubble: most micro-batches that hold activations; 0: backwards are whole


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A worker's first piece, and the worker that runs it and the ``further`` ones, ascending."""

    start: int
    stop: int
    eval_start: int
    eval_stop: int
    worker: Annotated[Name, Coded("one worker")]
    warmup: Micros
    held: Micros = 0
    further: Annotated[tuple[Piece, ...], Most(MAX_PIECES - 1)] = ()
    inside: str = ""  # how the worker's processes divide it, where there are several (``atoll.mesh.layout``)
    keeping: Keeping = EXACTLY

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of its pieces, in their order."""
        first = Piece(self.start, self.stop, self.eval_start, self.eval_stop, self.warmup, self.held)
        return (first, *self.further)

    def with_pieces(self, pieces: Sequence[Piece]) -> StageSpec:
        """Return the same worker with these pieces, ascending and at least one."""
        return replace(stage_of(self.worker, pieces), inside=self.inside, keeping=self.keeping)


def stage_of(worker: str, pieces: Sequence[Piece]) -> StageSpec:
    """Return the stage of a worker that runs these pieces, ascending and at least one."""
    p = pieces[0]
    return StageSpec(p.start, p.stop, p.eval_start, p.eval_stop, worker, p.warmup, p.held, tuple(pieces[1:]))


class PlacedPiece(NamedTuple):
    """A piece of a replica; its number among the replica's pieces is its position in their order."""

    piece: Piece
    stage: int
    turn: int  # number among the pieces of its stage


@dataclass(frozen=True, slots=True)
class Place:
    """Work of one worker of a plan; its number among the plan's places is the worker's rank."""

    worker: str
    stage: int
    replica: int


class Mask(StrEnum):
    """Which elements of a gradient a sparse codec sends back over the link that carried its value."""

    NONE = ""  # the codec is not sparse, or the link carries no gradients
    SAME = "same"  # the value's positions: no index bytes, the true gradient of the masked net
    INDEPENDENT = "independent"  # the gradient's own largest


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Codec of the tensors from one piece to another; fixed within a plan version."""

    source: Stage
    target: Stage
    codec: Name = "none"
    # Dense bytes / wire bytes aimed at, >= 1; fixed-rate codecs ignore it.
    ratio: Annotated[float, Within(1.0, MAX_RATIO)] = 1.0
    mask: Mask = Mask.NONE
    reason: str = field(default="", compare=False)  # why, in words for users


@dataclass(frozen=True, slots=True)
class LinkPrediction:
    source: str  # worker
    target: str
    bytes_per_step: int
    busy_s: float
    dense_bytes_per_step: int = 0  # of the same tensors uncompressed
    under_way_s: Annotated[float, Within()] = 0.0  # busy_s and waiting behind other flows on shared lines


@dataclass(frozen=True, slots=True)
class StagePrediction:
    worker: str
    compute_s: float  # per step
    busy_share: float  # of the step
    memory_bytes: int
    memory_limit_bytes: int
    codec_s: float = 0.0  # per step: encoding and decoding, beside compute_s
    handling_s: float = 0.0  # per step: messages, wakings; beside both
    gradient_bytes: int = 0  # of the parameters that one op uses; of those that several use, once for each:
    tied_gradient_bytes: int = 0  # what sums of blocks, and other replicas, take more memory for
    # (name, bytes) of the model, before ``memory_scale``
    memory_terms: Annotated[tuple[tuple[str, int], ...], Most(MAX_MEMORY_TERMS)] = ()
    # Of the model's bytes, as learnt of the job: ``memory_bytes`` counts with it.
    memory_scale: Annotated[float, Within(0.0, MAX_MEMORY_SCALE), Unset(1.0)] = 1.0
    # Whose seconds these are, where another has the place since; neither sent nor kept.
    figures_of: Annotated[str, Unsent()] = ""

    @property
    def model_bytes(self) -> float:
        """Bytes of memory as the model has them, without what was learnt."""
        return self.memory_bytes / self.memory_scale

    def at(self, worker: str) -> StagePrediction:
        """Return the same with another worker in the place: the seconds stay those of the one before."""
        before = self.figures_of or self.worker
        return replace(self, worker=worker, figures_of="" if before == worker else before)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What losses of workers make of a plan's step, at the fleet's rate of losses."""

    step_s: float  # expected: the predicted step, with what losses and snapshots cost
    loss_s: float  # that a loss costs, on average over the plan's workers
    losses_per_s: float  # of one worker
    standby: str = ""  # worker that is idle since it is worth more so than in the plan
    other_step_s: float = 0.0  # expected with it in the plan; without: with one left idle; 0: not compared


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a plan by the timeline; every number in seconds or bytes per step."""

    step_s: float
    lower_bound_s: float  # papers/peers.md 7.1
    bottleneck: str  # "link w1>w3" | "stage 2 on w3" | "latency"
    reason: str
    stages: Annotated[tuple[StagePrediction, ...], Most(MAX_STAGES)] = ()
    links: tuple[LinkPrediction, ...] = ()
    commit_s: float = 0.0
    single_machine_s: float | None = None  # the fastest member alone, memory aside
    single_machine: str = ""
    notes: Annotated[tuple[str, ...], Most(MAX_ARGS)] = ()
    outlook: Outlook | None = None  # of one pipeline


@dataclass(frozen=True, slots=True)
class Replica:
    """A whole pipeline for some of the step's micro-batches; its links name its own pieces."""

    micros: Annotated[tuple[int, int], At("start", "stop")]  # half-open, on borders of blocks
    stages: Annotated[tuple[StageSpec, ...], Most(MAX_STAGES)]
    links: tuple[LinkSpec, ...] = ()

    @property
    def pieces(self) -> tuple[PlacedPiece, ...]:
        """All pieces in the order of the DAG's ops."""
        placed = (
            PlacedPiece(piece, at, turn)
            for at, stage in enumerate(self.stages)
            for turn, piece in enumerate(stage.pieces)
        )
        return tuple(sorted(placed, key=lambda one: one.piece.start))

    @property
    def eval_stop(self) -> int:
        """Position of the evaluation DAG where its last piece ends; 0: nothing is evaluated."""
        return max(piece.eval_stop for stage in self.stages for piece in stage.pieces)

    @property
    def evaluated(self) -> bool:
        """Whether its stages evaluate."""
        return self.eval_stop > 0

    @property
    def starts(self) -> tuple[int, ...]:
        """Position where each piece begins, ascending."""
        return tuple(one.piece.start for one in self.pieces)

    @property
    def eval_starts(self) -> tuple[int, ...]:
        """Position of the evaluation DAG where each piece begins."""
        return tuple(one.piece.eval_start for one in self.pieces)

    @property
    def workers(self) -> tuple[str, ...]:
        """The worker of each piece."""
        return tuple(self.stages[one.stage].worker for one in self.pieces)

    @property
    def codecs(self) -> dict[tuple[str, str], LinkSpec]:
        """The codec between two workers; where several of their pieces exchange, one that is coded."""
        workers = self.workers
        ordered = sorted(self.links, key=lambda link: link.codec != "none")
        return {(workers[link.source], workers[link.target]): link for link in ordered}


@dataclass(frozen=True, slots=True)
class Plan:
    """Versioned way to run one job."""

    job: Name
    version: int
    dag_hash: OptionalBlob
    eval_dag_hash: OptionalBlob
    partitioner: Name
    schedule: ScheduleName
    n_micro: Annotated[int, Within(1, MAX_MICROS)]
    replicas: Annotated[tuple[Replica, ...], Coded("replicas")]
    left_out: tuple[tuple[Name, str], ...] = ()  # (worker, why)
    prediction: Prediction | None = field(default=None, compare=False)
    # Of the step's micro-batches, whose gradients are summed one by one: the job's.
    blocks: Annotated[int, Within(1, MAX_MICROS), Unset(1)] = 1
    exchange: Exchange | None = None  # joins the replicas; present where there are several
    absent: Annotated[frozenset[int], Most(MAX_STAGES)] = (
        frozenset()
    )  # ranks whose peer is lost and has no successor yet, of local steps

    @property
    def only(self) -> Replica:
        """The replica of a plan that has one. Raises PlanError otherwise."""
        if len(self.replicas) != 1:
            raise PlanError(f"a plan of {len(self.replicas)} replicas where one was expected")
        return self.replicas[0]

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """Stages of a plan of one replica."""
        return self.only.stages

    @property
    def links(self) -> tuple[LinkSpec, ...]:
        """Links of a plan of one replica."""
        return self.only.links

    @property
    def places(self) -> tuple[Place, ...]:
        """Every worker's place by rank: replica after replica, the stages of each in their order."""
        return tuple(
            Place(stage.worker, at, number)
            for number, replica in enumerate(self.replicas)
            for at, stage in enumerate(replica.stages)
        )

    @property
    def present(self) -> tuple[int, ...]:
        """Ranks that have a worker, ascending."""
        return tuple(rank for rank in range(len(self.places)) if rank not in self.absent)

    @property
    def present_replicas(self) -> tuple[int, ...]:
        """Numbers of the replicas that have all their workers, ascending; where each is one stage, the ranks
        that are there."""
        missing = {place.replica for rank, place in enumerate(self.places) if rank in self.absent}
        return tuple(number for number in range(len(self.replicas)) if number not in missing)

    @property
    def evaluator(self) -> int:
        """Rank whose held-out loss is the job's: of the first replica that is there who has the last piece
        that evaluates anything, as none begins behind the loss."""
        places, first = self.places, self.present[0]
        ranks = [rank for rank in self.present if places[rank].replica == places[first].replica]
        pieces = self.replicas[places[first].replica].pieces
        return next(
            (ranks[stage] for piece, stage, _ in reversed(pieces) if piece.eval_start < piece.eval_stop),
            ranks[-1],
        )

    @property
    def piped(self) -> bool:
        """Whether of some peers with steps of their own each step is committed."""
        return any(map(self._stepwise, self.replicas))

    def in_pipe(self, rank: int) -> bool:
        """Whether each step of a rank's peer within a period is committed: of peers of several stages, which
        wait for each other, and where a round may begin before a peer has taken all of its steps."""
        return self.local and self._stepwise(self.replicas[self.places[rank].replica])

    def _stepwise(self, replica: Replica) -> bool:
        exchange = self.exchange
        return exchange is not None and exchange.local and (exchange.early or len(replica.stages) > 1)

    @property
    def storers(self) -> tuple[str, ...]:
        """Workers of the first replica, which store checkpoints: all replicas hold the same. Where each keeps
        what its rule of exchange left out, those of all."""
        return tuple(place.worker for place in self.places if self.keeps or not place.replica)

    def divisor(self, weight: float) -> float:
        """Return what the commit of a step of this weight divides gradients by: 1 where peers have divided
        their own, and where a rule has made signs of what counts at all."""
        signs = self.exchange is not None and self.exchange.rule in SIGN_RULES
        return 1.0 if self.local or (signs and weight) else weight

    @property
    def keeps(self) -> bool:
        """Whether each replica keeps what its rule of exchange left out."""
        return self.exchange is not None and self.exchange.keeps

    @property
    def local(self) -> bool:
        """Whether every replica takes steps of its own between two exchanges."""
        return self.exchange is not None and self.exchange.local

    def last_step(self, step: int, steps: int) -> int:
        """Return the last step of the period that ``step`` is in, of so many in all: itself, unless peers
        take local steps."""
        return step if self.exchange is None else self.exchange.last_step(step, steps)

    def rank_of(self, worker: str) -> int | None:
        """Return the rank that ``worker`` has, None when the plan does not use it."""
        places = self.places
        return next((rank for rank in self.present if places[rank].worker == worker), None)

    def ranks_in(self, before: Plan) -> tuple[int | None, ...]:
        """Return by rank which one its worker had in an earlier plan, None where it had none."""
        return tuple(before.rank_of(place.worker) for place in self.places)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank in a step, in order, on the micro-batches of its replica."""
        first, stop = self.replicas[self.places[rank].replica].micros
        return in_turn(self._depths(rank, stop - first), stop - first, first)

    def held_out_turns(self, rank: int, count: int) -> tuple[Action, ...]:
        """Return the forwards of a rank in an evaluation of so many micro-batches, in order.

        As many as a step has go through all of its pieces before the next: a value may be no further ahead of
        who reads it.
        """
        place = self.places[rank]
        pieces = range(len(self.replicas[place.replica].stages[place.stage].pieces))
        windows = (range(at, min(at + self.n_micro, count)) for at in range(0, count, self.n_micro))
        return tuple(
            Action(Work.FORWARD, micro, piece) for window in windows for piece in pieces for micro in window
        )

    def _depths(self, rank: int, n_micro: int) -> list[Depth]:
        place = self.places[rank]
        pieces = self.replicas[place.replica].stages[place.stage].pieces
        if self.schedule is ScheduleName.GPIPE:
            return [Depth(n_micro)] * len(pieces)
        return [Depth(piece.warmup, piece.held) for piece in pieces]

    def relinked(self, version: int, links: Sequence[LinkSpec]) -> Plan:
        """Return a plan of one replica under a later version that differs in its codecs alone."""
        return replace(self, version=version, replicas=(replace(self.only, links=tuple(links)),))

    def moved(
        self,
        version: int,
        workers: Sequence[str],
        absent: frozenset[int] = frozenset(),
        exchange: Exchange | None = None,
    ) -> Plan:
        """Return the same plan under a later version with these workers by rank; of ``absent`` ranks those
        that were lost. ``exchange``: in place of the one there is, with another codec or table of pairs.

        What was predicted stays the figures of those before.
        """
        names = {place.worker: worker for place, worker in zip(self.places, workers, strict=True)}
        given = iter(workers)
        replicas = tuple(
            replace(r, stages=tuple(replace(stage, worker=next(given)) for stage in r.stages))
            for r in self.replicas
        )
        prediction = _renamed(self.prediction, names)
        moved = replace(self, version=version, replicas=replicas, prediction=prediction, absent=absent)
        return moved if exchange is None else replace(moved, exchange=exchange)


def _renamed(prediction: Prediction | None, names: Mapping[str, str]) -> Prediction | None:
    if prediction is None:
        return None
    stages = tuple(stage.at(names.get(stage.worker, stage.worker)) for stage in prediction.stages)
    links = tuple(
        replace(link, source=names.get(link.source, link.source), target=names.get(link.target, link.target))
        for link in prediction.links
    )
    return replace(prediction, stages=stages, links=links)


def one_replica(
    n_micro: int, stages: Sequence[StageSpec], links: Sequence[LinkSpec] = ()
) -> tuple[Replica, ...]:
    """Return the replicas of a plan that is one pipeline."""
    return (Replica((0, n_micro), tuple(stages), tuple(links)),)


def check_figures(plan: Plan) -> None:
    """Raise PlanError where the exchange has figures of other ranks, or pairs, than the plan has."""
    exchange, n_ranks, n_replicas = plan.exchange, len(plan.places), len(plan.replicas)
    if exchange is None:
        return
    for figures, what in ((exchange.rates, "rates"), (exchange.sites, "sites")):
        if len(figures) not in (0, n_ranks):
            raise PlanError(f"{what} of {len(figures)} ranks of {n_ranks}")
    if exchange.pairs is not None and len(exchange.pairs.rates) != n_replicas**2:
        raise PlanError(f"rates of {len(exchange.pairs.rates)} pairs of {n_replicas} peers")


def validate(plan: Plan, dag: OpDag, training: TrainingSpec) -> None:
    """Raise PlanError unless each replica tiles the DAG at positions where it may be cut, all of them the
    step's micro-batches block by block, and what they hold in common can be joined."""
    if not plan.replicas:
        raise PlanError("plan has no replicas")
    if (plan.n_micro, plan.blocks) != (training.n_micro, training.blocks):
        raise PlanError(
            f"plan of {plan.n_micro} micro-batches in {plan.blocks} blocks, training declares "
            f"{training.n_micro} in {training.blocks}"
        )
    for number, replica in enumerate(plan.replicas):
        _check_cut(replica, dag, f"replica {number}: " if len(plan.replicas) > 1 else "")
    check_shares(plan)
    _check_peers(plan)
    workers = [plan.places[rank].worker for rank in plan.present]
    twice = sorted({worker for worker in workers if workers.count(worker) > 1})
    if twice:
        raise PlanError(f"a worker has two places: {', '.join(twice)}")
    if (plan.exchange is not None) != (len(plan.replicas) > 1):
        raise PlanError(
            f"{len(plan.replicas)} replicas {'without' if plan.exchange is None else 'with'} an exchange; "
            "several need one, one has nothing to exchange"
        )
    if plan.exchange is not None:
        check_exchange(plan.exchange)
        check_figures(plan)
    if len(plan.replicas) > 1:
        _check_gradients(dag)
        if not training.average_buffers:
            _check_buffers(dag)


def _check_cut(replica: Replica, dag: OpDag, where: str) -> None:
    if not replica.stages:
        raise PlanError(f"{where}plan has no stages")
    expected = 0
    allowed = set(dag.cuttable())
    pieces = replica.pieces
    for piece, index, _ in pieces:
        if piece.start != expected or piece.stop <= piece.start:
            raise PlanError(
                f"{where}stage {index} covers ops [{piece.start}, {piece.stop}), expected to begin at "
                f"{expected} and hold at least one op"
            )
        if piece.start and piece.start not in allowed:
            raise PlanError(
                f"{where}stage {index} begins at op {piece.start}, inside a group that must stay whole"
            )
        expected = piece.stop
    if expected != len(dag.ops):
        raise PlanError(f"{where}stages end at op {expected}, the DAG has {len(dag.ops)}")
    if [stage.start for stage in replica.stages] != sorted(stage.start for stage in replica.stages):
        raise PlanError(f"{where}stages are not in the order of their first pieces")
    if any(
        [p.start for p in stage.pieces] != sorted(p.start for p in stage.pieces) for stage in replica.stages
    ):
        raise PlanError(f"{where}a stage's pieces are not in their order")
    for link in replica.links:
        if max(link.source, link.target) >= len(pieces):
            raise PlanError(
                f"{where}a link from piece {link.source} to {link.target}, but there are {len(pieces)} pieces"
            )


def check_shares(plan: Plan) -> None:
    """Raise PlanError unless the replicas share out the micro-batches in order, by whole blocks where their
    gradients are added up."""
    blocks = plan.n_micro if plan.local else plan.blocks
    borders = {block.stop for block in block_ranges(plan.n_micro, blocks)}
    expected = 0
    for number, replica in enumerate(plan.replicas):
        start, stop = replica.micros
        if start != expected or stop <= start:
            raise PlanError(
                f"replica {number} has micro-batches [{start}, {stop}), expected to begin at {expected} and "
                "hold at least one"
            )
        if stop not in borders:
            raise PlanError(
                f"replica {number} ends at micro-batch {stop}, inside a block; {plan.blocks} blocks end at "
                f"{', '.join(map(str, sorted(borders)))}"
            )
        expected = stop
    if expected != plan.n_micro:
        raise PlanError(f"replicas end at micro-batch {expected}, the step has {plan.n_micro}")


def _check_peers(plan: Plan) -> None:
    """Raise PlanError for ranks that are absent where they cannot be."""
    if plan.absent and (not plan.local or not plan.present or max(plan.absent) >= len(plan.places)):
        raise PlanError(f"ranks {sorted(plan.absent)[:8]} of {len(plan.places)} are absent")


def _check_gradients(dag: OpDag) -> None:
    """Raise PlanError where a gradient is none of the float32 that replicas exchange."""
    odd = [
        name
        for name, state in dag.parameters.items()
        if state.requires_grad and state.meta.dtype in FLOATING - {"float32"}
    ]
    if odd:
        raise PlanError(
            f"{odd[0]} is {dag.parameters[odd[0]].meta.dtype}, replicas exchange float32: train with one, or "
            "keep parameters in float32 and set the precision to bf16"
        )


def written_buffers(dag: OpDag) -> list[str]:
    """Return the buffers that training writes."""
    used = {leaf.name for node in dag.ops for leaf in leaf_refs(node) if leaf.source is Source.BUFFER}
    return sorted(name for name in used if dag.buffers[name].mutated)


def _check_buffers(dag: OpDag) -> None:
    """Raise PlanError where training writes buffers, which go through the micro-batches one by one."""
    written = written_buffers(dag)
    if written:
        raise PlanError(
            f"training writes {len(written)} buffers, as {written[0]}, one micro-batch after the other; "
            "replicas would each write their own: train with one, or set average_buffers"
        )
