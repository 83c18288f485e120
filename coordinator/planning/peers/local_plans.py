"""Plans of peers that take steps of their own and exchange what has come of them.

    step = slowest peer's share of a step + what of an exchange outlasts its delay / steps between two of them

A peer is one machine that holds the model, or a group of them: a pipeline of its own, with its own cut. A
step's micro-batches are shared out by the peers' speed, so a step sees the same data as on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import NotEnoughMemory, PlanError, UsageError
from atoll.exchange import AUTO, MOST_PEERS, Exchange
from atoll.microbatch import ScheduleName
from atoll.plan import LinkPrediction, Plan, Prediction, Replica, StageSpec, validate, written_buffers
from coordinator.planning import TUNED
from coordinator.planning.baselines import GIVEN_CUT
from coordinator.planning.peers.exchange_codecs import with_codec
from coordinator.planning.peers.gossip_plans import (
    Held,
    held_by,
    hidden_steps,
    rates_by_rank,
    round_of,
    site_numbers,
    through_gateways,
    whole_models,
    with_table,
)
from coordinator.planning.peers.partitions import Rooms
from coordinator.planning.peers.sketches import Pace, Sharing, Sketches
from coordinator.planning.peers.transfers import shares_of
from coordinator.planning.planner import PlanRequest, at_work, make_plan
from coordinator.planning.problem import Problem
from coordinator.planning.search.clusters import groups
from strategies.exchanges.catalogue import exchange_facts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from coordinator.planning.search.op_fence import Effort

    Floats = NDArray[np.float64]


Known = dict[tuple[tuple[str, ...], int, int, str], Plan]
"""Plans of peers alone: by workers, micro-batches, copies that the rule keeps, cut, recomputation."""


def peers_plan(
    request: PlanRequest,
    exchange: Exchange,
    effort: Effort | None = None,
    given: Sharing | None = None,
    known: Known | None = None,
) -> Plan:
    """Return the plan of as many peers as end a step first, or as many as the job's ``replicas`` say.

    ``given``: their workers, and where their shares of a step end. ``known``: peers planned before, which is
    added to. NotEnoughMemory where no two machines, or groups of them, hold the model and what the rule
    keeps, UsageError where a step has too few micro-batches for the peers, PlanError for a model that peers
    cannot share.
    """
    if exchange.codec != AUTO:
        exchange_facts(exchange.rule).check(exchange)
    written = written_buffers(request.dag)
    if written:
        raise PlanError(
            f"training writes {len(written)} buffers, as {written[0]}, which peers with local steps do not "
            "join: give --exchange exact"
        )
    known = {} if known is None else known
    if given is not None:
        return _joined(request, exchange, given, effort, known)
    _check_count(request)
    found = fastest(request, exchange, effort, known)
    if found is None:
        raise NotEnoughMemory(_shortage(request, exchange))
    return _joined(request, exchange, found, effort, known)


def _shortage(request: PlanRequest, exchange: Exchange) -> str:
    """What is missing of memory, and what would do."""
    problem = _problem(request, exchange)
    need, fewest = problem.memory.bytes(0, problem.n_ops, 1), _fewest(request)
    held = sum(bool(limit >= need) for limit in problem.limits)
    words = (
        f"peers with local steps hold the whole model, {need / 2**20:.0f} MiB with what {exchange.rule} "
        f"keeps of it; {held} of {len(problem.limits)} machines have that, {fewest} are needed"
    )
    return (
        f"{words}, and no {fewest} groups of machines have it together, of "
        f"{problem.limits.sum() / 2**20:.0f} MiB in all; more memory would do, or "
        "--exchange exact, which holds the model once"
    )


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


# ---------------------------------------------------------------- who is a peer


def fastest(
    request: PlanRequest, exchange: Exchange, effort: Effort | None = None, known: Known | None = None
) -> Sharing | None:
    """Return which peers end a step first, None where no two machines or groups of them hold what the rule
    keeps.

    Groups are tried where a machine does not hold the model by itself, or where the fleet has several sites.
    """
    known = {} if known is None else known
    asked = (request.training.replicas, request.version, tuple(d.worker for d in request.fleet.devices))
    return request.memory.once((exchange, effort, asked), lambda: _fastest(request, exchange, effort, known))


def _fastest(request: PlanRequest, exchange: Exchange, effort: Effort | None, known: Known) -> Sharing | None:
    at_work(request, f"peers with {exchange.rule} every {exchange.every} steps")
    single = min(_counted(request, exchange), key=lambda one: one.step_s, default=None)
    grouped = _grouped(request, exchange, effort, known)
    if grouped is None or single is None:
        return single or grouped
    alone = _joined(request, exchange, single, effort, known).prediction
    faster = alone is None or grouped.step_s < TUNED.grouped_gains * alone.step_s
    return grouped if faster else single


def _problem(request: PlanRequest, exchange: Exchange) -> Problem:
    """One micro-batch at a peer that holds the whole model."""
    own = replace(request.training, n_micro=1, blocks=1, exchange=exchange.rule)
    return Problem(request.dag, own, request.fleet, divisions=request.divisions)


def _counts(request: PlanRequest, most: int) -> Sequence[int]:
    """How many peers there may be, of so many at most."""
    asked = request.training.replica_count or 1
    if asked <= 1:
        return range(2, most + 1)
    return range(asked if request.version <= 1 else 2, min(asked, most) + 1)


def _counted(request: PlanRequest, exchange: Exchange) -> Iterator[Sharing]:
    """Yield sharings for numbers of the fastest machines that hold the model by themselves."""
    problem = _problem(request, exchange)
    n_micro, fleet, seed = request.training.n_micro, request.fleet, request.training.seed
    micro_s = problem.compute[:, -1]
    able = sorted(_able(problem), key=lambda i: (micro_s[i], i))
    n_bytes, numbers = problem.memory.trained(0, problem.n_ops)[0], site_numbers(fleet)
    for count in _counts(request, min(MOST_PEERS, len(able), n_micro)):
        members = able[:count]
        shares = shares_of(n_micro, [1.0 / float(micro_s[i]) for i in members])
        compute_s = max(share * float(micro_s[i]) for share, i in zip(shares, members, strict=True))
        held = whole_models(fleet, members, n_bytes)
        drawn = with_table(fleet, held, exchange, seed, search=False)
        step_s = _step_s(request, held, drawn, compute_s, numbers)
        yield Sharing(step_s, [(fleet.devices[i].worker,) for i in members], list(accumulate(shares)))


def _able(problem: Problem) -> list[int]:
    """Devices that hold the model by themselves."""
    need = problem.memory.bytes(0, problem.n_ops, 1)
    return [i for i, limit in enumerate(problem.limits) if limit >= need]


def _step_s(
    request: PlanRequest, held: Held, exchange: Exchange, compute_s: float, numbers: tuple[int, ...]
) -> float:
    """Seconds of a step whose slowest peer computes for ``compute_s``; ``numbers`` of devices' sites."""
    held = through_gateways(request.fleet, held, exchange, numbers)
    coded = with_codec(request.fleet, held, exchange, compute_s)
    _, joint_s = round_of(request.fleet, held, coded, request.training.seed)
    return compute_s + max(0.0, joint_s - hidden_steps(exchange) * compute_s) / exchange.every


def _grouped(request: PlanRequest, exchange: Exchange, effort: Effort | None, known: Known) -> Sharing | None:
    """Return the fastest sharing of peers of which some are several machines, None where there is none.

    All ways are ranked by a sketch of their step, and the best are planned in full.
    """
    if written_buffers(request.dag):
        return None
    problem, fleet = _problem(request, exchange), request.fleet
    able = _able(problem)
    if len(fleet.devices) < 3 or (len(able) == len(fleet.devices) and len(groups(fleet.bandwidth_bps)) == 1):
        return None
    memory, n_ops, n_micro = problem.memory, problem.n_ops, request.training.n_micro
    room = {device.worker: float(limit) for device, limit in zip(fleet.devices, problem.limits, strict=True)}
    rooms = Rooms(room, memory.state_bytes(0, n_ops), memory.bytes(0, n_ops, 1))
    most = min(MOST_PEERS, len(fleet.devices) - 1, n_micro, int(sum(room.values()) // max(rooms.need, 1.0)))
    counts = _counts(request, most)
    if len(counts) > TUNED.group_counts:
        counts = sorted({round(float(n)) for n in np.geomspace(counts[0], counts[-1], TUNED.group_counts)})
    wholes: dict[tuple[str, ...], Pace] = request.memory.once(("wholes", tuple(room)), dict)
    sketches = Sketches(problem, exchange, n_micro, request.training.seed, rooms, wholes)
    tried = max(1, min(TUNED.grouped, TUNED.planned_peers // len(fleet.devices)))
    found: list[Sharing] = []
    for sketch in _likeliest(request, sketches, counts):
        with suppress(NotEnoughMemory):
            found.append(_balanced(request, exchange, sketch, effort, known))
        if len(found) == tried:
            break
    return min(found, key=lambda one: one.step_s, default=None)


def _likeliest(request: PlanRequest, sketches: Sketches, counts: Sequence[int]) -> list[Sharing]:
    """Sketches of ways to make peers, the best first; in a large fleet those first that are planned already
    for another exchange, of those that are about as good."""
    if not request.memory.brief:
        return sketches.ranked(counts)[: TUNED.group_attempts]
    known = request.memory.groupings.get(exchange_facts(sketches.exchange.rule).own_copies, {})
    ranked = sketches.ranked(counts, known)[: TUNED.group_attempts]
    near_s = TUNED.grouped_alike * ranked[0].step_s if ranked else 0.0
    return sorted(ranked, key=lambda one: one.step_s > near_s or tuple(one.parts) not in known)


def _balanced(
    request: PlanRequest, exchange: Exchange, sketch: Sharing, effort: Effort | None, known: Known
) -> Sharing:
    """Plan the peers of a sketch: with shares by the speed that is predicted of them, then with single
    micro-batches moved from the slowest to who is done first."""
    tried: dict[tuple[int, ...], tuple[Sharing, list[float]]] = {}

    def judged(shares: tuple[int, ...]) -> list[float]:
        """Plan these shares; seconds of each peer's step."""
        if shares not in tried:
            sharing = Sharing(0.0, sketch.parts, tuple(accumulate(shares)))
            plans, spans = _alone(request, exchange, sharing, effort, known)
            told = _together(request, exchange, plans, spans).prediction
            alike = request.memory.groupings.setdefault(exchange_facts(exchange.rule).own_copies, {})
            alike[tuple(sharing.parts)] = None
            steps_s = [plan.prediction.step_s if plan.prediction is not None else np.inf for plan in plans]
            tried[shares] = sharing._replace(step_s=told.step_s if told is not None else np.inf), steps_s
        return tried[shares][1]

    shares = tuple(stop - start for start, stop in pairwise((0, *sketch.ends)))
    for _ in range(TUNED.share_rounds):
        seconds = judged(shares)
        speeds = [share / step_s for share, step_s in zip(shares, seconds, strict=True)]
        shares = shares_of(request.training.n_micro, speeds)
    shares = min(tried, key=lambda one: tried[one][0].step_s)
    for _ in range(TUNED.share_rounds):
        seconds = judged(shares)
        slowest = max(range(len(shares)), key=seconds.__getitem__)
        soonest = min(range(len(shares)), key=lambda at: seconds[at] * (1.0 + 1.0 / shares[at]))
        if shares[slowest] == 1 or slowest == soonest:
            break
        shares = tuple(n - (at == slowest) + (at == soonest) for at, n in enumerate(shares))
        judged(shares)
    return min((sharing for sharing, _ in tried.values()), key=lambda one: one.step_s)


def pipeline_s(plan: Plan, number: int) -> float:
    """Return the seconds in which the slowest stage of a replica computes its share."""
    assert plan.prediction is not None  # noqa: S101 - made here
    stages = zip(plan.places, plan.prediction.stages, strict=True)
    return max(told.compute_s + told.handling_s for place, told in stages if place.replica == number)


# ---------------------------------------------------------------- one plan of all


def _joined(
    request: PlanRequest, exchange: Exchange, sharing: Sharing, effort: Effort | None, known: Known
) -> Plan:
    """Plan each peer for its share, and put them together."""
    return _together(request, exchange, *_alone(request, exchange, sharing, effort, known))


def _alone(
    request: PlanRequest, exchange: Exchange, sharing: Sharing, effort: Effort | None, known: Known
) -> tuple[list[Plan], list[tuple[int, int]]]:
    """(plan of each peer for its share, micro-batches that are its share)."""
    spans = list(pairwise((0, *sharing.ends)))
    copies = exchange_facts(exchange.rule).own_copies

    found = []
    cuts = sharing.cuts or [""] * len(sharing.parts)
    for part, (start, stop), cut in zip(sharing.parts, spans, cuts, strict=True):
        key = part, stop - start, copies, cut
        if key not in known:
            own = replace(
                request.training,
                n_micro=stop - start,
                blocks=1,
                replicas="1",
                exchange=exchange.rule,
                local_steps=0,  # no say in how a peer is cut
                spot_checks=0.0,  # of one pipeline alone
            )
            alone = replace(request, fleet=request.fleet.subset(part), training=own, beyond=0)
            how = cut if cut not in ("", GIVEN_CUT) else "op_fence"
            known[key] = make_plan(replace(alone, partitioner=how), effort, part=True)
        found.append(known[key])
    return found, spans


def as_replicas(
    plans: Sequence[Plan], spans: Sequence[tuple[int, int]]
) -> tuple[ScheduleName, tuple[Replica, ...]]:
    """Return pipelines that were planned alone as the replicas of one plan, and its schedule."""
    evaluated = all(plan.only.evaluated for plan in plans)
    replicas = tuple(
        Replica(span, tuple(_stage(s, plan, evaluated) for s in plan.stages), plan.links)
        for plan, span in zip(plans, spans, strict=True)
    )
    schedules = {plan.schedule for plan in plans}
    schedule = next(iter(schedules))
    if len(schedules) > 1:
        held = any(one.piece.held for replica in replicas for one in replica.pieces)
        schedule = ScheduleName.ZERO_BUBBLE if held else ScheduleName.ONE_F_ONE_B
    return schedule, replicas


def _stage(stage: StageSpec, plan: Plan, evaluated: bool) -> StageSpec:
    """A stage of a plan whose schedule may be named otherwise."""
    pieces = list(stage.pieces)
    if not evaluated:
        pieces = [replace(piece, eval_start=0, eval_stop=0) for piece in pieces]
    if plan.schedule is ScheduleName.GPIPE:
        pieces = [replace(piece, warmup=plan.n_micro) for piece in pieces]
    return stage.with_pieces(pieces)


def _together(
    request: PlanRequest, exchange: Exchange, plans: Sequence[Plan], spans: Sequence[tuple[int, int]]
) -> Plan:
    schedule, replicas = as_replicas(plans, spans)
    fleet, seed = request.fleet, request.training.seed
    exchange = exchange.among(len(replicas), request.training.quorum, request.training.grace_s)
    members = [fleet.index[stage.worker] for replica in replicas for stage in replica.stages]
    problem = _problem(request, exchange)
    held = held_by(fleet, replicas, request.dag, request.training.optimizer)
    exchange = with_table(fleet, held, exchange, seed)
    held = through_gateways(fleet, held, exchange, site_numbers(fleet))
    alone_s = max(plan.prediction.step_s for plan in plans if plan.prediction is not None)
    exchange = with_codec(fleet, held, exchange, alone_s)
    predicted = _predicted(request, plans, held, exchange)
    # Each evaluates before its next period, and the slowest for longest.
    evaluation_s = max(_evaluation_s(request, problem, replica) for replica in replicas)
    exchange = replace(
        exchange,
        rates=tuple(rates_by_rank(fleet, members, held)),
        inner=Exchange() if held.sites else None,
        sites=tuple(held.sites[at] for at in members) if held.sites else (),
        deadline_s=max(TUNED.least_deadline_s, exchange.every * predicted.step_s) + evaluation_s,
    )
    workers = {stage.worker for replica in replicas for stage in replica.stages}
    plan = replace(
        plans[0],
        partitioner=request.partitioner,
        schedule=schedule,
        n_micro=request.training.n_micro,
        blocks=request.training.blocks,
        replicas=replicas,
        exchange=exchange,
        prediction=predicted,
        left_out=tuple(
            (device.worker, _left_out(problem, exchange, float(limit)))
            for device, limit in zip(fleet.devices, problem.limits, strict=True)
            if device.worker not in workers
        ),
    )
    validate(plan, request.dag, request.training)
    return plan


def _left_out(problem: Problem, exchange: Exchange, limit: float) -> str:
    """Say why a machine with so many bytes is in no peer."""
    need = problem.memory.bytes(0, problem.n_ops, 1)
    if limit >= need:
        return "the peers are faster without it"
    return (
        f"alone it does not hold the model with what {exchange.rule} keeps, {need / 2**20:.0f} MiB of its "
        f"{limit / 2**20:.0f}, and the peers are faster without it beside others"
    )


def single_machine(plans: Sequence[Plan]) -> tuple[float | None, str]:
    """Return the seconds of a whole step on the fastest machine alone, memory aside, and which that is, from
    plans of replicas that each are of their share."""
    n_micro = sum(plan.n_micro for plan in plans)
    found = [
        (told.single_machine_s * n_micro / plan.n_micro, told.single_machine)
        for plan in plans
        if (told := plan.prediction) is not None and told.single_machine_s is not None
    ]
    return min(found, default=(None, ""))


def _evaluation_s(request: PlanRequest, problem: Problem, replica: Replica) -> float:
    """Seconds of a peer's held-out micro-batches: of its slowest stage, and once through the others."""
    if not replica.evaluated:
        return 0.0
    stages = [0.0] * len(replica.stages)
    for piece, at, _ in replica.pieces:
        forward = problem.forward[request.fleet.index[replica.stages[at].worker]]
        stages[at] += float(forward[piece.stop] - forward[piece.start])
    return request.training.eval_batches * max(stages) + (sum(stages) - max(stages))


def _predicted(request: PlanRequest, plans: Sequence[Plan], held: Held, exchange: Exchange) -> Prediction:
    alone = [p.prediction for p in plans if p.prediction is not None]
    slowest = max(alone, key=lambda p: p.step_s)
    sent, joint_s = round_of(request.fleet, held, exchange, request.training.seed)
    late_s = max(0.0, joint_s - hidden_steps(exchange) * slowest.step_s)
    names = [device.worker for device in request.fleet.devices]
    rounds = {
        (names[a], names[b]): LinkPrediction(
            names[a],
            names[b],
            round(sent[a, b] / exchange.every),
            8.0 * sent[a, b] / request.fleet.effective_bps[a, b] / exchange.every,
        )
        for a, b in zip(*np.nonzero(sent), strict=True)
    }
    # Within a peer a link carries what its pipeline sends, and what is settled of tied parameters.
    inside = [_added(link, rounds.pop((link.source, link.target), None)) for p in alone for link in p.links]
    peers = f"{len(plans)} peers" + _of_stages(plans)
    words = (
        f"{peers} with {exchange.rule} exchange every {exchange.every} steps, in {joint_s:.3g} s, "
        f"{float(sent.sum(axis=1).max()) / 1e6:.3g} MB from the busiest"
        + (f", by gateways of {len(set(held.sites))} sites" if held.sites else "")
        + "; another model than one machine's"
    )
    dominated = late_s > exchange.every * slowest.step_s
    single_s, single = single_machine(plans)
    return replace(
        slowest,
        single_machine_s=single_s,
        single_machine=single,
        step_s=slowest.step_s + late_s / exchange.every,
        lower_bound_s=max(p.lower_bound_s for p in alone),
        bottleneck="exchange" if dominated else slowest.bottleneck,
        reason=words if dominated else slowest.reason,
        stages=tuple(stage for p in alone for stage in p.stages),
        links=(*inside, *rounds.values()),
        notes=tuple(dict.fromkeys((words, *(note for p in alone for note in p.notes)))),
    )


def _added(link: LinkPrediction, also: LinkPrediction | None) -> LinkPrediction:
    if also is None:
        return link
    n_bytes, busy_s = link.bytes_per_step + also.bytes_per_step, link.busy_s + also.busy_s
    return replace(link, bytes_per_step=n_bytes, busy_s=busy_s)


def _of_stages(plans: Sequence[Plan]) -> str:
    """How many machines each peer is, where one is several."""
    sizes = [len(plan.stages) for plan in plans]
    return (
        f" of {', '.join(map(str, sizes[:8]))}{', ...' * (len(sizes) > 8)} machines" if max(sizes) > 1 else ""
    )
