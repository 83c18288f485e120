"""Job: what its owner wants trained; JobSpec: the part of it that travels.

A job file is plain Python, run on the owner's machine only, whose ``job()`` returns a ``Job``.
Nothing in a JobSpec is code: optimizer, groups, schedule and data order are declared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from atoll.bounded import (
    MAX_ARGS,
    MAX_NAME_CHARS,
    Amount,
    At,
    Blob,
    Chars,
    Clean,
    Most,
    Name,
    OptionalBlob,
    Share,
    Sorted,
    Unset,
    Within,
)
from atoll.compression import AUTO, Compression
from atoll.dataset_spec import DataSpec
from atoll.errors import UsageError
from atoll.exchange import EXACT, QUORUM_RULES, SIGN_RULES, wanted_exchange
from atoll.federated import Federated, FederatedSpec
from atoll.fields import check_fields
from atoll.job_checks import check_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from atoll.data import DataSource
    from atoll.exchange import Exchange


MAX_STANDBYS = 4096
MAX_STEPS = 10**9
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_


class OptimizerName(StrEnum):
    SGD = "sgd"
    ADAMW = "adamw"
    MUON = "muon"  # of hidden matrices; AdamW of everything else: ``atoll.optimizers``
    ADAFACTOR = "adafactor"
    LION = "lion"


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"  # autocast; parameters and optimizer state stay fp32


class Priority(StrEnum):
    """Of a job among others on the same fleet."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


ShortText = Annotated[str, Chars(MAX_NAME_CHARS)]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Overrides for parameters whose name matches one of ``patterns`` (shell wildcards).

    The first group that matches wins; ``frozen`` parameters get no gradient and no state. ``optimizer``:
    theirs, where it is not the job's.
    """

    patterns: Annotated[tuple[Name, ...], Most(MAX_ARGS)]
    lr_scale: Amount = 1.0
    weight_decay: Amount | None = None
    frozen: bool = False
    optimizer: OptimizerName | None = None

    def __post_init__(self) -> None:
        check_fields(self)


MUON_MOMENTUM = 0.95
ADAMW_BETAS, LION_BETAS = (0.9, 0.999), (0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer by name, with its hyper-parameters; torch's own where torch has it.

    Muon has Nesterov's momentum always, of 0.95 where ``momentum`` is 0, and AdamW's ``lr`` and
    ``weight_decay``: torch's ``Muon(adjust_lr_fn="match_rms_adamw")``. Lion takes the default of ``betas``
    for (0.9, 0.99). Adafactor's ``lr`` is the largest relative step; the rest of it is as in torch.
    """

    name: OptimizerName = OptimizerName.ADAMW
    lr: Amount = 1e-3
    weight_decay: Amount = 0.0
    betas: Annotated[tuple[Share, Share], At("beta1", "beta2")] = ADAMW_BETAS
    eps: Amount = 1e-8
    momentum: Amount = 0.0
    nesterov: bool = False
    groups: Annotated[tuple[ParamGroup, ...], Most(MAX_ARGS)] = ()
    clip_norm: Amount | None = None  # global L2 norm over all stages

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        return ", ".join(self.names.values())

    @property
    def names(self) -> dict[tuple[str, ...], OptimizerName]:
        """The optimizer's name under (), then those of groups with another by their patterns."""
        named = {g.patterns: g.optimizer for g in self.groups if g.optimizer is not None}
        return {(): self.name} | {patterns: name for patterns, name in named.items() if name != self.name}

    @property
    def muon_momentum(self) -> float:
        """Momentum of the parameters that Muon steps."""
        return self.momentum or MUON_MOMENTUM

    @property
    def lion_betas(self) -> tuple[float, float]:
        """Shares of the average in an update, and in the next average, of the parameters that Lion steps."""
        return LION_BETAS if self.betas == ADAMW_BETAS else self.betas

    def group_of(self, parameter: str) -> ParamGroup | None:
        """The first group one of whose patterns matches ``parameter``."""
        for group in self.groups:
            if any(fnmatchcase(parameter, pattern) for pattern in group.patterns):
                return group
        return None

    def gradient_scale(self, square_norms: Iterable[float], weight: float = 1.0) -> float:
        """min(1, clip_norm / (norm / weight + 1e-6)) / weight, norm over all parameters of all stages;
        1 / weight unclipped, and 0 where the weight is 0: no update.

        ``weight``: the step's, where gradients are of sums (``atoll.step_loss``). The exact sum makes the
        figure independent of the cut. Formula: torch's clip_grad_norm_.
        """
        norm = 0.0
        if self.clip_norm is not None:
            try:
                norm = math.sqrt(math.fsum(square_norms))
            except OverflowError:  # of finite squares, which anybody may report
                norm = math.inf
        return scale_of(norm, self.clip_norm, weight)


def scale_of(norm: float, clip_norm: float | None, weight: float = 1.0) -> float:
    """Factor of a step's gradients as it is committed: they become those of the mean, and are clipped."""
    if weight == 0.0:
        return 0.0
    clip = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm / weight + CLIP_EPS))
    return clip / weight


class ScheduleKind(StrEnum):
    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"
    STEP = "step"
    ONE_CYCLE = "one_cycle"


GAMMA = 0.1  # of a schedule of steps
ONE_CYCLE_START, ONE_CYCLE_RISE = 1 / 25, 0.3  # torch's: of the rate at first, of the steps that it rises


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate factor by step: linear warm-up, then constant, linear or cosine to ``final``, or
    ``gamma`` times less after ``every`` steps. One cycle rises from 1/25 over ``warmup_steps``, 0: over
    0.3 of all, and falls to ``final``, both by a cosine.
    """

    kind: ScheduleKind = ScheduleKind.CONSTANT
    warmup_steps: Annotated[int, Within(0, MAX_STEPS)] = 0
    final: Amount = 0.1  # of the base rate, at the last step
    from_zero: bool = False  # the warm-up's first step has the rate 0, as in transformers; else one share
    every: Annotated[int, Within(0, MAX_STEPS)] = 0  # steps; of the kind step alone, as gamma
    gamma: Amount | None = None  # 0.1

    def __post_init__(self) -> None:
        check_fields(self)

    def factor(self, step: int, steps: int) -> float:
        """Multiplier of the base learning rate at ``step`` of ``steps``, both from 0."""
        if self.kind is ScheduleKind.ONE_CYCLE:
            return self._one_cycle(step, steps)
        if step < self.warmup_steps:
            return (step + (not self.from_zero)) / self.warmup_steps
        if self.kind is ScheduleKind.CONSTANT:
            return 1.0
        if self.kind is ScheduleKind.STEP:
            times = (step - self.warmup_steps) // (self.every or steps)
            return float((GAMMA if self.gamma is None else self.gamma) ** times)
        span = max(1, steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        if self.kind is ScheduleKind.LINEAR:
            return self.final + (1.0 - self.final) * (1.0 - progress)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    def _one_cycle(self, step: int, steps: int) -> float:
        """Formula: torch.optim.lr_scheduler.OneCycleLR, of which ``final`` is 1 / (25 final_div_factor)."""
        peak = (self.warmup_steps or ONE_CYCLE_RISE * steps) - 1.0
        if step <= peak:
            begin, end, progress = ONE_CYCLE_START, 1.0, step / peak if peak > 0.0 else 1.0
        else:
            begin, end, progress = 1.0, self.final, min(1.0, (step - peak) / max(1.0, steps - 1.0 - peak))
        return end + (begin - end) / 2.0 * (1.0 + math.cos(math.pi * progress))


class Recompute(StrEnum):
    """Recomputation: which activations a micro-batch in flight stores for its backward."""

    OFF = "off"  # all that the backward reads
    SELECTIVE = "selective"  # not the results of cheap ops: ``atoll.repeats``
    FULL = "full"  # what enters the stage; the forward is run again
    AUTO = "auto"  # as the planner finds faster within the memory limits


FEW_BITS_BLOCK = 32
"""Stored activations in few bits that share a least value and a step, of 2 bytes each."""


def packed_bytes(elements: float, bits: int) -> float:
    """Return the bytes that activations take in so many bits, whole blocks of them."""
    return elements * (bits + 32 / FEW_BITS_BLOCK) / 8


class Activations(StrEnum):
    """Bits of the activations that a micro-batch in flight stores; few change what is trained."""

    EXACT = "exact"
    INT8 = "int8"
    INT4 = "int4"
    AUTO = "auto"  # exact where that fits, else as the planner finds faster

    @property
    def rate(self) -> str:
        """Name under which a worker reports how fast it packs and unpacks, beside its codecs."""
        return f"saved_{self.value}"


class Place(StrEnum):
    """Memory in which a stage keeps something; none changes what is trained."""

    DEVICE = "device"
    HOST = "host"  # pinned memory; of a stage on a CPU a file, as its memory is the device's
    DISK = "disk"  # a file in the worker's folder
    AUTO = "auto"  # on the device where that fits, else as the planner finds faster

    @property
    def rate(self) -> str:
        """Name under which a worker reports how fast it puts things there and takes them back."""
        return f"kept_on_{self.value}"


@dataclass(frozen=True, slots=True)
class Keeping:
    """Form in which a stage keeps what its backwards need; in a plan nothing of it is left open."""

    recompute: Annotated[Recompute, Unset("off")] = Recompute.OFF
    activations: Annotated[Activations, Unset("exact")] = Activations.EXACT
    saved_on: Annotated[Place, Unset("device")] = Place.DEVICE  # activations that are stored
    state_on: Annotated[Place, Unset("device")] = Place.DEVICE  # of the optimizer

    @property
    def bits(self) -> int:
        """Bits of an activation; 0: all that it has."""
        return {Activations.INT8: 8, Activations.INT4: 4}.get(self.activations, 0)

    @property
    def selective(self) -> bool:
        """Whether results of cheap ops are computed again. Not from few bits: where a cut lies would then
        change bits."""
        return self.recompute is Recompute.SELECTIVE and not self.bits

    @property
    def open(self) -> bool:
        """Whether something is left to the planner."""
        places = self.saved_on, self.state_on
        return (
            Recompute.AUTO is self.recompute or Activations.AUTO is self.activations or Place.AUTO in places
        )

    @property
    def decided(self) -> Keeping:
        """The same, and all that is left open as it is where memory suffices."""
        return Keeping(
            Recompute.OFF if self.recompute is Recompute.AUTO else self.recompute,
            Activations.EXACT if self.activations is Activations.AUTO else self.activations,
            Place.DEVICE if self.saved_on is Place.AUTO else self.saved_on,
            Place.DEVICE if self.state_on is Place.AUTO else self.state_on,
        )


EXACTLY = Keeping()


MOST_REPLICAS = 64
MOST_LOCAL_STEPS = 10_000
MOST_GRACE_S = 86_400


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """Settings of training that every stage needs: declared, bounded, the same on each."""

    steps: int
    n_micro: int
    seed: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = Precision.FP32
    recompute: Annotated[Recompute, Unset("off")] = Recompute.AUTO
    activations: Annotated[Activations, Unset("exact")] = Activations.EXACT  # that are stored: ``few_bits``
    saved_on: Annotated[Place, Unset("device")] = Place.DEVICE  # the same
    state_on: Annotated[Place, Unset("device")] = Place.DEVICE  # of the optimizer
    eval_every: int = 0  # steps; 0 = at the end, and where links lose precision as often as the guard looks
    eval_batches: int = 0  # micro-batches of held-out data; 0 = no evaluation
    patience: int = 0  # evaluations without a better held-out loss, after which training ends; 0 = never
    checkpoint_every: int = 0  # steps; 0 = every few minutes, by the clock; always at the end
    # What links may do to boundary tensors: ``atoll.compression``.
    compress: Annotated[str, Unset("off")] = "off"
    # Of a step's micro-batches: gradients are summed within each, then block after block.
    blocks: Annotated[int, Unset(1)] = 1
    average_buffers: bool = False  # replicas may average what training writes, such as running statistics
    # Of the pipeline, each for a share of the blocks; auto: as many as are fastest.
    replicas: Annotated[str, Chars(MAX_NAME_CHARS), Unset("1")] = "1"
    # exact; RULE[:CODEC]: peers with steps of their own; auto: what counts most.
    exchange: Annotated[str, Chars(MAX_NAME_CHARS), Unset(EXACT)] = EXACT
    local_steps: int = 0  # of a peer between two exchanges; 0 = as many as the rule has by itself
    quorum: int = 0  # peers whose steps of a period are waited for, and then ``grace_s`` more; 0 = all
    grace_s: float = 0.0  # until nobody begins another step of the period
    int8_moments: bool = False  # in checkpoints: at each ``checkpoint_every`` all who hold moments round them
    spot_checks: Share = 0.005  # share of the steps that an idle worker repeats to compare; 0 = none

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, low, high in (
            ("steps", self.steps, 1, MAX_STEPS),
            ("n_micro", self.n_micro, 1, 4096),
            ("blocks", self.blocks, 1, self.n_micro),
            ("eval_every", self.eval_every, 0, 10**9),
            ("eval_batches", self.eval_batches, 0, 10**6),
            ("patience", self.patience, 0, 10**6),
            ("checkpoint_every", self.checkpoint_every, 0, 10**9),
            ("local_steps", self.local_steps, 0, MOST_LOCAL_STEPS),
            ("quorum", self.quorum, 0, MOST_REPLICAS),
            ("grace_s", self.grace_s, 0, MOST_GRACE_S),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name} = {value}; give a number from {low} to {high}")
        if not 0.0 <= self.spot_checks <= 1.0:
            raise UsageError(f"spot_checks = {self.spot_checks}; give a share of the steps from 0 to 1")
        Compression.parse(self.compress)
        self._check_signs(wanted_exchange(self.exchange, self.local_steps))
        if self.quorum and self.exchange.partition(":")[0] not in QUORUM_RULES:
            raise UsageError(
                f"quorum = {self.quorum} with exchange {self.exchange}; rounds begin before all peers have "
                f"taken their steps with {' and '.join(sorted(QUORUM_RULES))} alone"
            )
        self._check_moments()
        if self.replicas != AUTO and not (
            self.replicas.isascii() and self.replicas.isdecimal() and len(self.replicas) < 4
        ):
            raise UsageError(f"replicas = {self.replicas[:40]!r}; give a number or {AUTO}")
        if self.replica_count is not None and not 1 <= self.replica_count <= MOST_REPLICAS:
            raise UsageError(f"replicas = {self.replicas[:40]}; give from 1 to {MOST_REPLICAS}, or {AUTO}")

    @property
    def keeping(self) -> Keeping:
        """Form in which stages keep what they need again, as far as the owner says."""
        return Keeping(self.recompute, self.activations, self.saved_on, self.state_on)

    def rounds_after(self, step: int) -> bool:
        """Return whether moments are rounded with the commit of ``step``."""
        return self.int8_moments and (step + 1) % self.checkpoint_every == 0

    def _check_moments(self) -> None:
        """Raise UsageError where there are no moments to round, or nobody knows when."""
        if not self.int8_moments:
            return
        if not self.checkpoint_every:
            raise UsageError(
                "int8_moments without checkpoint_every; give the steps between two checkpoints: "
                "moments are rounded there"
            )
        if set(self.optimizer.names.values()) != {OptimizerName.ADAMW} or self.exchange != EXACT:
            raise UsageError(
                f"int8_moments with optimizer {self.optimizer} and exchange {self.exchange}; it is for "
                "adamw and exact gradients"
            )

    def _check_signs(self, exchange: Exchange | None) -> None:
        """Raise UsageError where signs would go through more than plain SGD."""
        optimizer = self.optimizer
        plain = not optimizer.momentum and optimizer.clip_norm is None
        plain &= set(optimizer.names.values()) == {OptimizerName.SGD}
        if exchange is not None and exchange.rule in SIGN_RULES and not plain:
            raise UsageError(
                f"exchange {exchange.rule} makes signs of gradients with a momentum of its own; give the "
                "optimizer sgd without momentum and clip_norm, at a learning rate as for AdamW"
            )

    @property
    def replica_count(self) -> int | None:
        """Number of replicas that is asked for; None where the planner chooses."""
        return None if self.replicas == AUTO else int(self.replicas)

    @property
    def local_exchange(self) -> Exchange | None:
        """Exchange of peers with steps of their own, where the job asks for one by its rule."""
        exchange = wanted_exchange(self.exchange, self.local_steps)
        return exchange if exchange is not None and exchange.local else None

    @property
    def gradient_exchange(self) -> Exchange | None:
        """Exchange of replicas' gradients, where the job asks for another one than exact sums."""
        exchange = wanted_exchange(self.exchange, self.local_steps)
        return exchange if exchange is not None and exchange.keeps else None

    @property
    def codes_rounds(self) -> bool:
        """Whether the codec of peers' rounds is left to what their links carry."""
        exchange = self.local_exchange
        return exchange is not None and exchange.codec == AUTO

    @property
    def compression(self) -> Compression:
        """``compress``, parsed."""
        return Compression.parse(self.compress)

    def learning_rate(self, step: int) -> float:
        """Base learning rate at ``step``, schedule applied."""
        return self.optimizer.lr * self.schedule.factor(step, self.steps)


@dataclass(frozen=True)
class Job:
    """A model to train, as a job file returns it.

    ``module(**example_inputs)`` returns the scalar loss, or an object with a ``loss``
    attribute; ``example_inputs`` are tensors at micro-batch size, keyed by argument name;
    ``data`` gives every one of them. ``metrics`` names further scalars of what the module returns in
    evaluation mode ("accuracy"), reported as means over the evaluation's micro-batches. With
    ``federated``, clients train on data of their own (``data`` is an ``atoll.federated.Registered``).
    ``weights``: a folder of safetensors, or one file, whose tensors the module takes, which may be on the
    meta device.
    """

    module: torch.nn.Module
    example_inputs: Mapping[str, torch.Tensor]
    data: DataSource
    training: TrainingSpec
    name: str = "job"
    notes: Mapping[str, Any] = field(default_factory=dict)  # for the job file's own records: never used
    metrics: tuple[str, ...] = ()
    federated: Federated | None = None
    weights: str | Path | None = None

    def __post_init__(self) -> None:
        check_job(self, TrainingSpec, Federated)


CHECKPOINT_EVERY_S = 300.0
"""Where the job does not say: a lost worker costs at most this much work."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A submitted job: hashes of content-addressed blobs and declarations, no code.

    ``tensors`` maps every state-dict name to the hash of its safetensors blob (one tensor,
    key "value"); ``data`` and ``eval_data`` describe what the data provider serves. A federated job's
    ``data`` has no fields and no samples, only the micro-batch's size: the clients hold the rest.
    """

    # For people only; cleaned and not refused, since a journal of an older version may hold any.
    name: Annotated[str, Clean(MAX_NAME_CHARS), Unset("job")]
    training: TrainingSpec
    dag_hash: Blob
    eval_dag_hash: OptionalBlob
    tensors: Annotated[Mapping[Name, Blob], Sorted()]
    data: DataSpec
    eval_data: DataSpec | None
    partitioner: Name = "op_fence"
    schedule: Name = "auto"  # auto | gpipe | 1f1b | zero-bubble
    resume_of: ShortText = ""  # job whose last checkpoint it continues
    # Of ``tensors``: no part of the state dict, so never exported.
    hidden: Annotated[tuple[ShortText, ...], Sorted()] = ()
    federated: FederatedSpec | None = None
    # Who submitted it, as the coordinator found by the token; "": from before there were names.
    owner: ShortText = ""
    # Workers that repeat stages' steps, at most; None: where they are worth it.
    standbys: Annotated[int, Within(0, MAX_STANDBYS)] | None = None
    priority: Priority | None = None  # None: normal
    within_s: Amount = 0.0  # its owner needs it so long after it was submitted; 0: whenever

    @property
    def rank(self) -> Priority:
        """Priority among other jobs."""
        return self.priority or Priority.NORMAL

    @property
    def data_of(self) -> str:
        """The only worker that may read the training data, "" where there is none such."""
        return self.data.pinned.worker if self.data.pinned is not None else ""


def stepwise_groups(names: Sequence[str], optimizer: Optimizer) -> dict[str, ParamGroup]:
    """Group of each parameter name, the default group where none matches."""
    default = ParamGroup(patterns=("*",))
    return {name: optimizer.group_of(name) or default for name in names}
