"""Plans of several replicas: which machines make one, how much of a step each takes, and what joining costs.

    step = max over replicas of their pipeline's step + exchange

Replicas are parts of the fleet of about equal speed, whole sites together where there are as many. Each is
planned as a pipeline for its share of the step's blocks, and shares are moved to who would be done first.
Gradients are exchanged when the last backward is over: all that one machine sends passes its links at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.collective import Send, tree
from atoll.errors import NotEnoughMemory, PlanError, UsageError
from atoll.exchange import AUTO, EXACT, SIGN_RULES, Exchange, Pattern
from atoll.gradient_exchange import ELEMENT_BYTES, contributions, joining
from atoll.microbatch import block_ranges
from atoll.plan import LinkPrediction, Plan, Prediction, validate, written_buffers
from coordinator.planning import TUNED
from coordinator.planning.baselines import GIVEN_CUT, given_pieces
from coordinator.planning.costs.codec_costs import speed_of
from coordinator.planning.costs.message_costs import bytes_cpu_s
from coordinator.planning.costs.op_seconds import is_trained
from coordinator.planning.costs.quota import core_share
from coordinator.planning.peers.gossip_plans import UNITS, held_by
from coordinator.planning.peers.likely import likely_ways
from coordinator.planning.peers.local_plans import as_replicas, peers_plan, pipeline_s, single_machine
from coordinator.planning.peers.partitions import Parts
from coordinator.planning.peers.sketches import Sharing
from coordinator.planning.peers.transfers import PHASES, exchange_s, rank_rates, shares_of
from coordinator.planning.planner import PlanRequest, at_work, make_plan, remembering
from coordinator.planning.problem import Problem
from coordinator.planning.search.clusters import groups
from strategies.exchanges.catalogue import dense_volume, elements_of, exchange_facts, tree_hops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from atoll.job import TrainingSpec
    from coordinator.planning.search.op_fence import Effort

    Floats = NDArray[np.float64]

PASSES, PASS_BPS = 6, 4e9
"""Passes over the gradients that a rule makes beside its codec (rows, what is kept), and bytes a second of a
modest core."""
BETWEEN = "/"  # two replicas of a given cut
SHARE = "@"  # before the micro-batches of a replica of a given cut

Known = dict[tuple[tuple[str, ...], int, int, str], Plan]
"""Plans of replicas alone: by workers, micro-batches, blocks, cut and what is computed again."""


def best_plan(request: PlanRequest, effort: Effort | None = None) -> Plan:
    """Return the plan with as many replicas as the job's training asks for, or the best of all.

    UsageError for more replicas than blocks, and whatever ``make_plan`` raises.
    """
    request = remembering(request)
    given = request.partitioner.startswith(GIVEN_CUT) and BETWEEN in request.partitioner
    request = request if given else _of_one_class(request)
    training = request.training
    local = training.local_exchange
    if local is not None and not request.partitioner.startswith(GIVEN_CUT) and request.version > 1:
        with suppress(NotEnoughMemory):  # of a job that has lost machines one may be left
            return peers_plan(request, local, effort)
        return make_plan(_alone(request), effort)
    if local is not None and (given or not request.partitioner.startswith(GIVEN_CUT)):
        return peers_plan(request, local, effort, Sharing(0.0, *_given_parts(request)) if given else None)
    if given:
        parts, ends, cuts = _given_parts(request)
        training = replace(training, replicas=str(len(cuts)))
        return _joined(replace(request, training=training), parts, ends, effort, cuts)
    if training.gradient_exchange is not None and training.replica_count == 1:
        request = replace(request, training=replace(training, replicas=AUTO))
        return best_plan(request, effort)
    if training.replica_count == 1:
        return make_plan(_alone(request), effort)
    written = written_buffers(request.dag)
    if written and training.replica_count is not None:
        raise PlanError(
            f"training writes {len(written)} buffers, as {written[0]}, one micro-batch after the other; "
            "workers do not average those of replicas: give --replicas 1"
        )
    if written:
        return make_plan(_alone(request), effort)
    if training.replica_count is None:
        return _fastest(request, effort)
    _check_count(training.replica_count, request)
    # A job that has lost machines goes on with fewer replicas.
    fewest = training.replica_count if request.version <= 1 else 2
    for count in range(training.replica_count, fewest - 1, -1):
        found = _planned(request, likely_ways(request, [count]), effort)
        if found:
            return min(found, key=_step_s)
    if request.version > 1:
        return make_plan(_alone(request), effort)
    raise NotEnoughMemory(
        f"the fleet has no room for {training.replicas} replicas of the model; give --replicas 1 or auto, or "
        "more memory"
    )


def _of_one_class(request: PlanRequest) -> PlanRequest:
    """The request on the machines of one class, the fastest together, where replicas each make a result of
    their own of what they exchange: other machines would differ in its last bits."""
    exchange = request.training.gradient_exchange
    if exchange is None or not exchange_facts(exchange.rule).own_results:
        return request
    speeds: dict[str, float] = {}
    for device in request.fleet.devices:
        of = str(device.device_class)
        speeds[of] = speeds.get(of, 0.0) + device.gflops.get("", 1.0) / device.scale
    best = max(speeds, key=speeds.__getitem__, default="")
    kept = [device.worker for device in request.fleet.devices if str(device.device_class) == best]
    return replace(request, fleet=request.fleet.subset(kept)) if len(speeds) > 1 else request


def with_blocks(training: TrainingSpec) -> TrainingSpec:
    """Return ``training`` with a block for each replica that it may have, where it leaves them at 1.

    UsageError for more replicas than micro-batches.
    """
    count = training.replica_count
    compared = training.exchange == AUTO or training.gradient_exchange is not None
    if count is None or (compared and count == 1):  # replicas are compared
        count = min(TUNED.most_replicas, training.n_micro)
    if training.local_exchange is not None or not training.blocks == 1 < count:
        return training
    if count > training.n_micro:
        raise UsageError(
            f"{count} replicas share out the {training.n_micro} micro-batches of a step; give --set "
            f"n_micro={count} or more, or --replicas {training.n_micro}"
        )
    return replace(training, blocks=count)


def _fastest(request: PlanRequest, effort: Effort | None) -> Plan:
    """One pipeline, or as many replicas as end a step first."""
    alone: list[Plan] = []
    refused: NotEnoughMemory | None = None
    try:
        alone.append(_one_pipeline(request, effort))
    except NotEnoughMemory as error:
        refused = error
    exchange = request.training.gradient_exchange
    # One pipeline alone would take its gradients for steps.
    signs = exchange is not None and exchange.rule in SIGN_RULES
    most = min(TUNED.most_replicas, request.training.blocks, len(request.fleet.devices))
    within_s = _step_s(alone[0]) if alone and not signs else float("inf")
    found = _planned(request, likely_ways(request, range(2, most + 1), within_s), effort)
    if refused is not None and not found:
        raise refused
    return min(found if found and signs else [*found, *alone], key=_step_s)


def _one_pipeline(request: PlanRequest, effort: Effort | None) -> Plan:
    """The fleet's best exact pipeline, which is that of all rules that replicas may have."""
    workers = tuple(device.worker for device in request.fleet.devices)
    asked = effort, request.standbys, request.training.n_micro, request.training.blocks, workers
    return request.memory.once(asked, lambda: make_plan(_alone(request), effort))


def _planned(request: PlanRequest, ways: Sequence[Parts], effort: Effort | None) -> list[Plan]:
    """Plans of replicas that are these parts; none where they do not fit."""
    coded = request.training.gradient_exchange
    how = f" with {coded.rule}:{coded.setting}" if coded is not None else ""
    found = []
    for parts in ways:
        at_work(request, f"{len(parts)} replicas{how}")
        with suppress(NotEnoughMemory):
            found.append(_shared_out(request, parts, effort))
    return found


def _check_count(count: int, request: PlanRequest) -> None:
    if count > request.training.blocks:
        raise UsageError(
            f"{count} replicas share out {request.training.blocks} blocks of micro-batches; give at least "
            f"--set blocks={count}"
        )
    if count > len(request.fleet.devices) and request.version <= 1:
        raise NotEnoughMemory(f"{count} replicas on {len(request.fleet.devices)} machines")


# ---------------------------------------------------------------- one way to share out


def _shared_out(request: PlanRequest, parts: Parts, effort: Effort | None) -> Plan:
    """Plan each part's pipeline, with shares by the speed that is predicted of it."""
    blocks = block_ranges(request.training.n_micro, request.training.blocks)
    shares = shares_of(len(blocks), [1.0] * len(parts))
    tried: dict[tuple[int, ...], Plan] = {}
    known: Known = {}
    for _ in range(TUNED.share_rounds):
        if shares in tried:
            break
        ends = [blocks[stop - 1].stop for stop in accumulate(shares)]
        tried[shares] = plan = _joined(request, parts, ends, effort, known=known)
        speeds = [len(_blocks(plan, number)) / pipeline_s(plan, number) for number in range(len(parts))]
        shares = shares_of(len(blocks), speeds)
    return min(tried.values(), key=_step_s)


def _blocks(plan: Plan, number: int) -> list[range]:
    start, stop = plan.replicas[number].micros
    return [block for block in block_ranges(plan.n_micro, plan.blocks) if start <= block.start < stop]


def _joined(
    request: PlanRequest,
    parts: Parts,
    ends: Sequence[int],
    effort: Effort | None,
    partitioners: Sequence[str] = (),
    known: Known | None = None,
) -> Plan:
    """Plan every replica alone, and put them together. ``ends``: of their micro-batches. ``known``: what was
    planned of the same request before, which is added to."""
    known = {} if known is None else known
    cuts = partitioners or [request.partitioner] * len(parts)
    spans = list(pairwise((0, *ends)))

    plans = []
    for part, span, cut in zip(parts, spans, cuts, strict=True):
        own = _part(request, part, span, cut)
        key = part, own.training.n_micro, own.training.blocks, cut
        if key not in known:
            known[key] = make_plan(own, effort, part=True)
        plans.append(known[key])
    return _together(request, plans, spans)


def _part(request: PlanRequest, workers: Sequence[str], span: tuple[int, int], cut: str) -> PlanRequest:
    """The request of one replica; its training still says that there are others."""
    training, (start, stop) = request.training, span
    own = [b for b in block_ranges(training.n_micro, training.blocks) if start <= b.start < stop]
    share = replace(training, n_micro=stop - start, blocks=len(own))
    return replace(request, fleet=request.fleet.subset(workers), training=share, partitioner=cut, beyond=0)


def _together(request: PlanRequest, plans: Sequence[Plan], spans: Sequence[tuple[int, int]]) -> Plan:
    schedule, replicas = as_replicas(plans, spans)
    workers = [stage.worker for replica in replicas for stage in replica.stages]
    fleet = request.fleet
    ranks = [fleet.index[worker] for worker in workers]
    flat = replace(request.training.gradient_exchange or Exchange(), rates=tuple(rank_rates(fleet, ranks)))
    plan = replace(
        plans[0],
        partitioner=request.partitioner,
        schedule=schedule,
        n_micro=request.training.n_micro,
        blocks=request.training.blocks,
        replicas=replicas,
        exchange=flat,
        left_out=tuple(
            (device.worker, "the replicas are faster without it")
            for device in fleet.devices
            if device.worker not in workers
        ),
    )
    ways = [flat]
    site_of = {device: number for number, site in enumerate(groups(fleet.bandwidth_bps)) for device in site}
    if len(set(site_of.values())) > 1 and not flat.keeps:  # a rule's totals are each of one owner
        ways.append(replace(flat, inner=Exchange(), sites=tuple(site_of[rank] for rank in ranks)))
    found = [replace(plan, exchange=way) for way in ways]
    flatly, *within = (replace(p, prediction=_predicted(request, p, plans)) for p in found)
    plan = next((p for p in within if _step_s(p) <= TUNED.nearly * _step_s(flatly)), flatly)
    validate(plan, request.dag, request.training)
    return plan


# ---------------------------------------------------------------- what joining costs


def exchanged_bytes(plan: Plan, problem: Problem) -> Floats:
    """Return the bytes [devices, devices] of the gradients that a step's exchange carries."""
    assert plan.exchange is not None  # noqa: S101 - several replicas
    fleet = problem.fleet
    sent = np.zeros((len(fleet.devices),) * 2)
    labels, share_sent = contributions(plan), _sent_share(plan, problem)
    rank_of = {fleet.index[place.worker]: rank for rank, place in enumerate(plan.places)}
    # A gradient of several uses is whole where the first one is, and travels once.
    for n_bytes, holders, *_ in held_by(fleet, plan.replicas, problem.dag, problem.training.optimizer).ranges:
        if exchange_facts(plan.exchange.rule).pattern is Pattern.TREE:
            joined = tree(range(len(holders)), UNITS)
        else:
            joined = joining(plan.exchange, [rank_of[at] for at in holders], labels, UNITS)
        for replica, actions in joined.actions.items():
            for action in actions:
                if isinstance(action, Send):
                    share = joined.segments[action.segment].size / UNITS
                    sent[holders[replica], holders[action.to]] += n_bytes * share * share_sent
    return sent


def _sent_share(plan: Plan, problem: Problem) -> float:
    """Share of the bytes of exact gradients that the plan's rule sends; along a tree, in each message."""
    exchange, count = plan.exchange, len(plan.replicas)
    if exchange is None or not exchange.keeps:
        return 1.0
    optimizer, parameters = problem.training.optimizer, problem.dag.parameters
    shapes = [s.meta.shape for name, s in parameters.items() if is_trained(problem.dag, name, optimizer)]
    facts = exchange_facts(exchange.rule)
    sent = facts.volume(shapes, exchange, count)
    if facts.pattern is Pattern.TREE:
        return sent / tree_hops(count) / (ELEMENT_BYTES * elements_of(shapes))
    return sent / dense_volume(shapes, exchange, count)


def _coding_s(plan: Plan, problem: Problem) -> dict[int, float]:
    """Seconds in which each device codes what it exchanges in a step: its own gradients, parts and totals of
    what it owns, the totals of others."""
    exchange, count = plan.exchange, len(plan.replicas)
    if exchange is None or not exchange.keeps:
        return {}
    found: dict[int, float] = {}
    for n_bytes, holders, *_ in held_by(
        problem.fleet, plan.replicas, problem.dag, problem.training.optimizer
    ).ranges:
        for at in holders:
            device = problem.fleet.devices[at]
            encode, decode = speed_of(device, exchange_facts(exchange.rule).works_as or exchange.codec)
            # Own parts are decoded, too: what others will see of them is added, and the rest is kept.
            encoded, decoded = n_bytes * (1.0 + 1.0 / count), n_bytes * (3.0 - 1.0 / count)
            passes = PASSES * n_bytes / PASS_BPS
            seconds = encoded / encode + decoded / decode + passes
            found[at] = found.get(at, 0.0) + seconds / core_share(device)
    return found


def _exchange_s(request: PlanRequest, sent: Floats, phases: int, coding_s: Mapping[int, float]) -> float:
    """Seconds of an exchange: of the links, or of the busiest end that handles the bytes. ``phases``: of
    messages that wait for each other. ``coding_s`` of each device: gradients are coded before they leave."""
    fleet = request.fleet
    handling = [
        bytes_cpu_s(float(sent[at].sum() + sent[:, at].sum()), float(fleet.effective_bps[at].max()))
        / core_share(device)
        for at, device in enumerate(fleet.devices)
    ]
    return max(exchange_s(fleet, sent, phases), *handling) + max(coding_s.values(), default=0.0)


def _predicted(request: PlanRequest, plan: Plan, plans: Sequence[Plan]) -> Prediction:
    alone = [p.prediction for p in plans if p.prediction is not None]
    if len(alone) != len(plans):
        raise PlanError("a replica without a prediction cannot be joined")
    slowest = max(alone, key=lambda p: p.step_s)
    problem = Problem(request.dag, request.training, request.fleet, divisions=request.divisions)
    sent = exchanged_bytes(plan, problem)
    assert plan.exchange is not None  # noqa: S101 - several replicas
    sites = len(set(plan.exchange.sites))
    facts = exchange_facts(plan.exchange.rule)
    hops = tree_hops(len(plans)) if facts.pattern is Pattern.TREE else 1
    phases = max(PHASES * facts.phases * hops, 2 * (sites - 1))
    joining_s = _exchange_s(request, sent, phases, _coding_s(plan, problem))
    names = [device.worker for device in request.fleet.devices]
    links = tuple(
        LinkPrediction(
            names[a], names[b], round(sent[a, b]), 8.0 * sent[a, b] / request.fleet.effective_bps[a, b]
        )
        for a, b in zip(*np.nonzero(sent), strict=True)
    )
    dominated = joining_s > slowest.step_s
    single_s, single = single_machine(plans)
    megabytes = float(sent.sum(axis=1).max()) / 1e6
    words = (
        f"{len(plans)} replicas exchange gradients{_in_codec(plan)} in {joining_s:.3g} s, {megabytes:.1f} MB "
        "from the busiest" + (f"; within {sites} sites first" if plan.exchange.inner else "")
    )
    outside = "outside: " if any(p.stages[0].inside for p in plans) else ""  # a plan that has insides, too
    return replace(
        slowest,
        single_machine_s=single_s,
        single_machine=single,
        step_s=slowest.step_s + joining_s,
        lower_bound_s=max(p.lower_bound_s for p in alone),
        bottleneck="exchange" if dominated else slowest.bottleneck,
        reason=words if dominated else slowest.reason,
        stages=tuple(stage for p in alone for stage in p.stages),
        links=tuple(link for p in alone for link in p.links) + links,
        notes=tuple(dict.fromkeys((outside + words, *(note for p in alone for note in p.notes)))),
    )


def _in_codec(plan: Plan) -> str:
    if plan.exchange is None or not plan.exchange.keeps:
        return ""
    return f" by {plan.exchange.coding}, another model than one machine's,"


def _step_s(plan: Plan) -> float:
    return plan.prediction.step_s if plan.prediction is not None else float("inf")


def _alone(request: PlanRequest) -> PlanRequest:
    """The request of one exact pipeline, which holds no copies that a rule of peers keeps."""
    return replace(request, training=replace(request.training, replicas="1", exchange=EXACT))


# ---------------------------------------------------------------- given cuts


def devices_named(partitioner: str) -> int:
    """Return how many devices a given cut names, in all replicas; 1 where the planner cuts, or for a form
    that it will refuse."""
    if not partitioner.startswith(GIVEN_CUT):
        return 1
    try:
        return sum(_stages_of(cut) for cut, _ in _given_texts(partitioner))
    except UsageError:
        return 1


def _given_texts(partitioner: str) -> list[tuple[str, str]]:
    """Return the cut of each replica that is given, and the number of its micro-batches, "" where none is."""
    parts = (part.partition(SHARE) for part in partitioner.removeprefix(GIVEN_CUT).split(BETWEEN))
    return [(cut, share) for cut, _, share in parts]


def _stages_of(cut: str) -> int:
    return len(set(given_pieces(cut)[1]))


def _given_parts(request: PlanRequest) -> tuple[Parts, list[int], list[str]]:
    """Workers, ends of the shares and cuts of replicas that are given, on the devices as they joined:
    ``cut:26,65@4/40@2``.

    Each has as many micro-batches as it names, or an equal share of the blocks. UsageError for shares that
    are none, PlanError while there are fewer devices than stages.
    """
    cuts, counts = zip(*_given_texts(request.partitioner), strict=True)
    training = request.training
    if training.local_exchange is not None:  # peers share a step out as they like
        training = replace(training, blocks=training.n_micro)
    if all(counts):
        try:
            ends = list(accumulate(int(count) for count in counts))
        except ValueError:
            raise UsageError(f"{request.partitioner}: give numbers of micro-batches after {SHARE}") from None
    else:
        _check_count(len(cuts), request)
        blocks = block_ranges(training.n_micro, training.blocks)
        ends = [blocks[stop - 1].stop for stop in accumulate(shares_of(len(blocks), [1.0] * len(cuts)))]
    borders = {block.stop for block in block_ranges(training.n_micro, training.blocks)}
    if (
        ends[-1] != training.n_micro
        or any(a >= b for a, b in pairwise((0, *ends)))
        or not borders.issuperset(ends)
    ):
        raise UsageError(
            f"{request.partitioner}: replicas that end at micro-batches {ends}; {training.blocks} blocks end "
            f"at {sorted(borders)}"
        )
    free = [device.worker for device in request.fleet.devices]
    parts = []
    for starts in cuts:
        count = _stages_of(starts)
        parts.append(tuple(free[:count]))
        if len(parts[-1]) < count:
            raise PlanError(
                f"{request.partitioner} makes more stages than the {len(request.fleet.devices)} devices"
            )
        free = free[count:]
    return tuple(parts), ends, [GIVEN_CUT + starts for starts in cuts]
