"""OpDag + Fleet -> Plan: the three partitioners, and the prediction a Plan carries.

``op_fence`` chooses devices, order and cut (``coordinator.planning.search.op_fence``); ``even`` and
``proportional`` take the devices as they joined (``coordinator.planning.baselines``). Whatever made the
cut, the timeline predicts its step and says what bounds it.

With compression, candidates are judged compressed, each with the codecs and ratios that its own
links get, while orders and cuts are ranked as if every link shrank alike. The best dense
candidates are judged compressed too, so nothing is lost to that guess; under ``auto`` the best
dense plan as it is stays in the race, so the choice is never predicted slower than ``off``.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.compression import AUTO, OFF, Compression
from atoll.errors import NotEnoughMemory, NoWorkers, PlanError, UsageError
from atoll.job import EXACTLY, Recompute
from atoll.microbatch import ScheduleName
from atoll.plan import (
    LinkPrediction,
    LinkSpec,
    Piece,
    Plan,
    Prediction,
    StagePrediction,
    StageSpec,
    one_replica,
    stage_of,
    validate,
)
from atoll.program import stage_programs
from coordinator.planning import TUNED
from coordinator.planning.baselines import GIVEN_CUT, even, given_cut, proportional
from coordinator.planning.check_cost import check_cost
from coordinator.planning.codecs.auto_codecs import relabelled, settled, without_codecs
from coordinator.planning.codecs.ratios import check_compression
from coordinator.planning.costs.lower_bound import lower_bound
from coordinator.planning.costs.memory import Together
from coordinator.planning.costs.snapshots import sent_bytes
from coordinator.planning.costs.timeline import expected_step_s, step_bytes, step_seconds
from coordinator.planning.costs.traffic import Traffic
from coordinator.planning.costs.workload import Wire
from coordinator.planning.evaluation_cut import evaluation_intervals
from coordinator.planning.inside.words import inside_words, outside_words
from coordinator.planning.problem import Candidate, Problem, Scored, kept_as, memory_on, short_of_memory
from coordinator.planning.reasons.bottleneck import bottleneck
from coordinator.planning.reasons.left_out import left_out, passed_over, summarised
from coordinator.planning.reasons.shortage import NoCutFits
from coordinator.planning.search.keepings import FURTHER, eased, forms, may_fit, mildest_first, why_kept
from coordinator.planning.search.op_fence import Effort, improve, search
from coordinator.planning.search.preselect import Preselection
from coordinator.planning.search.sites import divided, settled_kinds, suited
from coordinator.planning.standby_worth import Ranked, best_expected, costs_of
from coordinator.planning.twins import Found, Tell, Twins

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from atoll.job import TrainingSpec
    from atoll.opdag import OpDag
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.costs.timeline import Timeline
    from coordinator.planning.costs.workload import Workload
    from coordinator.planning.inside.costs import Divisions

ONE_PIECE = "one_piece"  # op_fence, but no device has several pieces
SEARCHED = ("op_fence", ONE_PIECE)
PARTITIONERS = (*SEARCHED, "proportional", "even")
SCHEDULES = ("auto", *ScheduleName)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Input of a plan: a job's graphs, and the fleet that may run them."""

    job: str
    version: int
    dag: OpDag
    eval_dag: OpDag | None  # None: nothing is evaluated
    training: TrainingSpec
    fleet: Fleet
    partitioner: str = "op_fence"
    schedule: str = "auto"
    dag_hash: str = ""
    eval_dag_hash: str = ""
    wire: Wire | None = None  # None: the codecs that ``training.compress`` asks for
    beyond: int = 0  # workers of the pool that are not in ``fleet``, as others were chosen
    standbys: int | None = None  # 0: the fastest plan, whatever losses cost
    pinned: str = ""  # worker of the fleet that has the job's data; "": the coordinator serves them
    twins: Twins | None = field(default=None, compare=False, repr=False)  # None: nothing is remembered

    @property
    def memory(self) -> Twins:
        """What is remembered of the parts of this request, or a memory that nobody looks into again."""
        return self.twins or Twins()

    @property
    def divisions(self) -> Divisions:
        """Inside plans of the graph that are remembered."""
        return self.memory.divisions


def _found(twins: Twins, request: PlanRequest, effort: Effort) -> Found:
    """Return what is found for a part of the fleet, or was found before. Raises NotEnoughMemory."""
    known = twins.found.setdefault(_traits(request), [])
    workers = tuple(device.worker for device in request.fleet.devices)
    for other, at_effort, found in known:
        if effort == at_effort and _asks_alike(request, other) and request.fleet.alike(other.fleet):
            if isinstance(found, NotEnoughMemory):
                raise found
            named = found[2] or found[0].keepings or found[0].kinds  # these are by name
            if not named or workers == tuple(device.worker for device in other.fleet.devices):
                return _renamed(found, other.fleet, request.fleet)
    cuts = twins.cuts.setdefault(workers, []) if twins.brief and request.partitioner in SEARCHED else []
    recut = [each for cut in cuts if (each := _recut(cut, request, effort)) is not None]
    if recut:
        found = min(recut, key=lambda each: each[1].step_s)
    else:
        twins.searches += 1
        twins.tell(f"planning {twins.at}: pipeline {twins.searches}, of {len(workers)} machines")
        try:
            found, _ = _searched(request, effort)
        except NotEnoughMemory as error:
            known.append((request, effort, error))
            raise
        if not found[2] and not found[0].keepings and not found[0].kinds:
            cuts.append(found)
    known.append((request, effort, found))
    return found


def _recut(found: Found, request: PlanRequest, effort: Effort) -> Found | None:
    """Return a cut of the same machines, found for another share or rule, as this request has it; None where
    memory has a say in it."""
    before, scored, _ = found
    workers = [device.worker for device in before.fleet.devices]
    problem = _problem(replace(request, fleet=request.fleet.subset(workers)))
    again = problem.score(scored.candidate) if before.keeping == problem.keeping else None
    if again is None or short_of_memory(problem, again):
        return None
    few = replace(effort, moves=TUNED.cut_moves)
    better = improve(problem, again, problem.coarse(effort.coarse_positions), few)
    return problem, _finished(problem, better, effort), ()


def remembering(request: PlanRequest, tell: Tell = lambda words: None) -> PlanRequest:
    """Return the request with a memory of what is found for its parts; ``tell`` hears what is planned."""
    if request.twins is not None:
        return request
    return replace(request, twins=Twins(tell, len(request.fleet.devices) > TUNED.every_count))


def at_work(request: PlanRequest, words: str) -> None:
    """Say what is planned from now on, to whoever listens."""
    request.memory.at = words
    request.memory.tell(f"planning {words}")


def _traits(request: PlanRequest) -> Hashable:
    """What parts that are alike have in common, and few others."""
    training = request.training
    memory = tuple(device.memory_limit_bytes for device in request.fleet.devices)
    return training.n_micro, training.blocks, training.exchange, memory


def _asks_alike(one: PlanRequest, other: PlanRequest) -> bool:
    """Return whether two parts differ in their fleets and in what has no say in how they are cut."""
    return (
        one.dag is other.dag
        and (one.training, one.partitioner, one.schedule, one.wire, one.pinned)
        == (other.training, other.partitioner, other.schedule, other.wire, other.pinned)
        and not one.pinned
    )


def _renamed(found: Found, before: Fleet, fleet: Fleet) -> Found:
    """Return what was found for a fleet as it is for one that is alike."""
    problem, scored, why = found
    workers = [fleet.devices[before.index[device.worker]].worker for device in problem.fleet.devices]
    return problem.on(fleet.subset(workers)), scored, why


def make_plan(request: PlanRequest, effort: Effort | None = None, *, part: bool = False) -> Plan:
    """Return the best Plan that the request's partitioner finds, with its Prediction; ``part``: of a fleet,
    as a replica or peer, whose plan does not say why who is left out.

    Raises NoWorkers, NotEnoughMemory (by how much and where), UsageError for unknown names.
    """
    effort = effort or Effort()
    if request.partitioner == ONE_PIECE:
        effort = replace(effort, rings=0)
    others: tuple[tuple[str, str], ...] = ()
    if part:
        problem, best, why = _found(request.memory, request, effort)
    else:
        at_work(request, f"one pipeline of {len(request.fleet.devices)} machines")
        (problem, best, why), others = _searched(request, effort)
    ranked = _ranked(problem, best, request, effort)
    best = ranked.scored if ranked is not None else best
    plan = _bare_plan(problem, best, request)
    notes = [*why]
    if problem.schedule is ScheduleName.ZERO_BUBBLE and best.schedule is not problem.schedule:
        notes.append(f"{best.schedule} instead of {problem.schedule}: no stage can defer weight gradients")
    if request.eval_dag is not None:
        plan, note = _with_evaluation(plan, request.dag, request.eval_dag, request.training)
        notes += [note] if note else []
    notes += _mixed_classes(problem, best) + inside_words(problem, best)
    notes += [] if part else outside_words(problem, best)
    reasons: tuple[tuple[str, str], ...] = ()
    if not part:
        reasons = left_out(problem, best) if request.partitioner in SEARCHED else _unused(problem, best)
    if ranked is not None and ranked.standby is not None:
        own, worth = ranked.standby.worker, "it is worth more as a standby"
        reasons = tuple((worker, worth if worker == own else reason) for worker, reason in reasons)
    reasons = summarised([*reasons, *others], request.beyond, len(request.fleet.devices))
    prediction = predict(problem, best, tuple(notes))
    checks = check_cost(request.training, prediction)
    after = [checks.words] if checks is not None else []
    after.append(_storing(problem, best))
    if ranked is not None:
        after += ranked.notes
        prediction = replace(prediction, outlook=ranked.outlook)
    prediction = replace(prediction, notes=(*prediction.notes, *after))
    plan = replace(plan, left_out=reasons, prediction=prediction)
    validate(plan, request.dag, request.training)
    return plan


def _searched(request: PlanRequest, effort: Effort) -> tuple[Found, tuple[tuple[str, str], ...]]:
    """What ``_within_memory`` finds, and why which workers were not looked at.

    ``op_fence`` searches a large fleet's likeliest devices, twice as many while memory does not suffice; and,
    since it is thorough with few devices, the likeliest of these again.
    """
    fleet, most = request.fleet, effort.candidates
    if request.partitioner not in SEARCHED or len(fleet.devices) <= effort.few:
        return _within_memory(_problem(request), request.partitioner, effort), ()
    one = _problem(replace(request, fleet=fleet.subset([request.pinned or fleet.devices[0].worker])))
    preselection = Preselection(fleet, one)
    found: list[Found] = []
    while not found:
        chosen = preselection.choose(most)
        most = 2 * len(chosen.workers)
        last = len(chosen.workers) == len(fleet.devices)
        # The last word on memory is the full search's own.
        problem = one.on(fleet.subset(chosen.workers), () if last else chosen.orders)
        try:
            found.append(_within_memory(problem, request.partitioner, effort))
        except NotEnoughMemory:
            if last:
                raise
    few = preselection.choose(effort.few)
    if len(few.workers) <= effort.few:
        problem = one.on(fleet.subset(few.workers), few.orders)
        with suppress(NotEnoughMemory):
            found.append(_within_memory(problem, request.partitioner, effort))
    best, scored, why = min(found, key=lambda f: f[1].step_s)
    tried = {*chosen.workers, *few.workers} if len(found) > 1 else set(chosen.workers)
    whole = settled_kinds(best).on(fleet.subset([d.worker for d in fleet.devices if d.worker in tried]))
    place = [whole.fleet.index[device.worker] for device in best.fleet.devices]
    devices = tuple(place[at] for at in scored.candidate.devices)
    scored = replace(scored, candidate=replace(scored.candidate, devices=devices))
    return (whole, scored, why), passed_over(preselection, whole.fleet)


def _ranked(problem: Problem, fastest: Scored, request: PlanRequest, effort: Effort) -> Ranked | None:
    """``fastest``, or the plan that is expected to end first with what losses cost; None where those are not
    this plan's alone: of one of several replicas, or among workers that were chosen from more."""
    if request.beyond or request.training.replica_count != 1 or request.training.local_exchange is not None:
        return None
    beside = [device for device in request.fleet.devices if device.worker not in problem.fleet.index]
    if request.partitioner not in SEARCHED or request.standbys == 0:
        return Ranked(fastest, costs_of(problem, fastest, beside))
    return best_expected(problem, fastest, beside, effort, lambda scored: _finished(problem, scored, effort))


def _finished(problem: Problem, scored: Scored, effort: Effort) -> Scored:
    """The same with its links' codecs and the order of its work settled."""
    if problem.compression.mode != AUTO:
        return problem.deferring(scored)
    judgements = effort.affordable(TUNED.judgements, problem, scored.candidate)
    coded, dense = problem.deferring(settled(problem, scored, judgements)), _dense(problem)
    plain = dense.score(scored.candidate)
    return coded if plain is None else _worth_coding(coded, dense.deferring(plain), coded)


def _mixed_classes(problem: Problem, best: Scored) -> list[str]:
    """Warn where the plan's machines do not all compute the same bits."""
    devices = (problem.fleet.devices[at] for at in best.candidate.devices)
    classes = sorted({str(device.device_class) for device in devices if device.device_class is not None})
    if len(classes) < 2:
        return []
    return [
        f"{len(classes)} classes of devices ({'; '.join(classes)}): a run on other machines agrees within "
        "rounding, not bit for bit"
    ]


def _within_memory(given: Problem, partitioner: str, effort: Effort) -> Found:
    """What ``_kept_within`` finds, with sites that divide as suits an equal part of the model or, where that
    is another kind, all of it; then as suits the stage that they have."""
    found: list[Found] = []
    problems = divided(given)
    for problem in problems:
        try:
            found.append(_kept_within(problem, partitioner, effort))
        except NotEnoughMemory:
            if problem is problems[-1] and not found:
                raise
    problem, best, why = min(found, key=lambda each: each[1].step_s)
    return (*suited(problem, best), why)


def _kept_within(given: Problem, partitioner: str, effort: Effort) -> Found:
    """The problem with what stages keep in which form decided, its best candidate, and why where that was a
    choice.

    All is kept as it is where that fits and memory does not keep a stage from more micro-batches in flight.
    Else the forms that the job leaves open are tried, mildest first; whole forwards that are run again where
    nothing fits that keeps all. Each stage of the fastest plan has the mildest form that it has room for.
    """
    open_forms = forms(given.training, cheap=_has_cheap_results(given))
    plain: Scored | None = None
    try:
        plain = _best(given, partitioner, effort)
    except NotEnoughMemory:
        if len(open_forms) == 1:
            raise
    if plain is not None and (len(open_forms) == 1 or not short_of_memory(given, plain)):
        return given, plain, ()
    if plain is not None and given.training.recompute is Recompute.AUTO:
        open_forms = [each for each in open_forms if each.recompute is not Recompute.FULL]
    ordered = mildest_first(given, open_forms)
    tried = _see_that_one_fits(ordered, partitioner, effort) if plain is None else []
    problem, best = _among(ordered, partitioner, effort, tried)
    if plain is not None and best.step_s > TUNED.repeating_gains * plain.step_s:
        return given, plain, ()
    problem, best = eased(problem, best, [each.keeping for each in ordered])
    return problem, best, tuple(why_kept(problem, best, None if plain is None else plain.step_s))


_Tried = list[tuple[Problem, Scored | None]]  # forms, each with its fastest plan; None: it does not fit


def _see_that_one_fits(ordered: Sequence[Problem], partitioner: str, effort: Effort) -> _Tried:
    """Return what is found for the form that takes the least, where no cut of it is found also for those
    right behind it: a search may miss the only cuts that fit. Raises its NotEnoughMemory."""
    least, *others = sorted(ordered, key=lambda each: each.memory.bytes(0, each.n_ops, 1))
    try:
        return [(least, _best(least, partitioner, effort))]
    except NotEnoughMemory:
        tried: _Tried = [(least, None)]
        for other in others[:FURTHER]:
            with suppress(NotEnoughMemory):
                return [*tried, (other, _best(other, partitioner, effort))]
            tried.append((other, None))
        raise


def _among(
    ordered: Sequence[Problem], partitioner: str, effort: Effort, tried: _Tried
) -> tuple[Problem, Scored]:
    """The fastest plan of the mildest form that fits and those right behind it; one fits. ``tried``: what is
    known of some."""
    found: list[tuple[Problem, Scored]] = []
    for problem in ordered:
        if len(found) > FURTHER:
            break
        known = [scored for other, scored in tried if other is problem]
        if known and known[0] is not None:
            found.append((problem, known[0]))
        elif not known and may_fit(problem):
            with suppress(NotEnoughMemory):
                found.append((problem, _best(problem, partitioner, effort)))
    return min(found, key=lambda each: each[1].step_s)


def _has_cheap_results(problem: Problem) -> bool:
    return any(node.bytes_repeatable for node in problem.dag.ops)


def _best(problem: Problem, partitioner: str, effort: Effort) -> Scored:
    """The fastest candidate, its links' codecs and the order of its work settled."""
    found = plan_candidates(problem, partitioner, effort)
    if problem.compression.mode == OFF:
        return problem.deferring(found[0])
    dense = _dense(problem)
    plain = plan_candidates(dense, partitioner, effort)
    also = (problem.score(s.candidate) for s in plain[: TUNED.finalists])
    ranked = sorted([*found, *(s for s in also if s is not None)], key=lambda s: s.step_s)
    if problem.compression.mode != AUTO:
        return problem.deferring(ranked[0])
    finalists = dict.fromkeys((*(s.candidate for s in ranked[: TUNED.finalists]), plain[0].candidate))
    judged = []
    for candidate in finalists:
        judgements = effort.affordable(TUNED.judgements, problem, candidate)
        scored = problem.score(candidate) or plain[0]
        judged.append(problem.deferring(settled(problem, scored, judgements)))
    best = min(judged, key=lambda s: s.step_s)
    stays = next(s for s in judged if s.candidate == plain[0].candidate)
    return _worth_coding(best, dense.deferring(plain[0]), stays)


def _worth_coding(coded: Scored, uncoded: Scored, stays: Scored) -> Scored:
    """``coded``, or ``uncoded`` where that is about as fast; ``stays``: its candidate, coded."""
    if coded.step_s <= TUNED.compressed_is_worth * uncoded.step_s:
        return coded
    why = f"compressing gains less than 1 % of a step of {uncoded.step_s:.3g} s"
    specs = stays.specs if without_codecs(stays.specs) else relabelled(_plain_specs(stays.specs), why)
    return replace(uncoded, specs=specs)


def _plain_specs(specs: Sequence[LinkSpec]) -> tuple[LinkSpec, ...]:
    return tuple(LinkSpec(spec.source, spec.target) for spec in specs)


def plan_candidates(problem: Problem, partitioner: str, effort: Effort | None = None) -> list[Scored]:
    """Judged candidates of a partitioner, best first, at least one."""
    known_partitioner(partitioner)
    given = partitioner.startswith(GIVEN_CUT)
    if problem.pinned and not given and partitioner not in SEARCHED:
        raise UsageError(
            f"{partitioner} gives a device one interval of ops; pinned data need one at both ends"
        )
    if partitioner in SEARCHED:
        found = search(problem, effort)
    else:
        if given:
            candidate: Candidate | None = given_cut(problem, partitioner.removeprefix(GIVEN_CUT))
        else:
            candidate = even(problem) if partitioner == "even" else proportional(problem)
        scored = problem.score(candidate) if candidate is not None else None
        found = [scored] if scored is not None else []
    if not found:
        raise NoCutFits(problem, partitioner)
    return found


def known_partitioner(name: str) -> None:
    """UsageError unless ``name`` is a partitioner or a given cut."""
    if name not in PARTITIONERS and not name.startswith(GIVEN_CUT):
        raise UsageError(
            f"partitioner {name[:60]!r}; choose {', '.join(PARTITIONERS)}, or give the cut: {GIVEN_CUT}26,65"
        )


def predict(problem: Problem, scored: Scored, notes: tuple[str, ...] = ()) -> Prediction:
    """Return the timeline's prediction for a scored candidate."""
    work, timeline = problem.timeline(scored, keep_spans=False)
    bound = lower_bound(_needed(problem, scored, work), problem.fleet.payload_share)
    dense = problem.workload(scored.candidate, scored.depths)
    names = [problem.fleet.devices[s.device].worker for s in work.stages]
    where, why = bottleneck(problem, work, timeline, problem.caps(scored.candidate))
    single_s, single = _single_machine(problem)
    if problem.measured_share < 0.5:
        notes = (*notes, "op times are mostly estimated from FLOPs and bytes, not measured")
    return Prediction(
        step_s=max(bound.step_s, expected_step_s(work, timeline.step_s)),
        lower_bound_s=bound.step_s,
        bottleneck=where,
        reason=why,
        stages=_stage_predictions(problem, scored, work, timeline),
        links=_link_predictions(timeline, dense, names),
        commit_s=timeline.commit_s,
        single_machine_s=single_s,
        single_machine=single,
        notes=(
            *notes,
            *_compression_note(problem.compression, scored, dense),
            *_single_machine_note(problem, scored, single_s, single),
        ),
    )


def _storing(problem: Problem, scored: Scored) -> str:
    """Return what each checkpoint sends, in words."""
    candidate, bounds = scored.candidate, scored.candidate.bounds(problem.n_ops)
    stages = [[bounds[at] for at in those] for those in candidate.together]
    ways = (problem.fleet.devices[at].coordinator.bandwidth_bps for at in candidate.devices)
    return sent_bytes(problem.dag, problem.training, stages, min(ways) / 8).words


def _link_predictions(
    timeline: Timeline, dense: Workload, names: Sequence[str]
) -> tuple[LinkPrediction, ...]:
    """What each worker sends each other, of all pieces; ``names`` by piece."""
    found: dict[tuple[str, str], LinkPrediction] = {}
    for u in timeline.links:
        pair = (names[u.source], names[u.target])
        before = found.get(pair, LinkPrediction(*pair, 0, 0.0))
        found[pair] = LinkPrediction(
            *pair,
            before.bytes_per_step + u.n_bytes,
            before.busy_s + u.busy_s,
            before.dense_bytes_per_step + step_bytes(dense, u.source, u.target)[0],
            before.under_way_s + u.under_way_s,
        )
    return tuple(found.values())


def _needed(problem: Problem, scored: Scored, work: Workload) -> Workload:
    """The work that the step cannot do without: nothing twice, by hosts that do nothing else."""
    if problem.keeping == EXACTLY and not problem.keepings:
        return problem.undisturbed(work)
    once = kept_as(problem, EXACTLY)
    return once.undisturbed(once.workload(scored.candidate, scored.depths, scored.specs))


def _problem(request: PlanRequest) -> Problem:
    training, schedule = request.training, request.schedule
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule {schedule!r}; choose {', '.join(SCHEDULES)}")
    if not request.fleet.devices:
        raise NoWorkers("no worker has joined: 0 in the pool; start one with `atoll-worker join HOST:PORT`")
    if not request.dag.ops:
        raise PlanError("the model has no ops: nothing to plan")
    if request.pinned and request.pinned not in request.fleet.index:
        raise PlanError(f"worker {request.pinned} holds the job's data, but is absent or busy")
    check_compression(training.compression)
    wanted = None if schedule == "auto" else ScheduleName(schedule)
    wire = request.wire or Wire()
    return Problem(
        request.dag,
        training,
        request.fleet,
        wanted,
        wire,
        training.compression,
        training.keeping.decided,
        pinned=request.pinned,
        divisions=request.divisions,
    )


def _stage(problem: Problem, device: int, pieces: list[Piece]) -> StageSpec:
    inside = problem.inside[device]
    placed = problem.fleet.devices[device]
    found = replace(stage_of(placed.worker, pieces), keeping=problem.kept_by(placed))
    return found if inside is None else replace(found, inside=inside.kind)


def _bare_plan(problem: Problem, best: Scored, request: PlanRequest) -> Plan:
    candidate = best.candidate
    pieces = [
        Piece(a, b, 0, 0, *depth)
        for (a, b), depth in zip(candidate.bounds(problem.n_ops), best.depths, strict=True)
    ]
    stages = tuple(
        _stage(problem, candidate.devices[those[0]], [pieces[at] for at in those])
        for those in candidate.together
    )
    work = problem.workload(candidate, best.depths)
    specs = {(spec.source, spec.target): spec for spec in best.specs}
    links = tuple(specs.get(pair, LinkSpec(*pair)) for pair in work.routes)
    return Plan(
        request.job,
        request.version,
        request.dag_hash,
        request.eval_dag_hash,
        request.partitioner,
        best.schedule,
        problem.n_micro,
        one_replica(problem.n_micro, stages, links),
        blocks=request.training.blocks,
    )


def _with_evaluation(plan: Plan, dag: OpDag, eval_dag: OpDag, training: TrainingSpec) -> tuple[Plan, str]:
    """The plan with evaluation intervals; without them and with a note where none are possible."""
    live = Traffic(eval_dag, training.optimizer).live_bytes
    (replica,) = plan.replicas
    found = evaluation_intervals(dag, replica.starts, [one.stage for one in replica.pieces], eval_dag, live)
    if found is None:
        note = (
            "no evaluation: the evaluation graph uses parameters in an order that this cut cannot "
            "follow; evaluate the exported weights instead"
        )
        return plan, note
    intervals: dict[int, list[Piece]] = {}
    for one, (a, b) in zip(replica.pieces, found, strict=True):
        intervals.setdefault(one.stage, []).append(replace(one.piece, eval_start=a, eval_stop=b))
    stages = tuple(stage.with_pieces(intervals[at]) for at, stage in enumerate(plan.stages))
    workers = replica.workers
    pairs = ((s, t) for s, t in _eval_pairs(eval_dag, found) if workers[s] != workers[t])
    links = {pair: LinkSpec(*pair) for pair in pairs}
    links |= {(link.source, link.target): link for link in plan.links}
    ordered = tuple(links[pair] for pair in sorted(links))
    return replace(plan, replicas=one_replica(plan.n_micro, stages, ordered)), ""


def _eval_pairs(eval_dag: OpDag, intervals: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Piece pairs that send in evaluation (an interval may be empty)."""
    programs = stage_programs(eval_dag, [a for a, _ in intervals])
    return {(p.stage, target) for p in programs for value in p.produced for target in value.targets}


def _stage_predictions(
    problem: Problem, scored: Scored, work: Workload, timeline: Timeline
) -> tuple[StagePrediction, ...]:
    found = []
    bounds = scored.candidate.bounds(problem.n_ops)
    for those in scored.candidate.together:
        stages = [work.stages[at] for at in those]
        device = problem.fleet.devices[stages[0].device]
        held = Together(memory_on(problem, stages[0].device)[0], [bounds[at] for at in those])
        once, tied = held.gradients()
        each = held.terms([problem.in_flight(scored.depths[at]) for at in those])
        several = device.processes if problem.inside[stages[0].device] is not None else 1
        of_model = {name: several * n_bytes for name, n_bytes in each.items()}
        heap = device.heap_share * sum(of_model.values())
        beside = ((name, several * n_bytes) for name, n_bytes in device.beside)
        terms = (*of_model.items(), ("heap", heap), *beside)
        compute_s = sum(timeline.compute_s[at] for at in those)
        codec_s = problem.n_micro * sum(stage.codec_s for stage in stages)
        found.append(
            StagePrediction(
                worker=device.worker,
                # Without its codecs' seconds: compared with what the stage's ops are measured to take.
                compute_s=compute_s - codec_s,
                busy_share=compute_s / timeline.step_s if timeline.step_s else 0.0,
                memory_bytes=round(device.memory_scale * sum(n_bytes for _, n_bytes in terms)),
                memory_limit_bytes=device.memory_limit_bytes,
                codec_s=codec_s,
                handling_s=sum(
                    2 * problem.n_micro * (stage.action_s + stage.bytes_s) - stage.bytes_s for stage in stages
                ),
                gradient_bytes=round(once),
                tied_gradient_bytes=round(tied),
                memory_scale=device.memory_scale,
                memory_terms=tuple((name, round(n_bytes)) for name, n_bytes in terms),
            )
        )
    return tuple(found)


def _single_machine(problem: Problem) -> tuple[float, str]:
    """(step seconds, worker) of the fastest member alone that may be, its memory aside."""
    fastest = problem.owner if problem.pinned else int(problem.compute[:, -1].argmin())
    device = problem.fleet.devices[fastest]
    whole = _unlimited(problem)
    alone = whole.score(Candidate((fastest,), (0,)))
    assert alone is not None  # noqa: S101  without limits everything fits
    return alone.step_s, device.worker


def _unlimited(problem: Problem) -> Problem:
    """The same problem with unlimited memory."""
    free = copy.copy(problem)
    free.limits = problem.limits + float("inf")
    free._scores = {}
    return free


def _dense(problem: Problem) -> Problem:
    """The same problem without compression."""
    plain = copy.copy(problem)
    plain.compression = Compression(OFF)
    plain._scores = {}
    return plain


def _compression_note(wanted: Compression, scored: Scored, dense: Workload) -> tuple[str, ...]:
    """Return the gain of compression on this very cut, as a note."""
    if without_codecs(scored.specs):
        return ()
    step_s = step_seconds(dense)
    ratio = step_s / scored.step_s
    gain = f"{ratio:.2f}x faster than" if ratio >= 1 else f"{1 / ratio:.2f}x slower than"
    return (f"--compress {wanted}: {gain} the same stages dense, {step_s:.3g} s a step",)


def _single_machine_note(problem: Problem, scored: Scored, single_s: float, single: str) -> tuple[str, ...]:
    if len(scored.candidate.devices) == 1 or single_s >= scored.step_s:
        return ()
    ratio = scored.step_s / single_s
    device = problem.fleet.devices[problem.fleet.index[single]]
    need = device.memory_scale * (
        (1.0 + device.heap_share) * problem.memory.bytes(0, problem.n_ops, 1) + device.beside_bytes
    )
    return (
        f"this model would train {ratio:.1f}x faster on {device.label} alone if it had the memory: "
        f"{need / 2**20:.0f} MiB are needed, its limit is {device.memory_limit_bytes / 2**20:.0f}",
    )


def _unused(problem: Problem, best: Scored) -> tuple[tuple[str, str], ...]:
    used = set(best.candidate.devices)
    return tuple(
        (device.worker, "the model has fewer layers than the fleet has devices")
        for i, device in enumerate(problem.fleet.devices)
        if i not in used
    )
