"""What a worker is asked to compute, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.errors import BadFrame, PlanError
from atoll.exchange import SITE_RULES, Exchange, check_exchange
from atoll.gradient_exchange import Bucket, Slice, buckets, slices, trained_elements
from atoll.job import Keeping, TrainingSpec
from atoll.messages.to_worker import Assign, PeerLink, Replay
from atoll.microbatch import own_blocks
from atoll.opdag import StateMeta, TensorMeta
from atoll.plan import (
    LinkSpec,
    PlacedPiece,
    Plan,
    Replica,
    check_figures,
    check_shares,
)
from atoll.program import PiecePrograms, StageProgram, TiedParameter, programs_of
from atoll.raw_values import reads_inputs
from atoll.rows import inputs_at
from strategies.exchanges.catalogue import check_gradient_rule, exchange_facts
from worker.transport.frames import End


@dataclass(frozen=True)
class Assignment:
    """One stage of one plan version. ``states`` describes every leaf of the programs, inputs
    included; ``tensors`` maps every other leaf to its blob, of the state after ``first_step`` steps or, where
    there is a ``replay``, before that."""

    job: str
    version: int
    training: TrainingSpec
    program: StageProgram
    eval_program: StageProgram | None
    plan: Plan
    links: tuple[PeerLink, ...]
    tensors: Mapping[str, str]
    states: Mapping[str, StateMeta]
    first_step: int
    replay: Replay | None = None
    replica: int = 0  # number of the one that the stage is of
    standby: bool = False  # beside the plan: repeats later steps as well, and sends nothing
    further: tuple[PiecePrograms, ...] = ()  # of the same stage, in the order of its pieces
    pinned: bool = False  # its data are this worker's, and stay here
    joining: bool = False  # of its peer's period the round alone is left once all is repeated

    @property
    def pieces(self) -> tuple[PiecePrograms, ...]:
        """The programs of the stage's pieces, in their order."""
        return (PiecePrograms(self.program, self.eval_program), *self.further)

    @cached_property
    def ends(self) -> tuple[End, ...]:
        """Where messages of each of its pipeline's pieces go."""
        return tuple(End(self.pipeline.stages[stage].worker, turn) for _, stage, turn in self.placed)

    @cached_property
    def placed(self) -> tuple[PlacedPiece, ...]:
        """The pieces of the stage's pipeline, by number."""
        return self.pipeline.pieces

    @property
    def stage(self) -> int:
        """Its number among the stages of its pipeline."""
        return self.placed[self.program.stage].stage

    @property
    def pipeline(self) -> Replica:
        """The replica that the stage is of."""
        return self.plan.replicas[self.replica]

    @property
    def keeping(self) -> Keeping:
        """Form in which the stage keeps what it needs again."""
        return self.pipeline.stages[self.stage].keeping

    @property
    def rank(self) -> int:
        """This stage's number among the plan's places."""
        return sum(len(r.stages) for r in self.plan.replicas[: self.replica]) + self.stage

    @property
    def micros(self) -> range:
        """Micro-batches of a step that this replica has."""
        return range(*self.pipeline.micros)

    @property
    def own_training(self) -> TrainingSpec:
        """How the stage takes its steps: a peer's own are of its share of the micro-batches alone."""
        if not self.plan.local:
            return self.training
        return replace(self.training, n_micro=len(self.micros), blocks=1)

    @property
    def blocks(self) -> Mapping[int, range]:
        """Its blocks of them, by number."""
        if self.plan.local:
            return {0: self.micros}
        return own_blocks(self.plan.n_micro, self.plan.blocks, self.pipeline.micros)

    @cached_property
    def trained(self) -> Mapping[str, int]:
        """Elements of each parameter that is trained here."""
        programs = [program for program, _ in self.pieces]
        names = dict.fromkeys(name for p in programs for name in p.parameters if name in self.states)
        return trained_elements(names, self.states, self.training.optimizer)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradients that are exchanged with the other replicas; none where peers exchange changes."""
        programs = [program for program, _ in self.pieces]
        return buckets(self.plan, self.replica, programs, self.trained)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Parts of the model that are joined with other peers, where peers take steps of their own."""
        if not self.plan.local:
            return ()
        return slices(self.plan, [program for program, _ in self.pieces], self.trained)

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(link.worker for link in self.links)

    def worker_of(self, number: int) -> str:
        """The worker of a piece."""
        return self.ends[number].worker

    def here(self, number: int) -> bool:
        """Whether a piece is one of this stage's own."""
        return self.placed[number].stage == self.stage

    def total_to(self, tied: TiedParameter) -> tuple[int, ...]:
        """The pieces that a tied parameter's total is sent to: one of each worker but the first holder's."""
        first: dict[str, int] = {}
        for number in tied.holders:
            first.setdefault(self.worker_of(number), number)
        return tuple(first.values())[1:]

    def holder(self, bucket: Bucket, replica: int) -> str:
        """The worker that has a bucket's gradients in another replica."""
        return self.plan.places[bucket.holders[replica]].worker

    def relinked(self, version: int, links: Sequence[LinkSpec]) -> Assignment:
        """The same stage under a later plan version that differs in its codecs alone.

        BadFrame for a link of a stage that the plan does not have.
        """
        worst = max((max(link.source, link.target) for link in links), default=0)
        if worst >= len(self.placed):
            raise BadFrame(f"a link names piece {worst} of {len(self.placed)}")
        if len(self.plan.replicas) > 1:  # whose codecs stay
            return replace(self, version=version, plan=replace(self.plan, version=version))
        return replace(self, version=version, plan=self.plan.relinked(version, links))

    def reconfigured(
        self, plan: Plan, links: tuple[PeerLink, ...], step: int, *, standby: bool = False
    ) -> Assignment:
        """The same stage from ``step`` on under a later plan that has some stages on other workers, or other
        replicas beside its own: then that may have another share of the step.

        PlanError for a plan under which the stage would compute otherwise.
        """
        if plan.job != self.job or plan.n_micro != self.plan.n_micro:
            raise PlanError(f"a plan of {plan.job} for other micro-batches cannot take over {self.job}")
        replica = self._replica_in(plan)
        if replica is None:
            raise PlanError(
                f"plan {plan.version} has other stages than {self.version}: it must be loaded again"
            )
        changed = replace(
            self, version=plan.version, plan=plan, links=links, first_step=step, replica=replica
        )
        _check_exchange(plan, changed.rank)
        return replace(changed, replay=None, standby=standby, joining=False)

    def _replica_in(self, plan: Plan) -> int | None:
        """Return the number of the replica that the stage is of in a later plan, None where that has another
        stage for its worker.

        Plans in between may have been missed, so shares, exchange and replicas may differ in any way: what a
        stage takes from them is derived anew. Peers with local steps keep their numbers and their shares.
        """
        if plan.local or self.plan.local:
            return self.replica if _work(plan) == _work(self.plan) else None
        rank = plan.rank_of(self.pipeline.stages[self.stage].worker)
        if rank is None or plan.blocks != self.plan.blocks:
            return None
        place = plan.places[rank]
        later = plan.replicas[place.replica]
        alike = place.stage == self.stage and _cut(later) == _cut(self.pipeline)
        return place.replica if alike and later.stages[place.stage].keeping == self.keeping else None

    @property
    def eras(self) -> tuple[tuple[int, Assignment], ...]:
        """(first step, assignment under the version from there on), ascending; the last is this one."""
        if self.replay is None:
            return ((0, self),)
        if self.plan.local:
            old = [(first, self.relinked(version, ())) for first, version in self.replay.versions]
            known = old and old[-1][1].version == self.version
            return tuple(old) if known else (*old, (self.first_step + self.joining, self))
        before = [(era.first_step, self.relinked(era.version, era.links)) for era in self.replay.eras]
        return tuple(before) if self.standby else (*before, (self.first_step, self))

    def inputs(self, program: StageProgram) -> dict[str, TensorMeta]:
        metas = {name: self.states[name].meta for name in program.inputs}
        return inputs_at(metas, program.rows) if program.rows else metas

    def evaluates(self, micro: int, piece: int = 0) -> StageProgram | None:
        """Return the program that a held-out micro-batch goes through: the last may have fewer rows."""
        program = self.pieces[piece].evaluation
        if program is None or micro < self.training.eval_batches - 1:
            return program
        return program.last or program

    @property
    def leaf_states(self) -> dict[str, StateMeta]:
        """Parameters, buffers and constants of its programs, by name."""
        programs = programs_of(self.pieces)
        names = sorted({n for p in programs for n in (*p.parameters, *p.buffers, *p.constants)})
        return {name: self.states[name] for name in names}

    @property
    def programs(self) -> tuple[StageProgram, ...]:
        """Piece by piece the training program, and those of the evaluation."""
        found = ((train, held_out, held_out and held_out.last) for train, held_out in self.pieces)
        return tuple(program for piece in found for program in piece if program is not None)


def assigned(asked: Assign) -> Assignment:
    """The stage that a worker is asked to compute."""
    return Assignment(
        asked.job,
        asked.version,
        asked.training,
        asked.program,
        asked.eval_program,
        asked.plan,
        tuple(peer.link for peer in asked.peers),
        asked.tensors,
        asked.states,
        asked.first_step,
        asked.replay,
        asked.plan.places[asked.rank].replica,
        asked.replay is not None and asked.replay.standby,
        tuple(PiecePrograms(piece.program, piece.eval_program) for piece in asked.further),
        asked.data.pinned is not None and asked.data.pinned.worker == asked.plan.places[asked.rank].worker,
        asked.joining,
    )


def _cut(replica: Replica) -> list[object]:
    """What a replica's stages compute, whatever its share of a step."""
    return [(p.start, p.stop, p.eval_start, p.eval_stop, p.held > 0, s) for p, s, _ in replica.pieces]


def _work(plan: Plan) -> tuple[object, ...]:
    """What peers with local steps compute under a plan, whoever does and in whatever codec they exchange."""
    exchange = replace(plan.exchange, pairs=None, codec="none") if plan.exchange else None
    replicas = [(r.micros, [replace(stage, worker="") for stage in r.stages]) for r in plan.replicas]
    return plan.schedule, exchange, replicas


def check(assignment: Assignment, me: str) -> None:
    """The rules that planner and worker both check; PlanError or BadFrame says which is broken."""
    plan = assignment.plan
    if (plan.job, plan.version) != (assignment.job, assignment.version):
        raise BadFrame(f"plan of {plan.job} version {plan.version} assigned as version {assignment.version}")
    if not 0 <= assignment.replica < len(plan.replicas):
        raise PlanError(f"replica {assignment.replica} of a plan of {len(plan.replicas)} replicas")
    _check_exchange(plan, assignment.rank)
    placed = assignment.placed
    for program, _ in assignment.pieces:
        if program.n_stages != len(placed) or not 0 <= program.stage < len(placed):
            raise BadFrame(f"stage {program.stage} of {program.n_stages}, but the plan has {len(placed)}")
        if (worker := assignment.worker_of(program.stage)) != me:
            raise BadFrame(f"stage {program.stage} belongs to {worker}, this is {me}")
    numbers = [program.stage for program, _ in assignment.pieces]
    if numbers != [at for at, one in enumerate(placed) if one.stage == assignment.stage]:
        raise BadFrame(f"pieces {numbers} of stage {assignment.stage}, which the plan has otherwise")
    training = assignment.training
    if (plan.n_micro, plan.blocks) != (training.n_micro, training.blocks):
        raise BadFrame(
            f"plan has {plan.n_micro} micro-batches in {plan.blocks} blocks, training declares "
            f"{training.n_micro} in {training.blocks}"
        )
    check_shares(plan)
    strangers = _neighbours(assignment) - assignment.peers - {me}
    if strangers:
        raise BadFrame(
            f"stage {assignment.stage} exchanges tensors with {sorted(strangers)}, no address given"
        )
    _check_leaves(assignment)
    if assignment.pinned:
        _check_kept(assignment)
    buffers = {name for program, _ in assignment.pieces for name in program.buffers}
    written = sorted(name for name in buffers if assignment.states[name].mutated)
    if written and len(plan.replicas) > 1:
        raise PlanError(
            f"training writes {written[0]}, and replicas would each write their own; train with one"
        )
    for bucket in assignment.buckets:
        if bucket.holders[assignment.replica] != assignment.rank:
            raise BadFrame(
                f"stage {assignment.stage} uses {bucket.names[0]} first, which the plan has elsewhere"
            )


def _check_exchange(plan: Plan, rank: int) -> None:
    """Raise PlanError for an exchange of replicas that workers do not run."""
    if plan.absent and (not plan.local or rank in plan.absent or max(plan.absent) >= len(plan.places)):
        raise PlanError(f"ranks {sorted(plan.absent)[:8]} of {len(plan.places)} are absent, this is {rank}")
    exchange = plan.exchange
    if (exchange is not None) != (len(plan.replicas) > 1):
        raise PlanError(f"{len(plan.replicas)} replicas do not go with exchange {exchange}")
    if exchange is None:
        return
    check_exchange(exchange)
    for replica in plan.replicas:
        starts = list(replica.starts)
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise PlanError(f"stages of a replica that begin at ops {starts[:8]}")
    exact = (exchange.rule, exchange.every, exchange.codec) == ("sum", 1, "none")
    kept = exchange.keeps and (exchange.every, exchange.fragments, exchange.delay) == (1, 1, 0)
    sited = exact or exchange.rule in SITE_RULES
    inner = exchange.inner is None or (sited and exchange.inner == Exchange())
    if not (exact or kept or exchange.local) or not inner:
        raise PlanError(
            f"replicas exchange gradients at every step here, or take local steps, not {exchange.rule} "
            f"every {exchange.every} through {exchange.codec}; update this worker"
        )
    if kept:
        check_gradient_rule(exchange)
    if exchange.local:
        exchange_facts(exchange.rule).check(exchange)
    check_figures(plan)


def _check_kept(assignment: Assignment) -> None:
    """Raise PlanError where a value would leave that follows from the data of this machine alone."""
    programs = [program for program, _ in assignment.pieces]
    ops = dict(op for program in programs for op in program.ops)
    reads = reads_inputs(sorted(ops.items()))
    for program in programs:
        for value in program.produced:
            if reads.get(value.op, False) and not all(map(assignment.here, value.targets)):
                raise PlanError(
                    f"op {value.op} ({ops[value.op].name}) follows from the data of this machine alone, and "
                    "would go to another worker"
                )


def _check_leaves(assignment: Assignment) -> None:
    programs = programs_of(assignment.pieces)
    tensors = {n for p in programs for n in (*p.parameters, *p.buffers, *p.constants)}
    inputs = {n for p in programs for n in p.inputs}
    undescribed = (tensors | inputs) - set(assignment.states)
    missing = tensors - set(assignment.tensors)
    if undescribed or missing:
        raise BadFrame(
            f"stage {assignment.stage}: no shape for {sorted(undescribed)[:3]}, "
            f"no blob for {sorted(missing)[:3]}"
        )


def _neighbours(assignment: Assignment) -> set[str]:
    """Workers that this stage sends to or receives from."""
    numbers = {number for both in assignment.pieces for number in _linked(*both)}
    if numbers and max(numbers) >= len(assignment.placed):
        raise BadFrame(f"stage {assignment.stage} refers to stage {max(numbers)} of {len(assignment.placed)}")
    others = {rank for bucket in assignment.buckets for rank in bucket.holders}
    for each in assignment.slices:
        others |= {each.holders[peer] for peer in assignment.plan.present_replicas}
    places = assignment.plan.places
    return {assignment.worker_of(number) for number in numbers} | {places[rank].worker for rank in others}


def _linked(program: StageProgram, evaluation: StageProgram | None) -> set[int]:
    """Numbers of the pieces that a piece sends to or receives from."""
    numbers: set[int] = set()
    for received in program.received:
        numbers.update({received.source, received.grad_to})
        if received.grad_from is not None:
            numbers.add(received.grad_from)
    for produced in program.produced:
        numbers.update({*produced.targets, produced.grad_from})
    for tied in program.tied:
        at = tied.holders.index(program.stage)
        numbers.update(tied.holders if at == 0 else (tied.holders[0], tied.holders[at - 1]))
        numbers.update(tied.holders[at + 1 : at + 2])
    if evaluation is not None:
        numbers.update(received.source for received in evaluation.received)
        numbers.update(target for produced in evaluation.produced for target in produced.targets)
    return numbers
