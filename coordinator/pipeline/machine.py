"""A job's machine: queued -> profiling -> planning -> loading -> training -> ... -> finished.

Pure: ``step(state, event, now_s)`` returns the new state and what is to be done. A step is
committed by torchft's rule (papers/decentralized.md 8.7): every stage has its gradients ready,
then one commit goes to all; before that any failure leaves the step undone everywhere. Every
message carries (job, plan version, step); what does not match is dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from atoll.job import CHECKPOINT_EVERY_S
from atoll.step_loss import StepLoss
from atoll.transitions import Transitions, first
from coordinator.messages import peer_tensors
from coordinator.messages.events import EvalReady, Loaded, StageFailed, StateStored, StepReady
from coordinator.messages.facts import (
    Checkpoint,
    CheckpointStored,
    Evaluated,
    JobEnded,
    PlanAdopted,
)
from coordinator.messages.instructions import StepCommit, StepDiscard, StepStart
from coordinator.messages.jobs import (
    ENDED,
    MAX_FAILURES,
    PREPARING,
    RECENT,
    RUNNING,
    STEPPING,
    WAITING,
    Broken,
    Cancelled,
    Cause,
    Dropped,
    Event,
    Exclude,
    FromRank,
    JobState,
    LogsShort,
    LogsWanted,
    Phase,
    Picked,
    Placed,
    PlanChange,
    Planned,
    Point,
    Profiled,
    Record,
    Redo,
    Relinked,
    Resumed,
    Ring,
    Running,
    Seating,
    Todo,
    ToRanks,
    Torn,
    Waits,
)
from coordinator.pipeline import commits, history, joined, periods, snapshots
from coordinator.pipeline.changes.carried_over import carried_over, fact_of
from coordinator.pipeline.health import disputes
from coordinator.pipeline.health.doubt import diverged, doubted, words
from coordinator.pipeline.history import staleness
from coordinator.pipeline.tuning import relink
from coordinator.planning.costs.losses import STORING_SHARE

SHORT_SHARE = 5.0  # times what storing takes, between checkpoints where send logs are short: some always are
MOST_LOSSES = 12  # and of stages that failed, without a committed step in between
ROLLED_BACK = "rolled_back"  # metric: steps after its own, up to its value, are done again
TWICE = 2  # a worker has not stored its part: the next time is not waited for
NOBODY: Mapping[str, int] = {}

Outcome = tuple[JobState, list[Todo]]
_ALIVE = frozenset(Phase) - ENDED
TRANSITIONS: Transitions[JobState, [float], Outcome] = Transitions(Phase, Event)
TRANSITIONS.include(snapshots.TRANSITIONS)


def step(state: JobState, event: Event, now_s: float) -> Outcome:
    """The job after ``event``, and what is to be done.

    A stage's message that the phase does not know is dropped with its reason; an event of our
    own that it does not know raises LookupError.
    """
    kind = type(event.message) if isinstance(event, FromRank) else type(event)
    transition = TRANSITIONS.get((state.phase, kind))
    if isinstance(event, FromRank):
        stale = staleness(state, event)
        if stale:
            return state, [Dropped(stale)]
        if transition is None:
            return state, [Dropped(f"{kind.__name__} of rank {event.rank} while {state.phase.value}")]
    if transition is None:
        raise LookupError(f"{state.job}: {kind.__name__} while {state.phase.value} ({state.reason})")
    return transition(state, event, now_s)


# ---------------------------------------------------------------- preparing


@TRANSITIONS.on(*WAITING)
def _pick(state: JobState, event: Picked, now_s: float) -> Outcome:
    return replace(state, phase=Phase.PROFILING, reason=event.reason), []


@TRANSITIONS.on(*WAITING, *PREPARING)
def _wait(state: JobState, event: Waits, now_s: float) -> Outcome:
    phase = state.phase if state.phase in WAITING else _waiting_phase(state)
    return replace(state, phase=phase, reason=event.reason), []


def _waiting_phase(state: JobState) -> Phase:
    return Phase.PAUSED if state.version else Phase.QUEUED


@TRANSITIONS.on(Phase.PROFILING)
def _profiled(state: JobState, event: Profiled, now_s: float) -> Outcome:
    return replace(state, phase=Phase.PLANNING, reason="computing a plan"), []


@TRANSITIONS.on(Phase.PLANNING)
def _adopt(state: JobState, event: Planned, now_s: float) -> Outcome:
    """A new plan version fences off everything that an older one still sends."""
    plan = event.plan
    if plan.version <= state.version:
        raise LookupError(f"{state.job}: plan {plan.version} after plan {state.version}")
    first = state.checkpoint.step
    adopted = replace(
        state,
        phase=Phase.LOADING,
        reason=f"{len(plan.places)} stages are loading",
        version=plan.version,
        plan=plan,
        step=first,
        ring=Ring(),
        run=Running(plan.version, first, lineage=((plan.version, first),)),
        storing=replace(state.storing, parts={}, owed=False, part_bytes={}),
    )
    todo: list[Todo] = [Record(PlanAdopted(state.job, plan)), Placed((), "")]
    if state.step > first:  # figures of these steps do not count any more
        todo.append(Point(first, ROLLED_BACK, float(state.step)))
    return adopted, todo


@TRANSITIONS.on(*WAITING, *PREPARING)
def _tear(state: JobState, event: Torn, now_s: float) -> Outcome:
    """The checkpoint before a torn one counts, and the steps since then are done again."""
    reason = f"{event.reason}; continues from step {event.before.step}"
    return replace(state, checkpoint=event.before, reason=reason), []


@TRANSITIONS.on(Phase.LOADING)
def _load(state: JobState, event: FromRank[Loaded], now_s: float) -> Outcome:
    if event.rank in state.run.loaded:
        return state, [Dropped(f"rank {event.rank} reports loading twice")]
    loaded = state.run.loaded | {event.rank}
    if not state.run.moving:  # then it would be connecting alone, or repeating steps as well
        heard, rank = event.message, event.rank
        state = replace(
            state,
            run=replace(
                state.run,
                load_s={**state.run.load_s, rank: heard.took_s},
                fetched_s={**state.run.fetched_s, rank: heard.fetched_s},
            ),
        )
    waiting = len(state.present) - len(loaded)
    if waiting:
        reason = state.reason if state.run.moving else f"{waiting} of {len(state.present)} stages are loading"
        state = replace(state, reason=reason, run=replace(state.run, loaded=loaded))
        return state, commits.peer_begins(state, event.rank)
    reason = f"training with plan {state.version}{_without(state)}"
    begun = replace(
        state,
        phase=Phase.TRAINING,
        reason=reason,
        run=replace(
            state.run,
            loaded=loaded,
            ready={},
            begun_s=None if state.run.ready else now_s,
            moving=False,
            source=None,
        ),
        storing=replace(
            state.storing, due_s=state.storing.due_s if state.run.moving else now_s + CHECKPOINT_EVERY_S
        ),
    )
    if state.step >= state.steps or state.run.unfit:  # nothing is to be computed
        return _settle(begun)
    begun, kept = commits.kept_back(begun)
    todo: list[Todo] = [ToRanks(StepStart(state.job, state.version, state.due)), *kept]
    for rank, report in state.run.ready.items():
        if begun.phase is Phase.TRAINING:
            begun, more = _ready(begun, FromRank(rank, report), now_s)
            todo += more
    return begun, todo


@TRANSITIONS.on(Phase.LOADING)
def _ready_before(state: JobState, event: FromRank[StepReady], now_s: float) -> Outcome:
    """A rank repeats a step that began before our restart: it counts once we know that all had loaded. A peer
    whose own stages are there goes on meanwhile."""
    if state.adopted.in_pipe(event.rank) and not event.message.receipts:
        return commits.own_ready(state, event, now_s)
    if event.message.step != state.due:
        return state, _late(state, event.rank, event.message.step)
    return replace(state, run=replace(state.run, ready={**state.run.ready, event.rank: event.message})), []


# ---------------------------------------------------------------- steps


@TRANSITIONS.on(*STEPPING)
def _ready(state: JobState, event: FromRank[StepReady], now_s: float) -> Outcome:
    report = event.message
    if state.adopted.in_pipe(event.rank) and not report.receipts:
        return commits.own_ready(state, event, now_s)
    if report.step != state.due:
        return state, _late(state, event.rank, report.step)
    if event.rank in state.run.ready:
        return state, [Dropped(f"rank {event.rank} reports step {report.step} twice")]
    ready = {**state.run.ready, event.rank: commits.with_figures(state, event)}
    # A peer joins with the state that is being stored.
    waits = state.run.seating and state.step in state.storing.parts
    if len(ready) < len(state.present) or state.plan is None or waits:
        return replace(state, run=replace(state.run, ready=ready)), []
    if not all(report.finite for report in ready.values()):
        return _doubt(state, ready)
    wrong = joined.disagreement(state.plan, ready, periods.round_groups(state), periods.taken(state))
    if wrong is not None:
        state, odd = disputes.judged(state, wrong)
        if odd:
            return state, [Exclude(odd, wrong.words)]
        return _interrupt(state, wrong.words, Cause.BROKEN)
    return _commit(state, ready, now_s)


def _late(state: JobState, rank: int, reported: int) -> list[Todo]:
    """A stage that asks again about the last commit did not hear it: say it again."""
    last = state.run.last_commit
    if last is not None and last.step == reported:
        return [Dropped(f"rank {rank} repeats step {reported}"), ToRanks(last, rank)]
    return [Dropped(f"rank {rank} reports step {reported}, step {state.step} is in flight")]


def _commit(state: JobState, ready: Mapping[int, StepReady], now_s: float) -> Outcome:
    training, done = state.spec.training, state.due + 1
    last = done >= training.steps
    due = commits.can_evaluate(state) and (last or state.run.eval_owed or commits.evaluation_due(state, done))
    evaluate = due and (last or not commits.evaluation_waits(state))
    owed = state.storing.owed or commits.store_due(state, done, now_s, evaluate=evaluate)
    # One checkpoint at a time, so that slow lines do not keep ever more copies of the state waiting.
    store = last or (owed and not state.storing.parts)
    norms = joined.square_norms(state.adopted, ready)
    found = joined.loss_of(state.adopted, ready)
    scale = training.optimizer.gradient_scale(norms, state.adopted.divisor(found.weight))
    ring = snapshots.begun(state, done, now_s, last=last, store=store)
    change = relink.due(state)
    coded = evaluate and relink.lossy(state.plan)
    commit = StepCommit(
        state.job,
        state.version,
        state.due,
        scale,
        store,
        evaluate,
        last,
        change,
        coded,
        state.replay_from,
        keep=ring is not state.ring,
    )
    took_s = (now_s - state.run.begun_s) / (done - state.step) if state.run.begun_s is not None else None
    committed = replace(
        state,
        step=done,
        loss=commits.shown(found, state.loss),
        odd=f"; step {done}: {found.words}" if found.words else state.odd,
        failures=0,
        broken=0,
        failed=(),
        doubt=state.doubt if state.doubt is not None and state.doubt.step > state.step else None,
        ring=ring,
        run=replace(
            state.run,
            ready={},
            own={},
            heard=history.heard(state, state.run.heard, state.adopted.present_replicas, commit),
            quorum_s=None,
            reports=ready,
            last_commit=commit,
            begun_s=now_s,
            awaiting_eval=done if evaluate else state.run.awaiting_eval,
            eval_owed=due and not evaluate,
            step_times_s=state.run.step_times_s
            if took_s is None
            else (*state.run.step_times_s, took_s)[-RECENT:],
            wanted=state.run.wanted if change is None else None,
            relink=state.run.relink or change,
        ),
        storing=replace(
            state.storing,
            owed=owed and not store,
            parts={**state.storing.parts, done: {}} if store else state.storing.parts,
            asked_s=now_s if store else state.storing.asked_s,
        ),
    )
    todo = _said(state, commit, ready, found, now_s)
    if took_s is not None:
        todo.append(Point(done, "step_s", took_s))
    if training.optimizer.clip_norm is not None and norms and found.weight:
        todo.append(Point(done, "gradient_norm", math.sqrt(sum(norms)) / found.weight))
    return first(todo, _settle(relink.begun(committed)))


def _said(
    state: JobState, commit: StepCommit, ready: Mapping[int, StepReady], found: StepLoss, now_s: float
) -> list[Todo]:
    """Return what everybody hears of a commit: the journal first, then the workers, then who watches."""
    loss, reports = commits.shown(found, state.loss), [ready[rank] for rank in state.present]
    took_s = now_s - state.run.begun_s if state.run.begun_s is not None else None
    work = commits.work_of(state, ready, took_s)
    todo: list[Todo] = [
        Record(commits.fact_of(commit, loss, now_s, () if state.local else reports, work)),
        *relink.changed(state, commit.relink),
        ToRanks(commit),
        *commits.losses(state, ready, found),
        Point(state.due + 1, "learning_rate", state.spec.training.learning_rate(state.due)),
    ]
    if state.local:
        todo.insert(1, Record(periods.round_met(state, ready, now_s)))
    return todo


@TRANSITIONS.on(*STEPPING)
def _relink(state: JobState, event: Relinked, now_s: float) -> Outcome:
    return relink.want(state, event), []


def _doubt(state: JobState, ready: Mapping[int, StepReady]) -> Outcome:
    """Do a step again that is not finite, by others where there are any; end where it is the model's."""
    doubt = doubted(state.doubt, state.adopted, state.step, ready)
    discard = ToRanks(StepDiscard(state.job, state.version, state.step, doubt.said))
    if diverged(doubt):
        reason = (
            f"{doubt.said}, and again when the step was repeated; the last good checkpoint is of step "
            f"{state.checkpoint.step}; lower the learning rate or set a clip norm, then submit with --resume"
        )
        return first([discard], _end(state, Phase.FAILED, reason))
    reason = f"{doubt.said}; done again, without {doubt.suspects[0]} if the fleet can spare it"
    return replace(state, doubt=doubt, run=replace(state.run, ready={})), [discard, Redo(reason)]


@TRANSITIONS.on(Phase.EVALUATING)
def _evaluated(state: JobState, event: FromRank[EvalReady], now_s: float) -> Outcome:
    report = event.message
    # Workers name the step after which they evaluate by its index, counted from 0.
    done = report.step + 1
    if report.loss is None or state.plan is None or event.rank != state.plan.evaluator:
        return state, []
    if done != state.run.awaiting_eval:
        return state, [Dropped(f"evaluation of step {done}, awaited is {state.run.awaiting_eval}")]
    settled, todo = _settle(commits.evaluated(state, report.loss, report))
    fact = Evaluated(state.job, done, report.loss, dict(report.metrics), counts=True)
    return settled, [Record(fact), *commits.evaluation_points(done, report), *todo]


@TRANSITIONS.on(Phase.LOADING, *STEPPING, Phase.STORING)
def _stored(state: JobState, event: FromRank[StateStored], now_s: float) -> Outcome:
    """A checkpoint is one only when every stage's tensors are in the store: manifest last."""
    report = event.message
    if report.kept:
        return snapshots.kept(state, event)
    done = report.step + 1
    parts = state.storing.parts.get(done)
    if parts is None or event.rank in parts:
        if report.error and state.plan is not None and state.checkpoint.step < done <= state.step:
            worker = state.plan.places[event.rank].worker  # nor could another, whose word came first
            state = replace(
                state, storing=replace(state.storing, unstored={worker: 1, **state.storing.unstored})
            )
        return state, [Dropped(f"rank {event.rank} stored step {done}, which nobody awaits")]
    if report.error:
        return _not_stored(state, event.rank, done, report.error, now_s)
    parts = {**parts, event.rank: report.tensors}
    if report.n_bytes:
        state = replace(
            state,
            storing=replace(
                state.storing, part_bytes={**state.storing.part_bytes, event.rank: report.n_bytes}
            ),
        )
    if not state.store_ranks <= parts.keys():
        return replace(state, storing=replace(state.storing, parts={**state.storing.parts, done: parts})), []
    return _whole(state, done, parts, now_s)


def _not_stored(state: JobState, rank: int, done: int, error: str, now_s: float) -> Outcome:
    """Go on without a checkpoint that lacks a part. Who alone fails at that twice has no part in the next
    plan; no result is one without it."""
    worker = state.adopted.places[rank].worker
    times = state.storing.unstored.get(worker, 0) + 1
    state = replace(state, storing=replace(state.storing, unstored={**state.storing.unstored, worker: times}))
    reason = f"{_place(state, rank)} could not store its state: {error}"
    alone = len(state.storing.unstored) == 1  # else it is rather the store
    if done >= state.steps and times > MAX_FAILURES:
        return _end(state, Phase.FAILED, f"{reason}; it was tried {times} times")
    # A step that began before training was to end is not taken up again.
    ends = state.run.unfit or (state.phase is Phase.STORING and state.step < state.steps)
    if done >= state.steps or (alone and times == TWICE) or ends:
        return _interrupt(replace(state, failed=(*state.failed, worker)), reason, Cause.BROKEN)
    goes_on = replace(
        state,
        reason=f"{reason}; continues without a checkpoint of step {done}",
        storing=replace(
            state.storing,
            parts={at: parts for at, parts in state.storing.parts.items() if at != done},
            owed=state.storing.owed or state.run.seating,
            due_s=now_s + CHECKPOINT_EVERY_S,
        ),
    )
    return _waited(goes_on, now_s)


def _waited(state: JobState, now_s: float) -> Outcome:
    """Commit a step that only waited for a checkpoint."""
    if state.phase not in STEPPING or not state.run.ready or len(state.run.ready) < len(state.present):
        return state, []
    *others, (rank, report) = state.run.ready.items()
    return _ready(replace(state, run=replace(state.run, ready=dict(others))), FromRank(rank, report), now_s)


def _whole(state: JobState, done: int, parts: Mapping[int, Mapping[str, str]], now_s: float) -> Outcome:
    """A checkpoint has all its parts."""
    tensors = _checkpoint_of(state, parts)
    # An older checkpoint that is still incomplete will never be needed.
    rest = {at: value for at, value in state.storing.parts.items() if at > done}
    wait_s = max(CHECKPOINT_EVERY_S, STORING_SHARE * (now_s - state.storing.asked_s))
    checkpoint = Checkpoint(done, tensors, now_s)
    kept = replace(
        state,
        checkpoint=checkpoint,
        run=replace(state.run, heard=history.since(state, checkpoint)),
        storing=replace(state.storing, parts=rest, due_s=now_s + wait_s, unstored=NOBODY),
    )
    if state.phase is not Phase.LOADING:
        settled, todo = _settle(kept)
    elif done >= state.steps:  # whoever takes over meanwhile is not waited for: the result is stored
        settled, todo = _end(
            kept, Phase.FINISHED, f"{done} steps done; not evaluated at the end: {state.reason}"
        )
    else:
        settled, todo = kept, []
    return settled, [Record(CheckpointStored(state.job, done, tensors, now_s)), *todo]


def _checkpoint_of(state: JobState, parts: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    if state.local:
        plan, places = state.adopted, state.adopted.places
        peers = [joined.ranks_of(plan, number) for number in range(len(plan.replicas))]
        # Of a peer that is lost meanwhile some stages may have stored theirs: that is no model.
        held = {rank: parts[rank] for ranks in peers if parts.keys() >= set(ranks) for rank in ranks}
        return peer_tensors.merged(state.checkpoint.tensors, held, lambda rank: places[rank].replica)
    tensors = peer_tensors.model(state.checkpoint.tensors)
    for rank in sorted(parts):
        tensors.update(parts[rank])
    return tensors


def _without(state: JobState) -> str:
    """Name the peers that are lost, for people."""
    if state.plan is None or not state.plan.absent:
        return ""
    missing = ", ".join(state.plan.places[rank].worker for rank in sorted(state.plan.absent))
    return f"; without {missing}, until another worker takes the place"


def _settle(state: JobState) -> Outcome:
    """Choose among training, evaluating, storing and finished."""
    if state.run.unfit and state.step < state.steps:
        if state.checkpoint.step < state.step:
            reason = f"storing what is trained after {state.step} steps, for another plan"
            return replace(state, phase=Phase.STORING, reason=reason), []
        return _interrupt(state, "the plan does not fit its workers' memory", Cause.UNFIT)
    evaluating = state.run.awaiting_eval is not None
    if evaluating:
        reason = f"evaluating after step {state.run.awaiting_eval}"
        return replace(state, phase=Phase.EVALUATING, reason=reason), []
    enough = commits.stopped_early(state, max((state.checkpoint.step, *state.storing.parts)))
    if state.step < state.steps and not enough:
        reason = f"training with plan {state.version}{relink.gap_words(state)}{_without(state)}{state.odd}"
        return replace(state, phase=Phase.TRAINING, reason=reason), []
    if state.storing.parts:
        return replace(state, phase=Phase.STORING, reason="storing the result"), []
    return _end(state, Phase.FINISHED, enough or f"{state.step} steps done")


# ---------------------------------------------------------------- restarts, interruptions and ends


@TRANSITIONS.on(*RUNNING)
def _resume(state: JobState, event: Resumed, now_s: float) -> Outcome:
    """All workers of the plan are back after our restart; what was in flight there goes on. When the step
    began nobody knows."""
    reason = f"goes on with plan {state.version} after a restart of the coordinator"
    return replace(state, reason=reason, run=replace(state.run, begun_s=None)), []


@TRANSITIONS.on(*RUNNING)
def _fail_stage(state: JobState, event: FromRank[StageFailed], now_s: float) -> Outcome:
    report = event.message
    lost = f" (lost {report.lost_peer})" if report.lost_peer else ""
    reason = f"{_place(state, event.rank)} failed: {report.reason}{lost}"
    if not report.lost_peer and state.plan is not None:
        state = replace(state, failed=(*state.failed, state.plan.places[event.rank].worker))
    return _interrupt(state, reason, Cause.LOST if report.lost_peer else Cause.BROKEN)


@TRANSITIONS.on(*RUNNING)
def _change(state: JobState, event: PlanChange, now_s: float) -> Outcome:
    """Everybody keeps what is committed, and the step in flight begins anew under the next plan; or the job
    is planned anew, from the checkpoint."""
    state = disputes.suspected(state, event.suspects)
    if event.cause is Cause.WRONG:  # wrong steps are no result, however far the job has come
        back = event.sources[0]
        state = replace(state, checkpoint=back, ring=Ring(), held_out=state.held_out.until(back.step))
    before, plan = state.plan, event.plan
    over = state.checkpoint.step >= state.steps or commits.stopped_early(state, state.checkpoint.step)
    if before is None or plan is None or over:
        return _interrupt(state, event.reason, event.cause)
    # One peer fewer is no failure of the job's: there are so many, and they join again at a commit alone.
    counts = not (before.local and plan.absent > before.absent)
    counts &= event.cause.counts or (event.cause is Cause.UNFIT and state.run.unfit)
    if counts and _too_often(state, event.cause):
        return _interrupt(state, event.reason, event.cause)
    held = [before.places[rank].worker for rank in before.present]
    moved = carried_over(state, event, before, plan, counts)
    stay = {plan.places[rank].worker for rank in plan.present}
    left = tuple(worker for worker in held if worker not in stay)
    todo: list[Todo] = [Record(fact_of(state, before, plan, event)), Placed(left, event.reason)]
    for done, parts in sorted(moved.storing.parts.items()):
        if moved.local and done in moved.storing.parts and moved.store_ranks <= parts.keys():
            moved, more = _whole(moved, done, parts, now_s)  # who is lost was the last that had not stored
            todo += more
    return moved, todo


def _too_often(state: JobState, cause: Cause) -> bool:
    """Whether replacing stages has not helped: the checkpoint is what is left before giving up."""
    blamed = max(state.broken + 1, state.stumbling(cause).times) if cause is Cause.BROKEN else 0
    return state.failures >= MOST_LOSSES - 1 or blamed >= MAX_FAILURES


@TRANSITIONS.on(*RUNNING)
def _seat(state: JobState, event: Seating, now_s: float) -> Outcome:
    """Store what a peer is to begin with; a period that has waited for nobody in the end is committed."""
    seating = replace(
        state,
        run=replace(state.run, seating=event.wanted),
        storing=replace(state.storing, owed=state.storing.owed or event.wanted),
    )
    return (seating, []) if event.wanted else _waited(seating, now_s)


@TRANSITIONS.on(*STEPPING)
def _owe_checkpoint(state: JobState, event: LogsShort, now_s: float) -> Outcome:
    took_s = state.checkpoint.at_s - state.storing.asked_s if state.storing.asked_s else 0.0
    rested = now_s - state.checkpoint.at_s >= (SHORT_SHARE - 1.0) * took_s
    return replace(
        state, storing=replace(state.storing, owed=state.storing.owed or (rested and not state.storing.parts))
    ), []


@TRANSITIONS.on(*Phase)
def _keep_logs(state: JobState, event: LogsWanted, now_s: float) -> Outcome:
    return replace(state, logs_from=event.first_step), []


def _place(state: JobState, rank: int) -> str:
    """Name a rank's stage and worker for people."""
    return words(state.adopted.places[rank])


def _interrupt(state: JobState, reason: str, cause: Cause) -> Outcome:
    """Stop where we are; the next plan version goes on from the last checkpoint. Where the plan is at fault
    it counts on more than before, so such stops come to an end by themselves."""
    if state.checkpoint.step >= state.steps:  # the result is stored: no evaluation is worth another plan
        return _end(state, Phase.FINISHED, f"{state.steps} steps done; not evaluated at the end: {reason}")
    if enough := commits.stopped_early(state, state.checkpoint.step):
        return _end(state, Phase.FINISHED, f"{enough}; {reason}")
    failures, broken = state.failures + cause.counts, state.broken + (cause is Cause.BROKEN)
    if cause.counts and (failures > MOST_LOSSES or broken > MAX_FAILURES):
        return _end(state, Phase.FAILED, f"{reason}; gave up after {failures} interruptions without a step")
    stumbled = state.stumbling(cause)
    if cause is Cause.BROKEN and stumbled.times > MAX_FAILURES:
        words = f"gave up after {stumbled.times} such failures at step {stumbled.step}"
        return _end(state, Phase.FAILED, f"{reason}; {words}, on whatever worker")
    paused = replace(
        state,
        phase=Phase.PAUSED,
        reason=f"{reason}; continues from step {state.back_to} when the fleet suffices"
        + snapshots.again_words(state),
        failures=failures,
        broken=broken,
        stumbled=stumbled,
        ring=snapshots.reconfigured(state.ring),
        run=replace(state.run, ready={}, awaiting_eval=None, begun_s=None, moving=False, source=None),
        storing=replace(state.storing, parts={}),
    )
    paused = relink.dropped(paused)
    return paused, [_released(state, reason)] if state.phase in RUNNING else []


def _released(state: JobState, reason: str) -> Placed:
    return Placed(
        tuple(state.plan.places[rank].worker for rank in state.present) if state.plan else (), reason
    )


def _end(state: JobState, phase: Phase, reason: str) -> Outcome:
    ended = relink.dropped(
        replace(
            state,
            phase=phase,
            reason=reason,
            ring=Ring(),
            run=replace(state.run, ready={}, awaiting_eval=None),
            storing=replace(state.storing, parts={}),
        )
    )
    return ended, [Record(JobEnded(state.job, phase.value, reason)), _released(state, reason)]


@TRANSITIONS.on(*_ALIVE)
def _cancel(state: JobState, event: Cancelled, now_s: float) -> Outcome:
    return _end(state, Phase.CANCELLED, event.reason)


@TRANSITIONS.on(*_ALIVE)
def _break(state: JobState, event: Broken, now_s: float) -> Outcome:
    return _end(state, Phase.FAILED, event.reason)


@TRANSITIONS.on(*ENDED)
def _already_over(state: JobState, event: Cancelled, now_s: float) -> Outcome:
    return state, []
