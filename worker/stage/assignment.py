"""What a worker is asked to compute, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.errors import BadFrame, PlanError
from atoll.job import TrainingSpec
from atoll.opdag import StateMeta, TensorMeta
from atoll.plan import LinkSpec, Plan
from atoll.program import StageProgram
from worker.transport.contract import Paths


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A neighbour in the plan, and the ways to it."""

    worker: str
    paths: Paths


@dataclass(frozen=True, slots=True)
class Era:
    """Steps from ``first_step`` on, which ran under one plan version with its codecs."""

    version: int
    first_step: int
    links: tuple[LinkSpec, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps that a stage repeats by itself before it is loaded: from ``first_step`` on, one a scale.

    Of who stands by, the last of ``eras`` goes on."""

    first_step: int
    eras: tuple[Era, ...]  # ascending; the first begins at or before first_step
    gradient_scales: tuple[float, ...]
    stores: frozenset[int]  # numbers of steps after which the state is stored


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
    standby: bool = False  # beside the plan: repeats later steps as well, and sends nothing

    @property
    def stage(self) -> int:
        return self.program.stage

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(link.worker for link in self.links)

    def worker_of(self, stage: int) -> str:
        return self.plan.stages[stage].worker

    def relinked(self, version: int, links: Sequence[LinkSpec]) -> Assignment:
        """The same stage under a later plan version that differs in its codecs alone.

        BadFrame for a link of a stage that the plan does not have.
        """
        worst = max((max(link.source, link.target) for link in links), default=0)
        if worst >= len(self.plan.stages):
            raise BadFrame(f"a link names stage {worst} of {len(self.plan.stages)}")
        return replace(self, version=version, plan=self.plan.relinked(version, links))

    def reconfigured(
        self, plan: Plan, links: tuple[PeerLink, ...], step: int, *, standby: bool = False
    ) -> Assignment:
        """The same stage from ``step`` on under a later plan that has some stages on other workers.

        PlanError for a plan under which the stage would compute otherwise.
        """
        if plan.job != self.job or plan.only.micros != self.plan.only.micros:
            raise PlanError(f"a plan of {plan.job} for other micro-batches cannot take over {self.job}")
        before, after = [replace(s, worker="") for s in self.plan.stages], plan.stages
        if [replace(s, worker="") for s in after] != before or plan.schedule is not self.plan.schedule:
            raise PlanError(
                f"plan {plan.version} has other stages than {self.version}: it must be loaded anew"
            )
        changed = replace(self, version=plan.version, plan=plan, links=links, first_step=step)
        return replace(changed, replay=None, standby=standby)

    @property
    def eras(self) -> tuple[tuple[int, Assignment], ...]:
        """(first step, assignment under the version from there on), ascending; the last is this one."""
        if self.replay is None:
            return ((0, self),)
        before = [(era.first_step, self.relinked(era.version, era.links)) for era in self.replay.eras]
        return tuple(before) if self.standby else (*before, (self.first_step, self))

    def inputs(self, program: StageProgram) -> dict[str, TensorMeta]:
        return {name: self.states[name].meta for name in program.inputs}


def check(assignment: Assignment, me: str) -> None:
    """The rules that planner and worker both check; PlanError or BadFrame says which is broken."""
    plan, program = assignment.plan, assignment.program
    if (plan.job, plan.version) != (assignment.job, assignment.version):
        raise BadFrame(f"plan of {plan.job} version {plan.version} assigned as version {assignment.version}")
    if len(plan.replicas) != 1:
        raise PlanError(
            f"a plan of {len(plan.replicas)} replicas; this version runs plans of one, update this worker"
        )
    if program.n_stages != len(plan.stages) or not 0 <= program.stage < len(plan.stages):
        raise BadFrame(f"stage {program.stage} of {program.n_stages}, but the plan has {len(plan.stages)}")
    stage = plan.stages[program.stage]
    if stage.worker != me:
        raise BadFrame(f"stage {program.stage} belongs to {stage.worker}, this is {me}")
    training = assignment.training
    if (plan.n_micro, plan.blocks) != (training.n_micro, training.blocks):
        raise BadFrame(
            f"plan has {plan.n_micro} micro-batches in {plan.blocks} blocks, training declares "
            f"{training.n_micro} in {training.blocks}"
        )
    if plan.only.micros != (0, plan.n_micro):
        raise BadFrame(f"one replica with micro-batches {plan.only.micros} of {plan.n_micro}")
    strangers = _neighbours(assignment) - assignment.peers - {me}
    if strangers:
        raise BadFrame(f"stage {program.stage} exchanges tensors with {sorted(strangers)}, no address given")
    _check_leaves(assignment)


def _check_leaves(assignment: Assignment) -> None:
    programs = [p for p in (assignment.program, assignment.eval_program) if p is not None]
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
    stages: set[int] = set()
    program = assignment.program
    for received in program.received:
        stages.update({received.source, received.grad_to})
        if received.grad_from is not None:
            stages.add(received.grad_from)
    for produced in program.produced:
        stages.update({*produced.targets, produced.grad_from})
    for tied in program.tied:
        at = tied.holders.index(program.stage)
        stages.update(tied.holders if at == 0 else (tied.holders[0], tied.holders[at - 1]))
        stages.update(tied.holders[at + 1 : at + 2])
    evaluation = assignment.eval_program
    if evaluation is not None:
        stages.update(received.source for received in evaluation.received)
        stages.update(target for produced in evaluation.produced for target in produced.targets)
    if stages and max(stages) >= len(assignment.plan.stages):
        raise BadFrame(
            f"stage {assignment.stage} refers to stage {max(stages)} of {len(assignment.plan.stages)}"
        )
    return {assignment.worker_of(stage) for stage in stages}
