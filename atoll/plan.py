"""Plan, StageSpec, LinkSpec: who computes what, with whom, in which order; and why.

A Plan is fenced by (job, version): every message carries both, and a worker drops what does not
match. A stage is an interval of the training DAG's canonical op order and one of the evaluation
DAG's. ``validate`` is the shared rule that planner and worker both check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from atoll.errors import PlanError
from atoll.job import Recompute
from atoll.microbatch import Action, ScheduleName, Work, gpipe, one_f_one_b
from atoll.opdag import OpDag


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Half-open op intervals and the workers that run them.

    More than one worker means a replicated stage, whose replicas average gradients; no planner
    makes one yet, and a worker refuses it.
    """

    start: int
    stop: int
    eval_start: int
    eval_stop: int
    workers: tuple[str, ...]
    warmup: int  # forwards before the first backward; n_micro for GPipe
    held: int = 0  # zero-bubble: most micro-batches that hold activations; 0: backwards are whole

    @property
    def worker(self) -> str:
        return self.workers[0]


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
    """Codec of the tensors from one stage to another; fixed within a plan version."""

    source: int  # stage
    target: int  # stage
    codec: str = "none"
    ratio: float = 1.0  # dense bytes / wire bytes aimed at, >= 1; fixed-rate codecs ignore it
    mask: Mask = Mask.NONE
    reason: str = field(default="", compare=False)  # why, in words for users


@dataclass(frozen=True, slots=True)
class LinkPrediction:
    source: str  # worker
    target: str
    bytes_per_step: int
    busy_s: float
    dense_bytes_per_step: int = 0  # of the same tensors uncompressed
    under_way_s: float = 0.0  # busy_s and waiting behind other flows on shared lines


@dataclass(frozen=True, slots=True)
class StagePrediction:
    worker: str
    compute_s: float  # per step
    busy_share: float  # of the step
    memory_bytes: int
    memory_limit_bytes: int
    codec_s: float = 0.0  # per step: encoding and decoding, beside compute_s
    handling_s: float = 0.0  # per step: messages, wakings; beside both


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a plan by the timeline; every number in seconds or bytes per step."""

    step_s: float
    lower_bound_s: float  # papers/peers.md 7.1
    bottleneck: str  # "link w1>w3" | "stage 2 on w3" | "latency"
    reason: str
    stages: tuple[StagePrediction, ...] = ()
    links: tuple[LinkPrediction, ...] = ()
    commit_s: float = 0.0
    single_machine_s: float | None = None  # the fastest member alone, memory aside
    single_machine: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Versioned way to run one job."""

    job: str
    version: int
    dag_hash: str
    eval_dag_hash: str
    partitioner: str
    schedule: ScheduleName
    n_micro: int
    stages: tuple[StageSpec, ...]
    links: tuple[LinkSpec, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (worker, why)
    prediction: Prediction | None = field(default=None, compare=False)
    recompute: Recompute = Recompute.OFF  # decided: never AUTO

    @property
    def places(self) -> tuple[Place, ...]:
        """Every worker's place by rank: replica after replica, the stages of each in their order."""
        replicas = max((len(stage.workers) for stage in self.stages), default=0)
        return tuple(
            Place(stage.workers[replica], at, replica)
            for replica in range(replicas)
            for at, stage in enumerate(self.stages)
            if replica < len(stage.workers)
        )

    def rank_of(self, worker: str) -> int | None:
        """Return the rank that ``worker`` has, None when the plan does not use it."""
        return next((rank for rank, place in enumerate(self.places) if place.worker == worker), None)

    def actions(self, stage: int) -> tuple[Action, ...]:
        """Return the actions of stage ``stage`` in a step, in order."""
        if self.schedule is ScheduleName.GPIPE:
            return gpipe(self.n_micro)
        spec = self.stages[stage]
        return one_f_one_b(self.n_micro, spec.warmup, spec.held)

    def defers(self, stage: int) -> bool:
        """Return whether its backwards defer weight gradients."""
        return any(action.work is Work.INPUT for action in self.actions(stage))


def validate(plan: Plan, dag: OpDag) -> None:
    """Raise PlanError unless the stages tile the DAG at positions where it may be cut."""
    if not plan.stages:
        raise PlanError("plan has no stages")
    expected = 0
    allowed = set(dag.cuttable())
    for index, stage in enumerate(plan.stages):
        if stage.start != expected or stage.stop <= stage.start:
            raise PlanError(
                f"stage {index} covers ops [{stage.start}, {stage.stop}), expected to begin at "
                f"{expected} and hold at least one op"
            )
        if stage.start and stage.start not in allowed:
            raise PlanError(f"stage {index} begins at op {stage.start}, inside a group that must stay whole")
        if len(stage.workers) != 1:
            raise PlanError(f"stage {index} has {len(stage.workers)} workers; replicas are not supported yet")
        expected = stage.stop
    if expected != len(dag.ops):
        raise PlanError(f"stages end at op {expected}, the DAG has {len(dag.ops)}")
    workers = [stage.worker for stage in plan.stages]
    if len(set(workers)) != len(workers):
        raise PlanError(f"a worker holds two stages: {workers}")
