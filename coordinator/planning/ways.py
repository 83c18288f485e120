"""Which way wins: one pipeline, replicas of it, exact data parallelism, local steps or gossip.

Every way is a plan: the very one that is made where the owner asks for it by the way's options. What cannot
be planned is no way, and the reason is the planner's. Exact ways train the same model as one machine (with as
many blocks of micro-batches); the others train more samples a second, each of which counts less:
``efficiency`` is measured (benchmarks/local_steps.py), stated beside the speed and multiplied into ``worth``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import AtollError, NotEnoughMemory, PlanError, UsageError
from atoll.exchange import AUTO, EXACT, GRADIENT_RULES, RATIOS, wanted_exchange
from coordinator.planning import TUNED
from coordinator.planning.peers.likely import likely_counts
from coordinator.planning.peers.local_plans import fastest, peers_plan
from coordinator.planning.peers.replicas import best_plan, with_blocks
from coordinator.planning.planner import remembering
from coordinator.planning.problem import Problem
from hostos.units import DAY_S
from strategies.exchanges.catalogue import EXCHANGES, exchange_facts

if TYPE_CHECKING:
    from atoll.exchange import Exchange
    from atoll.job import TrainingSpec
    from atoll.plan import Plan
    from coordinator.planning.peers.local_plans import Known
    from coordinator.planning.planner import PlanRequest


class Asked(NamedTuple):
    """An exchange of peers as an owner asks for it."""

    how: str  # --exchange
    local_steps: int = 0  # --local-steps; 0: the rule's own

    @property
    def exchange(self) -> Exchange:
        """The exchange that this is."""
        found = wanted_exchange(*self)
        if found is None:
            raise PlanError(f"exchange {self.how} has no local steps")
        return found


LOCAL_STEPS = (
    *(Asked("diloco:int8_block", every) for every in (10, 50, 200)),
    Asked("streaming_diloco:int4_block", 48),
    *(Asked("sparseloco", every) for every in (10, 50)),
)
"""Settings compared. Efficiencies were measured uncoded; four bits train to similar quality
(papers/decentralized.md 8.5)."""
CODED = Asked("mean:int8_block")
GOSSIP = (Asked("saps"), Asked("swarm"), Asked("wagma"))


class WayKind(StrEnum):
    PIPELINE = "pipeline"
    REPLICAS = "replicas"
    DATA_PARALLEL = "data parallel"
    LOCAL_STEPS = "local steps"
    GOSSIP = "gossip"
    CODED = "coded gradients"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train the job on the fleet, or why it is none. Rates are micro-batches a second."""

    kind: WayKind
    text: str  # for people
    options: str = ""  # of the command, which make this plan
    micros_per_s: float = 0.0
    step_s: float = 0.0  # of all of a step's micro-batches; a local step's share of its round
    bytes_a_day: float = 0.0  # that the busiest machine sends
    memory_share: float = 0.0  # of its limit, where it is highest
    exact: bool = True  # the same model as one machine
    efficiency: float = 1.0
    workers: tuple[tuple[str, ...], ...] = ()  # by replica, of each piece
    micros: tuple[int, ...] = ()  # of each replica a step
    exchange: Exchange | None = None
    plan: Plan | None = field(default=None, compare=False)
    why_not: str = ""

    @property
    def worth(self) -> float:
        """Micro-batches a second, each counted by what it teaches beside an exact one."""
        return self.micros_per_s * self.efficiency


def compare_ways(request: PlanRequest, *, inexact: str = "") -> tuple[Way, ...]:
    """Every way, the best first, those that are impossible last with the reason.

    ``inexact``: which ways that change the model are compared: "" none, "auto" all, or a rule's name. Raises
    NotEnoughMemory when no way fits, UsageError for an unknown rule, and what ``best_plan`` raises.
    """
    if inexact not in ("", AUTO):
        exchange_facts(inexact)
    request = remembering(request)
    found = [_pipeline(request), *_replicated(request)]
    for kind, asked in ((WayKind.LOCAL_STEPS, LOCAL_STEPS), (WayKind.GOSSIP, GOSSIP)):
        wanted = [one for one in asked if inexact in (AUTO, one.exchange.rule)]
        own = Asked(request.training.exchange, request.training.local_steps)
        if own.how not in (EXACT, AUTO) and own.exchange.rule in {one.exchange.rule for one in wanted}:
            wanted.append(own)
        if wanted:
            found.append(_peers(request, kind, wanted))
    if inexact == AUTO or inexact in GRADIENT_RULES:
        own_rule = request.training.gradient_exchange is not None
        by_itself = inexact if inexact in RATIOS else CODED.how
        found.append(_coded(request, request.training.exchange if own_rule else by_itself))
    if all(way.why_not for way in found):
        raise NotEnoughMemory(found[0].why_not)
    return tuple(sorted(found, key=lambda way: (bool(way.why_not), -way.worth)))


def efficiency(exchange: Exchange | None) -> float:
    """What a micro-batch counts of an exact one, of local steps or coded gradients; 1 for exact sums."""
    return 1.0 if exchange is None else EXCHANGES[exchange.rule].efficiency_at(exchange.every)


# ---------------------------------------------------------------- exact ways


def _exact(request: PlanRequest, replicas: int) -> TrainingSpec:
    return replace(request.training, replicas=str(replicas), exchange=EXACT)


def _pipeline(request: PlanRequest) -> Way:
    try:
        return _planned(request, WayKind.PIPELINE, _exact(request, 1))
    except NotEnoughMemory as error:
        return Way(WayKind.PIPELINE, "one pipeline", why_not=str(error))


def _replicated(request: PlanRequest) -> Iterator[Way]:
    """The best plan whose replicas are pipelines, and the best of whole models; why there is none."""
    training = request.training
    blocks = training.n_micro if training.blocks == 1 else training.blocks
    most = min(TUNED.most_replicas, blocks, len(request.fleet.devices))
    found: list[Way] = []
    counts = likely_counts(replace(request, training=_exact(request, 2)), most)
    refused = "" if counts else f"{len(request.fleet.devices)} machines share out {blocks} blocks"
    if most > 1 and not counts:
        refused = "no parts of the fleet hold the model each"
    for count in counts:
        try:
            found.append(_planned(request, WayKind.REPLICAS, _exact(request, count)))
        except (PlanError, UsageError) as error:
            refused = refused or str(error)
    for kind in (WayKind.REPLICAS, WayKind.DATA_PARALLEL):
        own = [way for way in found if way.kind is kind]
        if own:
            yield max(own, key=lambda way: way.worth)
        else:
            yield Way(kind, str(kind), why_not=_why_not(request, kind, refused if not found else ""))


def _why_not(request: PlanRequest, kind: WayKind, refused: str) -> str:
    """The planner's reason, or what its plans of the other kind say."""
    if kind is WayKind.DATA_PARALLEL:
        problem = Problem(request.dag, _exact(request, 1), request.fleet, divisions=request.divisions)
        need = problem.memory.bytes(0, problem.n_ops, 1)
        able = sum(bool(limit >= need) for limit in problem.limits)
        if able < 2:
            held = "one machine alone" if able else "no machine"
            return f"{held} can hold the whole model, {need / 2**20:.0f} MiB"
        return refused or "replicas are faster as pipelines of several machines"
    return refused or "a part of the fleet is no faster than its fastest machine, which holds the whole model"


# ---------------------------------------------------------------- ways that change the model


def _peers(request: PlanRequest, kind: WayKind, wanted: Sequence[Asked]) -> Way:
    """The plan of the setting whose steps teach most a second, as the planner finds peers for it."""
    request = replace(request, training=replace(request.training, replicas="1"))
    known: Known = {}
    try:
        found = {
            asked: sharing
            for asked in wanted
            if (sharing := fastest(request, asked.exchange, known=known)) is not None
        }
        best = max(found, key=lambda a: efficiency(a.exchange) / found[a].step_s, default=wanted[0])
        training = with_blocks(replace(request.training, exchange=best.how, local_steps=best.local_steps))
        own = replace(request, training=training)
        plan = peers_plan(own, best.exchange, given=found.get(best), known=known)
    except AtollError as error:
        return Way(kind, str(kind), why_not=str(error))
    return _way(request, kind, training, plan)


def _coded(request: PlanRequest, how: str) -> Way:
    """The best plan of replicas that exchange gradients in a codec."""
    training = request.training
    blocks = training.n_micro if training.blocks == 1 else training.blocks
    most = min(TUNED.most_replicas, blocks, len(request.fleet.devices))
    found, refused = list[Way](), ""
    counts: Sequence[int] = ()
    try:
        two = replace(training, replicas="2", exchange=how)
        counts = likely_counts(replace(request, training=two), most)
    except UsageError as error:  # local steps are asked for
        refused = str(error)
    for count in counts:
        try:
            own = replace(training, replicas=str(count), exchange=how)
            found.append(_planned(request, WayKind.CODED, own))
        except (PlanError, UsageError) as error:
            refused = refused or str(error)
    refused = refused or f"{len(request.fleet.devices)} machines share out {blocks} blocks"
    none = Way(WayKind.CODED, str(WayKind.CODED), why_not=refused)
    return max(found, key=lambda way: way.worth, default=none)


# ---------------------------------------------------------------- a plan as a way


def _planned(request: PlanRequest, kind: WayKind, training: TrainingSpec) -> Way:
    """Plan by ``training``; raises what ``best_plan`` does."""
    return _way(request, kind, training, best_plan(replace(request, training=with_blocks(training))))


def _way(request: PlanRequest, kind: WayKind, training: TrainingSpec, plan: Plan) -> Way:
    prediction = plan.prediction
    if prediction is None:
        raise PlanError("a plan without a prediction cannot be compared")
    sent: dict[str, int] = {}
    for link in prediction.links:
        sent[link.source] = sent.get(link.source, 0) + link.bytes_per_step
    if kind is WayKind.REPLICAS and all(len(replica.stages) == 1 for replica in plan.replicas):
        kind = WayKind.DATA_PARALLEL
    return Way(
        kind,
        _text(plan),
        options=_options(request.training, training),
        micros_per_s=plan.n_micro / prediction.step_s,
        step_s=prediction.step_s,
        bytes_a_day=max(sent.values(), default=0) * DAY_S / prediction.step_s,
        memory_share=max(stage.memory_bytes / stage.memory_limit_bytes for stage in prediction.stages),
        exact=not plan.local and not plan.keeps,
        efficiency=efficiency(plan.exchange),
        workers=tuple(replica.workers for replica in plan.replicas),
        micros=tuple(stop - start for start, stop in (replica.micros for replica in plan.replicas)),
        exchange=plan.exchange,
        plan=plan,
    )


def _text(plan: Plan) -> str:
    sizes = [len(replica.stages) for replica in plan.replicas]
    if plan.local and plan.exchange is not None:
        every, several = plan.exchange.every, f" of {', '.join(map(str, sizes))} stages" * (max(sizes) > 1)
        steps = f"{every} steps" if every > 1 else "step"
        return f"{len(sizes)} peers{several}, {plan.exchange.rule} every {steps}"
    coded = f", {plan.exchange.coding}" if plan.exchange and plan.keeps else ""
    if len(sizes) == 1:
        return f"one pipeline of {sizes[0]} stages" if sizes[0] > 1 else "one machine"
    if max(sizes) == 1:
        return f"{len(sizes)} replicas of the whole model{coded}"
    return f"{len(sizes)} replicas of {', '.join(map(str, sizes))} stages{coded}"


def _options(before: TrainingSpec, training: TrainingSpec) -> str:
    """The options that make ``training`` of what the job has by itself; those of replicas always."""
    found = []
    if training.exchange != before.exchange or training.local_exchange is not None:
        found.append(f"--exchange {training.exchange}")
    if training.local_exchange is not None and training.local_steps:
        found.append(f"--local-steps {training.local_steps}")
    elif training.local_exchange is not None and before.local_steps:
        found.append("--set local_steps=0")
    if training.replicas != before.replicas or training.local_exchange is None:
        found.append(f"--replicas {training.replicas}")
    return " ".join(found)
