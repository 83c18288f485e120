"""Plans of peers that each hold the whole model, take steps of their own and exchange what has come of them.

    step = slowest peer's share of a step + what of an exchange outlasts its delay / steps between two of them

A step's micro-batches are shared out by the peers' speed, so a step sees the same data as on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atoll.errors import NotEnoughMemory, PlanError, UsageError
from atoll.exchange import AUTO, MOST_PEERS
from atoll.plan import LinkPrediction, Plan, Prediction, Replica, validate, written_buffers
from coordinator.planning import TUNED
from coordinator.planning.exchange_codecs import with_codec
from coordinator.planning.gossip_plans import hidden_steps, round_of, with_table
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from coordinator.planning.transfers import rank_rates, shares_of
from strategies.exchanges.catalogue import exchange_facts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.exchange import Exchange
    from coordinator.planning.search.op_fence import Effort

    Floats = NDArray[np.float64]


def peers_plan(
    request: PlanRequest,
    exchange: Exchange,
    effort: Effort | None = None,
    given: tuple[Sequence[tuple[str, ...]], Sequence[int]] | None = None,
) -> Plan:
    """Return the plan of as many peers as end a step first, or as many as the job's ``replicas`` say.

    ``given``: their workers, and where their shares of a step end. NotEnoughMemory where fewer than two
    machines hold the model and what the rule keeps, UsageError where a step has too few micro-batches for
    the peers, PlanError for a model that peers cannot share.
    """
    if exchange.codec != AUTO:
        exchange_facts(exchange.rule).check(exchange)
    written = written_buffers(request.dag)
    if written:
        raise PlanError(
            f"training writes {len(written)} buffers, as {written[0]}, which peers with local steps do not "
            "join: give --exchange exact"
        )
    if given is not None:
        return _joined(request, exchange, *given, effort)
    _check_count(request)
    found = fastest(request, exchange)
    if found is None:
        problem = _problem(request, exchange)
        need = problem.memory.bytes(0, problem.n_ops, 1)
        held = sum(bool(limit >= need) for limit in problem.limits)
        raise NotEnoughMemory(
            f"peers with local steps hold the whole model, {need / 2**20:.0f} MiB with what {exchange.rule} "
            f"keeps of it; {held} of {len(problem.limits)} machines have that, {_fewest(request)} are needed"
        )
    return _joined(request, exchange, found.parts, found.ends, effort)


def _fewest(request: PlanRequest) -> int:
    """Peers without which there is no plan. Who has lost machines goes on with fewer than asked for."""
    return max(2, request.training.replica_count or 1) if request.version <= 1 else 2


def _check_count(request: PlanRequest) -> None:
    """Raise UsageError where a step has not a micro-batch for each peer: no fleet would help."""
    n_micro, fewest = request.training.n_micro, _fewest(request)
    if request.version > 1 or fewest <= n_micro:
        return
    instead = f"--replicas {n_micro}" if n_micro > 1 else "--exchange exact"
    raise UsageError(
        f"{fewest} peers share out the {n_micro} micro-batches of a step; give --set n_micro={fewest} or "
        f"more, or {instead}"
    )


class Sharing(NamedTuple):
    """Peers that share out a step, where their shares end, and the predicted seconds of a step."""

    step_s: float
    parts: list[tuple[str, ...]]
    ends: list[int]


def fastest(request: PlanRequest, exchange: Exchange) -> Sharing | None:
    """Return how many peers end a step first, None where fewer than two machines hold what the rule keeps."""
    return min(_counted(request, exchange), key=lambda one: one.step_s, default=None)


def _problem(request: PlanRequest, exchange: Exchange) -> Problem:
    """One micro-batch at a peer that holds the whole model."""
    own = replace(request.training, n_micro=1, blocks=1, exchange=exchange.rule)
    return Problem(request.dag, own, request.fleet)


def _counted(request: PlanRequest, exchange: Exchange) -> Iterator[Sharing]:
    """Yield sharings for numbers of the fastest peers."""
    problem = _problem(request, exchange)
    n_micro, fleet, seed = request.training.n_micro, request.fleet, request.training.seed
    need = problem.memory.bytes(0, problem.n_ops, 1)
    micro_s = problem.compute[:, -1]
    able = [i for i in range(len(fleet.devices)) if problem.limits[i] >= need]
    able.sort(key=lambda i: (micro_s[i], i))
    most = min(MOST_PEERS, len(able), n_micro)
    asked = request.training.replica_count or 1
    counts = range(2, most + 1)
    if asked > 1:
        counts = range(asked, asked + 1) if request.version <= 1 else range(2, asked + 1)
    n_bytes = problem.memory.trained(0, problem.n_ops)[0]
    for count in counts:
        if count > most:
            continue
        members = able[:count]
        shares = shares_of(n_micro, [1.0 / float(micro_s[i]) for i in members])
        compute_s = max(share * float(micro_s[i]) for share, i in zip(shares, members, strict=True))
        drawn = with_table(fleet, members, n_bytes, exchange, seed, search=False)
        drawn = with_codec(fleet, members, n_bytes, drawn, compute_s)
        _, joint_s = round_of(fleet, members, n_bytes, drawn, seed)
        step_s = compute_s + max(0.0, joint_s - hidden_steps(exchange) * compute_s) / exchange.every
        yield Sharing(step_s, [(fleet.devices[i].worker,) for i in members], list(accumulate(shares)))


def _joined(
    request: PlanRequest,
    exchange: Exchange,
    parts: Sequence[tuple[str, ...]],
    ends: Sequence[int],
    effort: Effort | None,
) -> Plan:
    """Plan each peer for its share, and put them together."""
    spans = list(pairwise((0, *ends)))
    plans = [
        make_plan(
            replace(
                request,
                fleet=request.fleet.subset(part),
                training=replace(
                    request.training, n_micro=stop - start, blocks=1, replicas="1", exchange=exchange.rule
                ),
                partitioner="op_fence",
                beyond=0,
            ),
            effort,
        )
        for part, (start, stop) in zip(parts, spans, strict=True)
    ]
    evaluated = all(plan.only.evaluated for plan in plans)
    stages = [
        plan.stages[0] if evaluated else replace(plan.stages[0], eval_start=0, eval_stop=0) for plan in plans
    ]
    fleet = request.fleet
    members = [fleet.index[stage.worker] for stage in stages]
    problem = _problem(request, exchange)
    n_bytes = problem.memory.trained(0, problem.n_ops)[0]
    exchange = with_table(fleet, members, n_bytes, exchange, request.training.seed)
    alone_s = max(plan.prediction.step_s for plan in plans if plan.prediction is not None)
    exchange = with_codec(fleet, members, n_bytes, exchange, alone_s)
    predicted = _predicted(request, plans, members, exchange)
    # Each evaluates before its next period, and the slowest for longest.
    forward_s = float(problem.forward[members, -1].max())
    evaluation_s = request.training.eval_batches * forward_s if evaluated else 0.0
    exchange = replace(
        exchange,
        rates=tuple(rank_rates(fleet, members)),
        deadline_s=max(TUNED.least_deadline_s, exchange.every * predicted.step_s) + evaluation_s,
    )
    workers = {stage.worker for stage in stages}
    plan = replace(
        plans[0],
        partitioner=request.partitioner,
        n_micro=request.training.n_micro,
        blocks=request.training.blocks,
        replicas=tuple(Replica(span, (stage,)) for span, stage in zip(spans, stages, strict=True)),
        exchange=exchange,
        prediction=predicted,
        left_out=tuple(
            (device.worker, "the peers are faster without it, or it does not hold the model")
            for device in fleet.devices
            if device.worker not in workers
        ),
    )
    validate(plan, request.dag, request.training)
    return plan


def _predicted(
    request: PlanRequest, plans: Sequence[Plan], members: list[int], exchange: Exchange
) -> Prediction:
    alone = [p.prediction for p in plans if p.prediction is not None]
    slowest = max(alone, key=lambda p: p.step_s)
    problem = Problem(request.dag, request.training, request.fleet)
    n_bytes = problem.memory.trained(0, problem.n_ops)[0]
    sent, joint_s = round_of(request.fleet, members, n_bytes, exchange, request.training.seed)
    late_s = max(0.0, joint_s - hidden_steps(exchange) * slowest.step_s)
    names = [device.worker for device in request.fleet.devices]
    links = tuple(
        LinkPrediction(
            names[a],
            names[b],
            round(sent[a, b] / exchange.every),
            8.0 * sent[a, b] / request.fleet.effective_bps[a, b] / exchange.every,
        )
        for a, b in zip(*np.nonzero(sent), strict=True)
    )
    words = (
        f"{len(plans)} peers with {exchange.rule} exchange every {exchange.every} steps, in {joint_s:.3g} s, "
        f"{float(sent.sum(axis=1).max()) / 1e6:.3g} MB from the busiest; another model than one machine's"
    )
    dominated = late_s > exchange.every * slowest.step_s
    return replace(
        slowest,
        step_s=slowest.step_s + late_s / exchange.every,
        lower_bound_s=max(p.lower_bound_s for p in alone),
        bottleneck="exchange" if dominated else slowest.bottleneck,
        reason=words if dominated else slowest.reason,
        stages=tuple(stage for p in alone for stage in p.stages),
        links=links,
        notes=tuple(dict.fromkeys((words, *(note for p in alone for note in p.notes)))),
    )
