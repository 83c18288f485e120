"""Which way wins: one pipeline, replicas of it, exact data parallelism, local steps or gossip.

Memory decides first what is possible, then seconds decide. Exact ways train the same model as one machine
(with as many blocks of micro-batches); the others train more samples a second, each of which counts less:
``efficiency`` is measured (benchmarks/local_steps.py), stated beside the speed and multiplied into ``worth``.

    exact:        step = max over replicas of their pipeline's step + what of the exchange is not hidden
    local steps:  round = H steps of the slowest peer + what of one exchange outlasts its delay
    gossip:       the same, in the pairs or groups that ``strategies.exchanges.partners`` draws
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import NotEnoughMemory, PlanError
from atoll.exchange import EXACT, MOST_PEERS, PAPERS_STEPS, RATIOS, Exchange
from atoll.plan import written_buffers
from coordinator.planning.buckets import ExchangeCost, Gradient, merge
from coordinator.planning.gossip_plans import hidden_steps, round_of, with_table
from coordinator.planning.op_fence import Effort
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from coordinator.planning.replicas import MOST_REPLICAS, partitions
from coordinator.planning.transfers import (
    exchange_s,
    latency_s,
    owner_transfers,
    shares_of,
)
from strategies.exchanges.catalogue import EXCHANGES, exchange_facts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.plan import Plan, StagePrediction
    from coordinator.planning.costs.fleet import Fleet

    Floats = NDArray[np.float64]

DAY_S = 86_400.0
LOCAL_EXCHANGES = (
    *(Exchange("diloco", every=every, codec="int8_block") for every in (10, 50, 200)),
    Exchange("streaming_diloco", every=12, fragments=4, delay=5, codec="int4_block"),
    *(Exchange("sparseloco", every=every, ratio=200.0) for every in (10, 50)),
)
"""Settings compared. Efficiencies were measured uncoded; four bits train to similar quality
(papers/decentralized.md 8.5)."""
GOSSIP_EXCHANGES = tuple(
    Exchange(rule, every=every, ratio=RATIOS.get(rule, 1.0)) for rule, every in PAPERS_STEPS.items()
)
FINISHING = Effort(judged=10, improved=1, moves=60, order_moves=60)  # of each replica's own pipeline
ROUNDS = 2  # of shares of the micro-batches after the replicas' measured speed


class WayKind(StrEnum):
    PIPELINE = "pipeline"
    REPLICAS = "replicas"
    DATA_PARALLEL = "data parallel"
    LOCAL_STEPS = "local steps"
    GOSSIP = "gossip"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train the job on the fleet, or why it is none. Rates are micro-batches a second."""

    kind: WayKind
    text: str  # for people
    micros_per_s: float = 0.0
    step_s: float = 0.0  # of all of a step's micro-batches; a local step's share of its round
    exchange_s: float = 0.0  # a round, before anything is hidden
    bytes_a_day: float = 0.0  # that the busiest machine sends
    memory_share: float = 0.0  # of its limit, where it is highest
    exact: bool = True  # the same model as one machine
    efficiency: float = 1.0
    workers: tuple[tuple[str, ...], ...] = ()  # by replica
    micros: tuple[int, ...] = ()  # of each replica a step
    exchange: Exchange | None = None
    plans: tuple[Plan, ...] = field(default=(), compare=False)  # of each replica
    why_not: str = ""

    @property
    def worth(self) -> float:
        """Micro-batches a second, each counted by what it teaches beside an exact one."""
        return self.micros_per_s * self.efficiency


def compare_ways(request: PlanRequest, *, inexact: str = "", effort: Effort | None = None) -> tuple[Way, ...]:
    """Every way, the best first, those that are impossible last with the reason.

    ``inexact``: which ways that change the model are compared: "" none, "auto" all, or a rule's name. Raises
    NotEnoughMemory when no way fits, UsageError for an unknown rule, and what ``make_plan`` raises.
    """
    if inexact not in ("", "auto"):
        exchange_facts(inexact)
    # Ways of peers count what their rule keeps by themselves.
    request = replace(request, training=replace(request.training, replicas="1", exchange=EXACT))
    # What fits as replicas fits as one pipeline, so its shortage is everybody's.
    found = [_pipeline(request, make_plan(request, effort))]
    compared = {
        kind: wanted
        for kind, exchanges in ((WayKind.LOCAL_STEPS, LOCAL_EXCHANGES), (WayKind.GOSSIP, GOSSIP_EXCHANGES))
        if (wanted := [exchange for exchange in exchanges if inexact in ("auto", exchange.rule)])
    }
    written = written_buffers(request.dag)
    if written:
        why = f"training writes {len(written)} buffers, as {written[0]}, which workers do not average"
        others = (WayKind.REPLICAS, WayKind.DATA_PARALLEL, *compared)
        return (*found, *(Way(kind, str(kind), why_not=why) for kind in others))
    peers = Peers.of(request)
    whole = "a part of the fleet is no faster than its fastest machine, which holds the whole model"
    twice = whole if peers.members else "needs room for the model twice"
    found.append(_best(_replicated(request, peers.problem), WayKind.REPLICAS, twice))
    found.append(_best(_data_parallel(request, peers), WayKind.DATA_PARALLEL, peers.why_not))
    for kind, wanted in compared.items():
        least = min(EXCHANGES[exchange.rule].own_copies for exchange in wanted)
        copies = f"needs room for the model and {least} copies of it on two machines"
        found.append(_best(_peers(request, peers, wanted), kind, peers.why_not or copies))
    return tuple(sorted(found, key=lambda way: (bool(way.why_not), -way.worth)))


def _best(ways: Iterator[Way], kind: WayKind, why_not: str) -> Way:
    return max(ways, key=lambda way: way.worth, default=Way(kind, str(kind), why_not=why_not))


# ---------------------------------------------------------------- exact ways


def _pipeline(request: PlanRequest, plan: Plan) -> Way:
    prediction = plan.prediction
    if prediction is None:
        raise PlanError("a plan without a prediction cannot be compared")
    sent: dict[str, int] = {}
    for link in prediction.links:
        sent[link.source] = sent.get(link.source, 0) + link.bytes_per_step
    stages = len(plan.stages)
    text = f"one pipeline of {stages} stages" if stages > 1 else "one machine"
    return Way(
        WayKind.PIPELINE,
        text,
        micros_per_s=request.training.n_micro / prediction.step_s,
        step_s=prediction.step_s,
        bytes_a_day=max(sent.values(), default=0) * DAY_S / prediction.step_s,
        memory_share=max(s.memory_bytes / s.memory_limit_bytes for s in prediction.stages),
        workers=(tuple(stage.worker for stage in plan.stages),),
        micros=(request.training.n_micro,),
        plans=(plan,),
    )


def _replicated(request: PlanRequest, problem: Problem) -> Iterator[Way]:
    """Replicas over the fleet's parts; of one stage each they are the next function's."""
    n = len(request.fleet.devices)
    most = min(MOST_REPLICAS, request.training.n_micro, n)
    seen: set[tuple[tuple[str, ...], ...]] = set()
    for count in range(2, most + 1):
        for parts in partitions(request.fleet, count):
            if parts in seen:
                continue
            seen.add(parts)
            way = _replicas(request, problem, parts)
            if way is not None and any(len(replica) > 1 for replica in way.workers):
                yield way


def _replicas(request: PlanRequest, problem: Problem, parts: tuple[tuple[str, ...], ...]) -> Way | None:
    """Each part's pipeline for its share of the micro-batches; None where one does not fit."""
    n_micro = request.training.n_micro
    micros = shares_of(n_micro, [1.0] * len(parts))
    plans: list[Plan] = []
    for _ in range(ROUNDS):
        try:
            plans = [
                make_plan(_part(request, part, share), FINISHING)
                for part, share in zip(parts, micros, strict=True)
            ]
        except NotEnoughMemory:
            return None
        speeds = [m / _step_s(plan) for m, plan in zip(micros, plans, strict=True)]
        again = shares_of(n_micro, speeds)
        if again == micros:
            break
        micros = again
    else:
        plans = [
            make_plan(_part(request, part, share), FINISHING)
            for part, share in zip(parts, micros, strict=True)
        ]
    sent = _joint_transfers(problem, plans)
    joint_s = exchange_s(request.fleet, sent)
    compute_s = max(map(_step_s, plans))
    step_s = compute_s + joint_s
    sizes = ", ".join(str(len(plan.stages)) for plan in plans)
    return Way(
        WayKind.REPLICAS,
        f"{len(plans)} replicas of {sizes} stages",
        micros_per_s=n_micro / step_s,
        step_s=step_s,
        exchange_s=joint_s,
        bytes_a_day=_busiest(request.fleet, plans, sent) * DAY_S / step_s,
        memory_share=max(s.memory_bytes / s.memory_limit_bytes for p in plans for s in _stages(p)),
        workers=tuple(tuple(stage.worker for stage in plan.stages) for plan in plans),
        micros=micros,
        exchange=Exchange("sum"),
        plans=tuple(plans),
    )


def _part(request: PlanRequest, workers: tuple[str, ...], n_micro: int) -> PlanRequest:
    return replace(
        request,
        fleet=request.fleet.subset(workers),
        training=replace(request.training, n_micro=n_micro, blocks=1, replicas="2"),
        eval_dag=None,
    )


def _step_s(plan: Plan) -> float:
    return plan.prediction.step_s if plan.prediction is not None else float("inf")


def _stages(plan: Plan) -> tuple[StagePrediction, ...]:
    return plan.prediction.stages if plan.prediction is not None else ()


def held_in_common(plans: Sequence[Plan], problem: Problem) -> Iterator[tuple[list[int], float]]:
    """(holders in the fleet, one a replica; trained bytes) of what lies between two cuts of any replica."""
    index = problem.fleet.index
    edges = sorted({edge for plan in plans for stage in plan.stages for edge in (stage.start, stage.stop)})
    for start, stop in pairwise(edges):
        n_bytes = problem.memory.trained(start, stop)[0]
        if n_bytes > 0.0:
            yield (
                [next(index[s.worker] for s in plan.stages if s.start <= start < s.stop) for plan in plans],
                n_bytes,
            )


def _joint_transfers(problem: Problem, plans: Sequence[Plan]) -> Floats:
    """[devices, devices] bytes a step of the replicas' exchange."""
    sent = np.zeros((len(problem.fleet.devices),) * 2)
    for holders, n_bytes in held_in_common(plans, problem):
        sent += owner_transfers(problem.fleet, holders, n_bytes)
    return sent


def _busiest(fleet: Fleet, plans: Sequence[Plan], sent: Floats) -> float:
    """Bytes a step that the busiest machine sends."""
    total = sent.sum(axis=1)
    for plan in plans:
        for link in plan.prediction.links if plan.prediction is not None else ():
            total[fleet.index[link.source]] += link.bytes_per_step
    return float(total.max(initial=0.0))


# ---------------------------------------------------------------- machines that hold the whole model


@dataclass(frozen=True)
class Peers:
    """Machines of the fleet that can hold the whole model, the fastest first."""

    request: PlanRequest
    problem: Problem
    members: tuple[int, ...]  # of the fleet
    micro_s: tuple[float, ...]  # one micro-batch, forward and backward
    need_bytes: float  # of the whole model with one micro-batch in flight
    trained_bytes: float
    why_not: str = ""

    @classmethod
    def of(cls, request: PlanRequest) -> Peers:
        problem = Problem(request.dag, request.training, request.fleet)
        need = problem.memory.bytes(0, problem.n_ops, 1)
        time_s = problem.compute[:, -1]
        able = [i for i in range(len(request.fleet.devices)) if problem.limits[i] >= need]
        able.sort(key=lambda i: (time_s[i], i))
        held = "one machine alone" if able else "no machine"
        fewer = "" if len(able) > 1 else f"{held} can hold the whole model, {need / 2**20:.0f} MiB"
        return cls(
            request,
            problem,
            tuple(able),
            tuple(float(time_s[i]) for i in able),
            need,
            problem.memory.trained(0, problem.n_ops)[0],
            fewer,
        )

    def counts(self, most: int) -> Iterator[int]:
        """Numbers of the fastest members that are worth comparing: 2, 3, 4, 6, 8, 12, ... and all."""
        most = min(most, len(self.members))
        sizes = {2**k for k in range(1, 13)} | {3 * 2**k for k in range(11)} | {most}
        return (size for size in sorted(sizes) if 2 <= size <= most)

    def with_room(self, spare_bytes: float) -> Peers:
        """Those that have so much memory left beside the whole model."""
        limits = [float(self.problem.limits[member]) for member in self.members]
        held = [at for at, limit in enumerate(limits) if limit - self.need_bytes >= spare_bytes]
        return replace(
            self,
            members=tuple(self.members[at] for at in held),
            micro_s=tuple(self.micro_s[at] for at in held),
        )

    def shares(self, count: int, n_micro: int) -> tuple[int, ...]:
        return shares_of(n_micro, [1.0 / self.micro_s[at] for at in range(count)])

    def compute_s(self, micros: Sequence[int]) -> float:
        """Seconds in which the slowest of the fastest computes its share."""
        return max(m * s for m, s in zip(micros, self.micro_s, strict=False))

    def names(self, count: int) -> tuple[tuple[str, ...], ...]:
        return tuple((self.request.fleet.devices[i].worker,) for i in self.members[:count])

    def memory_share(self, count: int, extra_bytes: float = 0.0) -> float:
        need = self.need_bytes + extra_bytes
        return max(need / float(self.problem.limits[i]) for i in self.members[:count])


def _data_parallel(request: PlanRequest, peers: Peers) -> Iterator[Way]:
    n_micro = request.training.n_micro
    for count in peers.counts(n_micro):
        micros = peers.shares(count, n_micro)
        sent = owner_transfers(request.fleet, list(peers.members[:count]), peers.trained_bytes)
        whole_s = exchange_s(request.fleet, sent)
        hidden_s = _hidden(peers, whole_s, latency_s(request.fleet, sent), micros)
        step_s = peers.compute_s(micros) + whole_s - hidden_s
        yield Way(
            WayKind.DATA_PARALLEL,
            f"{count} replicas of the whole model",
            micros_per_s=n_micro / step_s,
            step_s=step_s,
            exchange_s=whole_s,
            bytes_a_day=float(sent.sum(axis=1).max()) * DAY_S / step_s,
            memory_share=peers.memory_share(count),
            workers=peers.names(count),
            micros=micros,
            exchange=Exchange("sum"),
        )


def _hidden(peers: Peers, whole_s: float, delay_s: float, micros: Sequence[int]) -> float:
    """Seconds of an exchange that pass while the last backward still computes (``buckets``)."""
    problem = peers.problem
    slowest = max(range(len(micros)), key=lambda at: micros[at] * peers.micro_s[at])
    backward = problem.backward[peers.members[slowest]]
    gradients = [
        Gradient(str(op), n_bytes, float(backward[-1] - backward[op]))
        for op in reversed(range(problem.n_ops))
        if (n_bytes := problem.memory.trained(op, op + 1)[0]) > 0.0
    ]
    if not gradients or whole_s <= 0.0:
        return 0.0
    held = sum(gradient.n_bytes for gradient in gradients)
    start_s = 2.0 * delay_s
    cost = ExchangeCost(start_s, max(0.0, whole_s - start_s) / held)
    finish_s = merge(gradients, cost).finish_s
    return max(0.0, float(backward[-1]) + whole_s - finish_s)


# ---------------------------------------------------------------- ways that change the model


def _peers(request: PlanRequest, peers: Peers, exchanges: Sequence[Exchange]) -> Iterator[Way]:
    """Peers with steps of their own and one of these exchanges, which share out a step as their plan does."""
    n_micro, fleet, seed = request.training.n_micro, request.fleet, request.training.seed
    for rule in exchanges:
        extra, trained = EXCHANGES[rule.rule].own_copies * peers.trained_bytes, peers.trained_bytes
        roomy = peers.with_room(extra)
        for count in roomy.counts(min(MOST_PEERS, n_micro)):
            micros = roomy.shares(count, n_micro)
            compute_s = roomy.compute_s(micros)
            members = list(roomy.members[:count])
            exchange = with_table(fleet, members, trained, rule, seed, search=False)
            sent, joint_s = round_of(fleet, members, trained, exchange, seed)
            round_s = exchange.every * compute_s + max(0.0, joint_s - hidden_steps(exchange) * compute_s)
            steps = f"{exchange.every} steps" if exchange.every > 1 else "step"
            yield Way(
                WayKind.GOSSIP if exchange.gossips else WayKind.LOCAL_STEPS,
                f"{count} peers, {exchange.rule} every {steps}",
                micros_per_s=sum(micros) * exchange.every / round_s,
                step_s=round_s / exchange.every,
                exchange_s=joint_s,
                bytes_a_day=float(sent.sum(axis=1).max()) * DAY_S / round_s,
                memory_share=roomy.memory_share(count, extra),
                exact=False,
                efficiency=EXCHANGES[exchange.rule].efficiency_at(exchange.every),
                workers=roomy.names(count),
                micros=micros,
                exchange=exchange,
            )
