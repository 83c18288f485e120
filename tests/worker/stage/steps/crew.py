"""Several stages in threads of one process, over real Links and no network.

They compute on real tensors; what tests/sim steps are the machines around such stages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from atoll.job import Optimizer, TrainingSpec
from atoll.messages.to_worker import PeerLink
from atoll.microbatch import ScheduleName
from atoll.opdag import OpDag, StateMeta
from atoll.plan import LinkSpec, Piece, Plan, StageSpec, one_replica
from atoll.program import PiecePrograms, StageProgram, stage_programs
from coordinator.planning.costs.traffic import Traffic
from coordinator.planning.evaluation_cut import evaluation_intervals
from tests.captured_models import captured_model
from tests.patience import HUNG_S
from tests.worker.links.hub import Hub
from worker.links.links import NEVER, Links, Network
from worker.spans import Spans
from worker.stage.assignment import Assignment
from worker.stage.reports import Progress, StepReport
from worker.stage.stage import Stage
from worker.stage.steps import joining
from worker.stage.steps.local_steps import LocalSteps
from worker.stage.steps.run import Meters, StageRun, codecs_of
from worker.transport.contract import Paths

if TYPE_CHECKING:
    from torch import Tensor

    from worker.cancel import Cancel

TRAINING = TrainingSpec(
    steps=3, n_micro=4, seed=5, optimizer=Optimizer(lr=3e-3, weight_decay=0.01), eval_batches=6
)

DROPOUT = 0.1


class Batches:
    """Seeded micro-batches without a coordinator."""

    def __init__(self, name: str) -> None:
        self.example = captured_model(name, DROPOUT).example

    def of(self, step: int, micro: int) -> dict[str, Tensor]:
        return self.example.make_batch(1000 * step + micro)

    def held_out(self) -> list[dict[str, Tensor]]:
        return [self.example.make_batch(10**6 + micro) for micro in range(TRAINING.eval_batches)]


@dataclass
class Given:
    """A feed that has everything already."""

    batches: Batches
    inputs: Sequence[str]
    done: list[int] = field(default_factory=list)

    def start(self, first_step: int) -> None:
        pass

    def take(self, step: int, micro: int, cancel: Cancel) -> dict[str, Tensor]:
        return {name: value for name, value in self.batches.of(step, micro).items() if name in self.inputs}

    def step_done(self, step: int) -> None:
        self.done.append(step)

    def close(self) -> None:
        pass


@dataclass
class Case:
    """A captured model, its batches, and what a plan needs."""

    name: str
    dag: OpDag
    evaluation: OpDag
    tensors: Mapping[str, Mapping[str, Tensor]]
    states: Mapping[str, StateMeta]
    batches: Batches

    def programs(
        self, starts: Sequence[int], owners: Sequence[int] = ()
    ) -> tuple[tuple[StageProgram, ...], tuple[StageProgram, ...]]:
        live = Traffic(self.evaluation, TRAINING.optimizer).live_bytes
        intervals = evaluation_intervals(
            self.dag, starts, owners or range(len(starts)), self.evaluation, live
        )
        assert intervals is not None
        evaluations = stage_programs(self.evaluation, [begin for begin, _ in intervals])
        return stage_programs(self.dag, starts), evaluations


@cache
def case(name: str) -> Case:
    """Capture a model once: stages copy what they are given."""
    batches = Batches(name)
    captured = captured_model(name, DROPOUT).captured
    assert captured.evaluation is not None
    dag = captured.train
    inputs = {n: StateMeta(meta) for n, meta in dag.inputs.items()}
    constants = {n: StateMeta(meta) for n, meta in {**dag.constants, **captured.evaluation.constants}.items()}
    states = {**dag.parameters, **captured.evaluation.buffers, **dag.buffers, **constants, **inputs}
    tensors = {n: {"value": t} for n, t in captured.state.items()}
    return Case(name, dag, captured.evaluation, tensors, states, batches)


def scale_of(reports: Sequence[object]) -> float:
    """The commit's factor of gradients, unclipped: of sums over a count it makes those of the mean."""
    (found,) = [r.stage.step_loss for r in reports if isinstance(r, StepReport) and r.stage.losses]
    return TRAINING.optimizer.gradient_scale((), found.weight)


def cut_evenly(dag: OpDag, stages: int) -> tuple[int, ...]:
    positions = dag.cuttable()
    return (0, *(positions[len(positions) * at // stages] for at in range(1, stages)))


def assign(
    made: Case,
    starts: Sequence[int],
    training: TrainingSpec,
    schedule: ScheduleName,
    links: Sequence[LinkSpec] = (),
    owners: Sequence[int] = (),
) -> list[Assignment]:
    """``owners``: the stage of each piece, numbered by their first pieces; one each unless given."""
    programs = [PiecePrograms(*both) for both in zip(*made.programs(starts, owners), strict=True)]
    owners = owners or range(len(starts))
    held = len(starts) if schedule is ScheduleName.ZERO_BUBBLE else 0
    pieces = [Piece(start, start + 1, 0, 1, len(starts) - at - 1, held) for at, start in enumerate(starts)]
    names = [f"w-{stage}" for stage in range(max(owners) + 1)]
    mine = [[at for at, owner in enumerate(owners) if owner == stage] for stage in range(len(names))]
    blank = StageSpec(0, 0, 0, 0, "", 0)
    stages = tuple(
        replace(blank, worker=name).with_pieces([pieces[at] for at in numbers])
        for name, numbers in zip(names, mine, strict=True)
    )
    replicas = one_replica(training.n_micro, stages, links)
    plan = Plan("job", 1, "", "", "test", schedule, training.n_micro, replicas, blocks=training.blocks)
    peers = tuple(PeerLink(name, Paths()) for name in names)
    return [
        Assignment(
            "job", 1, training, *programs[numbers[0]], plan, peers, {}, made.states, 0,
            further=tuple(programs[at] for at in numbers[1:]),
        )
        for numbers in mine
    ]  # fmt: skip


class Crew:
    """One StageRun a stage, each step in threads of their own."""

    def __init__(
        self,
        made: Case,
        assignments: Sequence[Assignment],
        network_of: Callable[[str], Network] | None = None,
        tensors: Sequence[Mapping[str, Mapping[str, Tensor]]] = (),
        stages: Mapping[int, Callable[[Assignment], Stage]] | None = None,
    ) -> None:
        """``network_of`` a worker; None: all in one ``hub``. ``tensors`` of each; none: the captured ones.
        ``stages``: of ranks that several processes compute."""
        self.stages = stages or {}
        held = tensors or [made.tensors] * len(assignments)
        self.made, self.hub = made, Hub()
        self.network_of = network_of or self.hub.port
        self.links: list[Links] = []
        self.runs = [self.run_of(a, tensors) for a, tensors in zip(assignments, held, strict=True)]
        for run, assignment in zip(self.runs, assignments, strict=True):
            run.open(assignment.first_step)

    def run_of(
        self, assignment: Assignment, tensors: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> StageRun:
        """A run of the assigned stage, from ``tensors`` or, without any, from the captured ones."""
        me, local = assignment.worker_of(assignment.program.stage), None
        tensors = self.made.tensors if tensors is None else tensors
        if assignment.rank in self.stages:
            stage = self.stages[assignment.rank](assignment)
        else:
            stage = Stage(
                assignment.pieces,
                assignment.own_training,
                tensors,
                states=self.made.states,
                actions=assignment.plan.actions(assignment.rank),
            )
        joining.restore(assignment, stage, tensors)
        if assignment.plan.local:
            local = LocalSteps(assignment, stage, tensors)
        trains = {name for program, _ in assignment.pieces for name in program.inputs}
        evaluates = {name for _, program in assignment.pieces if program for name in program.inputs}

        def held_out(cancel: Cancel) -> Iterator[Mapping[str, Tensor]]:
            for batch in self.made.batches.held_out():
                yield {name: batch[name] for name in evaluates}

        feed = Given(self.made.batches, sorted(trains))
        spans = Spans()
        network = self.network_of(me)
        announce = getattr(network, "announce", lambda _: None)
        record = getattr(network, "record", None)
        (_, first), *later = assignment.eras
        codecs, begins = codecs_of(first), NEVER if assignment.standby else assignment.first_step
        links = Links(
            network, "job", first.version, codecs, announce=announce, record=record,
            sends_from=(begins, assignment.joining),
        )  # fmt: skip
        for begins, era in later:
            links.relink(era.version, begins, codecs_of(era))
        self.links.append(links)
        return StageRun(assignment, stage, links, feed, held_out, Meters(spans, Progress()), local=local)

    def all(
        self, work: str, *arguments: object, only: Sequence[int] | None = None, **named: object
    ) -> list[object]:
        """Results of every run's ``work``, or of ``only`` these runs'."""
        chosen = range(len(self.runs)) if only is None else only
        results: dict[int, object] = {}

        def one(at: int) -> None:
            torch.get_num_threads()  # else a thread whose only ops are convolutions takes OpenMP's own count
            results[at] = getattr(self.runs[at], work)(*arguments, **named)

        threads = [threading.Thread(target=one, args=(at,)) for at in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HUNG_S)
        assert not any(thread.is_alive() for thread in threads)
        return [results.get(at) for at in chosen]

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        merged: dict[str, dict[str, Tensor]] = {}
        for run in reversed(self.runs):
            merged.update(run.snapshot())
        return merged
