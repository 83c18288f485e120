"""A job's machine: all stages or none, and never a message counted twice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dataset_spec import DataSpec
from atoll.exchange import Exchange
from atoll.job import JobSpec, Optimizer, TrainingSpec
from atoll.messages.from_worker import MAX_WATTS
from atoll.microbatch import ScheduleName
from atoll.plan import LinkSpec, Plan, Replica, StageSpec, one_replica
from coordinator.messages import jobs
from coordinator.messages.events import EvalReady, Loaded, StageFailed, StateStored, StepReady
from coordinator.messages.facts import Checkpoint, CheckpointStored, JobEnded, StepCommitted
from coordinator.messages.instructions import StepCommit, StepDiscard, StepStart
from coordinator.messages.jobs import Dropped, FromRank, JobState, Phase, Placed, Record, ToRanks
from coordinator.pipeline import machine
from coordinator.pipeline.assigning import tensors_of

HASH = "ab" * 32
STAGES = 3


def spec(**changes: Any) -> JobSpec:
    training = TrainingSpec(**{"steps": 4, "n_micro": 2, **changes})
    data = DataSpec((), 8, 1)
    return JobSpec("job", training, HASH, HASH, {"w0": HASH, "w1": HASH, "w2": HASH}, data, data)


def plan(version: int = 1, n_stages: int = STAGES) -> Plan:
    stages = tuple(StageSpec(i, i + 1, i, i + 1, f"w{i}", 1) for i in range(n_stages))
    return Plan("j", version, HASH, HASH, "even", ScheduleName.GPIPE, 2, one_replica(2, stages))


def step(state: JobState, event: jobs.Event, now_s: float = 1.0) -> machine.Outcome:
    return machine.step(state, event, now_s)


def loading(**changes: Any) -> JobState:
    state = JobState("j", spec(**changes), Checkpoint(0, {"w0": HASH, "w1": HASH, "w2": HASH}), 0.0)
    for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan())):
        state, _ = step(state, event)
    return state


def training(**changes: Any) -> JobState:
    state = loading(**changes)
    for stage in range(STAGES):
        state, _ = step(state, FromRank(stage, Loaded("j", 1)))
    assert state.phase is Phase.TRAINING
    return state


def ready(stage: int, at: int, **changes: Any) -> FromRank:
    losses = (2.0,) if stage == STAGES - 1 else ()
    return FromRank(stage, StepReady(**{"job": "j", "version": 1, "step": at, "losses": losses, **changes}))


def committed(state: JobState, now_s: float = 1.0) -> tuple[JobState, list[jobs.Todo]]:
    """Every stage reports the step in flight."""
    todo: list[jobs.Todo] = []
    at = state.step
    for stage in range(STAGES):
        state, todo = step(state, ready(stage, at, version=state.version), now_s)
    return state, todo


def commits(todo: list[jobs.Todo]) -> list[StepCommit]:
    return [t.message for t in todo if isinstance(t, ToRanks) and isinstance(t.message, StepCommit)]


def test_training_starts_when_every_stage_is_loaded() -> None:
    state = loading()
    for stage in (2, 0):
        state, todo = step(state, FromRank(stage, Loaded("j", 1)))
        assert todo == []
    state, todo = step(state, FromRank(1, Loaded("j", 1)))
    assert todo == [ToRanks(StepStart("j", 1, 0))]
    assert state.phase is Phase.TRAINING


def test_a_step_is_committed_once_all_stages_are_ready_and_recorded_first() -> None:
    state = training()
    for stage in (1, 0):
        state, todo = step(state, ready(stage, 0))
        assert todo == []
        assert state.step == 0
    state, todo = step(state, ready(2, 0))
    assert isinstance(todo[0], Record)
    assert isinstance(todo[0].fact, StepCommitted)
    assert commits(todo) == [StepCommit("j", 1, 0, 1.0, store=False, evaluate=False, last=False)]
    assert (state.step, state.loss) == (1, 2.0)


def with_losses(state: JobState, **last: Any) -> tuple[JobState, list[jobs.Todo]]:
    todo: list[jobs.Todo] = []
    for stage in range(STAGES):
        state, todo = step(state, ready(stage, state.step, **(last if stage == STAGES - 1 else {})))
    return state, todo


def points(todo: list[jobs.Todo]) -> dict[str, float]:
    return {item.name: item.value for item in todo if isinstance(item, jobs.Point)}


def test_a_loss_that_is_not_finite_with_finite_gradients_is_a_warning() -> None:
    state, todo = with_losses(training(), losses=(0.25, math.nan, 0.5))
    assert (state.step, state.phase, state.loss) == (1, Phase.TRAINING, 0.75 * 3 / 2)
    assert "step 1: the loss of 1 of 3 micro-batches is not finite" in state.reason
    assert points(todo)["losses_not_finite"] == 1.0
    (odd,) = [item for item in todo if isinstance(item, jobs.OddLoss)]
    assert odd.fields["odd"] == 1
    state, todo = with_losses(state, losses=(math.nan,))
    assert (state.step, state.loss) == (2, 0.75 * 3 / 2), "shown is the last that there was"
    assert "loss" not in points(todo)


def test_the_commit_divides_by_the_weights_of_the_whole_step() -> None:
    state, todo = with_losses(training(), losses=(6.0, 2.0), weights=(3.0, 1.0))
    assert commits(todo)[0].gradient_scale == 0.25
    assert (state.loss, points(todo)["loss_weight"]) == (2.0, 4.0)


def test_a_step_without_weight_takes_no_update_and_says_so() -> None:
    state, todo = with_losses(training(), losses=(0.0, 0.0), weights=(0.0, 0.0))
    assert (state.step, commits(todo)[0].gradient_scale) == (1, 0.0)
    assert "no update" in state.reason


def evaluated_after(state: JobState) -> list[int]:
    """Steps after which the job is evaluated, until it has ended."""
    found = []
    while state.step < state.steps:
        state, todo = committed(state)
        found += [c.step + 1 for c in commits(todo) if c.evaluate]
        if state.run.awaiting_eval is not None:
            state, _ = step(
                state, FromRank(2, EvalReady("j", state.version, state.run.awaiting_eval - 1, 1.5))
            )
    return found


def linked(codec: str, at: int = 0, **changes: Any) -> JobState:
    """Training from step ``at`` on with that codec between the first two stages."""
    state = JobState("j", spec(**{"steps": 90, **changes}), Checkpoint(at, {}), 0.0)
    planned = jobs.Planned(plan().relinked(1, (LinkSpec(0, 1, codec, 8.0),)))
    for event in (jobs.Picked("go"), jobs.Profiled(), planned):
        state, _ = step(state, event)
    for stage in range(STAGES):
        state, _ = step(state, FromRank(stage, Loaded("j", 1)))
    return state


@pytest.mark.parametrize(
    ("codec", "changes", "after"),
    [
        ("topk", {"compress": "topk:8"}, [20, 40, 60, 80, 90]),
        ("fp16", {"compress": "auto"}, [20, 40, 60, 80, 90]),
        ("topk", {"compress": "auto", "eval_every": 30}, [30, 60, 90]),
        ("topk", {"compress": "auto", "eval_every": 1000}, [90]),
        ("topk", {"compress": "auto", "eval_batches": 0}, []),
        ("lossless", {"compress": "lossless"}, [90]),
        ("none", {"compress": "off"}, [90]),
        ("none", {"compress": "auto"}, [90]),
    ],
)
def test_where_links_lose_precision_the_guard_looks_unless_the_job_names_an_interval(
    codec: str, changes: dict[str, Any], after: list[int]
) -> None:
    assert evaluated_after(linked(codec, **{"eval_batches": 1, **changes})) == after


def test_a_resumed_job_is_evaluated_after_the_same_steps() -> None:
    assert evaluated_after(linked("topk", at=33, eval_batches=1)) == [40, 60, 80, 90]


def test_a_duplicate_report_is_dropped_and_counts_once() -> None:
    state, _ = step(training(), ready(0, 0))
    again, todo = step(state, ready(0, 0))
    assert again == state
    assert isinstance(todo[0], Dropped)


def test_a_report_of_another_plan_or_step_is_dropped() -> None:
    state = training()
    for stale in (ready(0, 0, version=9), ready(0, 3)):
        same, todo = step(state, stale)
        assert same == state
        assert [type(t) for t in todo] == [Dropped]


def test_who_did_not_hear_the_last_commit_is_told_again() -> None:
    state, _ = committed(training())
    state, todo = step(state, ready(1, 0))
    assert [t for t in todo if isinstance(t, ToRanks)] == [
        ToRanks(StepCommit("j", 1, 0, 1.0, store=False, evaluate=False, last=False), 1)
    ]


def test_the_flags_follow_the_declared_intervals() -> None:
    state = training(eval_every=2, eval_batches=1, checkpoint_every=3)
    seen = []
    while state.step < 4:
        state, todo = committed(state)
        seen.append(next((c.store, c.evaluate, c.last) for c in commits(todo)))
        if state.run.awaiting_eval is not None:
            at = state.run.awaiting_eval - 1
            state, _ = step(state, FromRank(2, EvalReady("j", 1, at, 1.5)))
    assert seen == [
        (False, False, False),
        (False, True, False),
        (True, False, False),
        (True, True, True),
    ]


def test_a_plan_without_an_evaluation_cut_never_evaluates() -> None:
    state = training(eval_batches=1, steps=1)
    assert state.plan is not None
    blind = tuple(replace(s, eval_start=0, eval_stop=0) for s in state.plan.stages)
    _, todo = committed(
        replace(state, plan=replace(state.plan, replicas=one_replica(2, blind, state.plan.links)))
    )
    assert not commits(todo)[0].evaluate


def stored(stage: int, at: int) -> FromRank:
    return FromRank(stage, StateStored("j", 1, at, {f"w{stage}": f"{at}{stage}" * 32}))


def test_a_checkpoint_counts_only_when_every_stage_has_stored_it() -> None:
    state = training(checkpoint_every=1)
    state, _ = committed(state)
    for stage in (0, 2):
        state, todo = step(state, stored(stage, 0))
        assert todo == []
        assert state.checkpoint.step == 0
    state, todo = step(state, stored(1, 0))
    assert [type(t.fact) for t in todo if isinstance(t, Record)] == [CheckpointStored]
    tensors = {"w0": "00" * 32, "w1": "01" * 32, "w2": "02" * 32}
    assert state.checkpoint == Checkpoint(1, tensors, state.checkpoint.at_s)


def test_a_job_that_names_no_interval_stores_by_the_clock_one_checkpoint_at_a_time() -> None:
    state, asked = training(steps=100), []
    for now_s in (200.0, 302.0, 310.0):
        state, todo = committed(state, now_s)
        asked.append(commits(todo)[0].store)
    assert asked == [False, True, False]
    for stage in range(STAGES):
        state, _ = step(state, stored(stage, 1), now_s=362.0)
    # It took 60 s, so the next one waits for twenty times that.
    assert not commits(committed(state, 362.0 + 1199.0)[1])[0].store
    assert commits(committed(state, 362.0 + 1201.0)[1])[0].store


def test_storing_for_logs_that_are_short_takes_a_fifth_of_the_time_at_most() -> None:
    state, _ = step(training(steps=100), jobs.LogsShort(), now_s=10.0)
    state, todo = committed(state, 10.0)
    assert commits(todo)[0].store
    for stage in range(STAGES):
        state, _ = step(state, stored(stage, 0), now_s=20.0)
    state, _ = step(state, jobs.LogsShort(), now_s=59.0)
    assert not state.storing.owed, "storing took 10 s: the next begins 40 s after it at the earliest"
    state, _ = step(state, jobs.LogsShort(), now_s=60.0)
    assert state.storing.owed


def test_the_job_finishes_only_after_evaluation_and_storing() -> None:
    state = training(steps=1, eval_batches=1)
    state, _ = committed(state)
    assert state.phase is Phase.EVALUATING
    for stage in range(STAGES):
        state, _ = step(state, stored(stage, 0))
    assert state.phase is Phase.EVALUATING
    state, todo = step(state, FromRank(2, EvalReady("j", 1, 0, 1.25)))
    assert (state.phase, state.eval_loss) == (Phase.FINISHED, 1.25)
    assert any(isinstance(t, Record) and isinstance(t.fact, JobEnded) for t in todo)
    assert any(isinstance(t, Placed) for t in todo)


def test_a_held_out_loss_is_taken_from_who_computes_it_alone() -> None:
    state, _ = committed(training(steps=2, eval_every=1, eval_batches=1))
    for rank in (0, 1):
        same, todo = step(state, FromRank(rank, EvalReady("j", 1, 0, 1e-6, coded_loss=1.0)))
        assert (same, todo) == (state, [])
    state, _ = step(state, FromRank(2, EvalReady("j", 1, 0, math.nan)))
    assert state.phase is Phase.TRAINING, "a model that has diverged ends its evaluation too"
    assert state.eval_loss is not None
    assert math.isnan(state.eval_loss)


def not_finite(state: JobState, **changes: Any) -> tuple[JobState, list[jobs.Todo]]:
    """Every stage reports the step in flight, the last one as not finite; no other worker can take over."""
    todo: list[jobs.Todo] = []
    for rank in range(state.n_ranks):
        last = {"finite": False, **changes} if rank == STAGES - 1 else {}
        report = ready(rank, state.step, version=state.version, **last)
        state, todo = step(state, report)
    for redo in [item for item in todo if isinstance(item, jobs.Redo)]:
        assert state.phase is Phase.TRAINING
        state, more = step(state, jobs.anew(state, redo.reason))
        todo = [*todo, *more]
    return state, todo


def replanned(state: JobState, *workers: str) -> JobState:
    """The paused job trains with the next plan, on these workers."""
    planned = plan(state.version + 1)
    stages = tuple(replace(s, worker=w) for s, w in zip(planned.stages, workers, strict=True))
    events: list[jobs.Event] = [jobs.Picked("go"), jobs.Profiled()]
    events.append(jobs.Planned(replace(planned, replicas=one_replica(2, stages))))
    events += [FromRank(rank, Loaded("j", planned.version)) for rank in range(STAGES)]
    for event in events:
        state, _ = step(state, event)
    assert state.phase is Phase.TRAINING
    return state


NOT_FINITE = pytest.mark.parametrize("changes", [{"losses": (math.nan,)}, {"losses": (math.inf,)}, {}])


@NOT_FINITE
def test_a_step_that_is_not_finite_on_one_workers_word_is_done_again(changes: dict[str, Any]) -> None:
    state, todo = not_finite(training(), **changes)
    assert state.phase is Phase.PAUSED
    assert "at step 1 on stage 2 on w2; done again" in state.reason
    assert state.doubt is not None
    assert state.doubt.suspects == ("w2", "w1", "w0")
    discards = [t.message for t in todo if isinstance(t, ToRanks)]
    assert [type(d) for d in discards] == [StepDiscard]
    state, todo = committed(replanned(state, "w0", "w1", "w2"))
    assert commits(todo)
    assert state.doubt is None


@NOT_FINITE
def test_a_loss_or_gradient_that_is_not_finite_twice_stops_the_job_with_its_checkpoint(
    changes: dict[str, Any],
) -> None:
    """Nobody else fits: the same workers find the same."""
    state = training(checkpoint_every=1)
    state, _ = committed(state)
    for stage in range(STAGES):
        state, _ = step(state, stored(stage, 0))
    state, _ = not_finite(state, **changes)
    state, todo = not_finite(replanned(state, "w0", "w1", "w2"), **changes)
    assert state.phase is Phase.FAILED
    assert "last good checkpoint is of step 1" in state.reason
    discards = [t.message for t in todo if isinstance(t, ToRanks)]
    assert [type(d) for d in discards] == [StepDiscard]
    assert state.checkpoint.step == 1


def test_a_job_has_diverged_once_nobody_took_part_in_every_try() -> None:
    state, _ = not_finite(training(), losses=(math.nan,))
    state, _ = not_finite(replanned(state, "w0", "w1", "w3"), losses=(math.nan,))
    assert state.phase is Phase.PAUSED
    assert state.doubt is not None
    assert state.doubt.suspects == ("w1", "w0")
    state, _ = not_finite(replanned(state, "w4", "w3", "w2"), losses=(math.nan,))
    assert state.phase is Phase.FAILED
    assert "loss became nan at step 1 on stage 2 on w2, and again" in state.reason


def test_a_doubt_lasts_until_its_step_is_committed() -> None:
    """The steps since the checkpoint are done again before it."""
    state, _ = committed(training())
    state, _ = not_finite(state, finite=False)
    state, _ = committed(replanned(state, "w0", "w1", "w2"))
    assert state.doubt is not None
    state, _ = committed(state)
    assert state.doubt is None


def test_a_lost_stage_pauses_the_job_and_the_next_plan_goes_on_from_the_checkpoint() -> None:
    state = training(checkpoint_every=2)
    for _ in range(2):
        state, _ = committed(state)
    for stage in range(STAGES):
        state, _ = step(state, stored(stage, 1))
    state, _ = committed(state)
    state, todo = step(state, jobs.anew(state, "w1 is lost: silent for 2.1 s"))
    assert state.phase is Phase.PAUSED
    assert "continues from step 2" in state.reason
    assert todo == [Placed(("w0", "w1", "w2"), "w1 is lost: silent for 2.1 s")]
    for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan(2, 2))):
        state, _ = step(state, event)
    assert (state.phase, state.version, state.step) == (Phase.LOADING, 2, 2)
    late, todo = step(state, ready(0, 3))
    assert late == state
    assert isinstance(todo[0], Dropped)


def test_a_stage_that_always_fails_fails_the_job() -> None:
    state = loading()
    for version in range(2, 20):
        state, _ = step(state, FromRank(0, StageFailed("j", version - 1, 0, "out of memory")))
        if state.phase is Phase.FAILED:
            break
        for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan(version))):
            state, _ = step(state, event)
    assert state.phase is Phase.FAILED
    assert "out of memory" in state.reason
    assert "gave up after 4 interruptions" in state.reason


def test_an_older_plan_version_is_our_own_mistake() -> None:
    state, _ = step(training(), jobs.anew(training(), "x"))
    for event in (jobs.Picked("go"), jobs.Profiled()):
        state, _ = step(state, event)
    with pytest.raises(LookupError, match="plan 1 after plan 1"):
        step(state, jobs.Planned(plan(1)))


def test_cancelling_twice_is_cancelling_once() -> None:
    state, todo = step(training(), jobs.Cancelled("by the owner"))
    assert (state.phase, len(todo)) == (Phase.CANCELLED, 2)
    assert step(state, jobs.Cancelled("again")) == (state, [])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.floats(1e-3, 1e3), st.data())
def test_the_clip_coefficient_does_not_depend_on_the_cut(
    norms: list[float], clip: float, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(norms)), min_size=2, max_size=2)))
    parts = [norms[: cuts[0]], norms[cuts[0] : cuts[1]], norms[cuts[1] :]]
    optimizer = Optimizer(clip_norm=clip)
    whole = optimizer.gradient_scale(norms)
    order = data.draw(st.permutations(parts))  # a device may hold pieces at both ends
    assert optimizer.gradient_scale([n for part in order for n in part]) == whole
    assert whole <= 1.0
    assert whole == min(1.0, clip / (math.sqrt(math.fsum(norms)) + 1e-6))
    assert optimizer.gradient_scale([1e308, 1e308]) == 0.0


def test_clipping_uses_the_norm_over_all_stages() -> None:
    state = training(optimizer=Optimizer(clip_norm=1.0))
    todo: list[jobs.Todo] = []
    for stage in range(STAGES):
        state, todo = step(state, ready(stage, 0, square_norms=(3.0,)))
    assert commits(todo)[0].gradient_scale == pytest.approx(1 / 3, rel=1e-5)


EVENTS = st.one_of(
    st.builds(lambda s, v: FromRank(s, Loaded("j", v)), st.integers(0, 3), st.integers(0, 2)),
    st.builds(
        lambda s, t, v: ready(s, t, version=v), st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)
    ),
    st.builds(lambda s, t: FromRank(s, EvalReady("j", 1, t, 1.0)), st.integers(0, 2), st.integers(0, 4)),
    st.builds(stored, st.integers(0, 2), st.integers(0, 4)),
    st.builds(lambda s: FromRank(s, StageFailed("j", 1, 0, "x")), st.integers(0, 2)),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_stages_say_steps_are_committed_in_order_and_once(events: list[jobs.Event]) -> None:
    state = training(eval_every=2, eval_batches=1, checkpoint_every=2)
    seen: list[int] = []
    for event in events:
        state, todo = step(state, event)
        seen += [t.fact.step for t in todo if isinstance(t, Record) and isinstance(t.fact, StepCommitted)]
        assert state.reason
    assert seen == list(range(len(seen)))


def two_replicas() -> Plan:
    first = Replica((0, 1), (StageSpec(0, 1, 0, 1, "w0", 1), StageSpec(1, 3, 1, 3, "w1", 1)))
    second = Replica((1, 2), (StageSpec(0, 3, 0, 3, "w2", 1),))
    return replace(plan(), replicas=(first, second), blocks=2, exchange=Exchange())


def replicated(**changes: Any) -> JobState:
    state = JobState("j", spec(blocks=2, replicas="2", **changes), Checkpoint(0, {}), 0.0)
    for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(two_replicas())):
        state, _ = step(state, event)
    for rank in range(3):
        state, _ = step(state, FromRank(rank, Loaded("j", 1)))
    return state


def shared(rank: int, at: int, losses: tuple[float, ...] = (), norms: tuple[float, ...] = ()) -> FromRank:
    return FromRank(rank, StepReady("j", 1, at, losses=losses, square_norms=norms))


def test_replicas_commit_when_all_ranks_are_ready_and_norms_count_once() -> None:
    state = replicated(optimizer=Optimizer(clip_norm=1.0))
    for event in (shared(2, 0, (0.3,), (9.0, 16.0)), shared(0, 0, (), (9.0,))):
        state, todo = step(state, event)
        assert todo == []
    state, todo = step(state, shared(1, 0, (0.1,), (16.0,)))
    assert state.loss == 0.1 + 0.3
    assert commits(todo)[0].gradient_scale == pytest.approx(1 / 5, rel=1e-6)


def test_of_replicas_the_first_ones_last_stage_that_evaluates_has_the_loss() -> None:
    first, second = two_replicas().replicas
    assert two_replicas().evaluator == 1
    idle = replace(first.stages[1], eval_start=1, eval_stop=1)
    assert (
        replace(two_replicas(), replicas=(replace(first, stages=(first.stages[0], idle)), second)).evaluator
        == 0
    )
    state = replicated(steps=2, eval_every=1, eval_batches=1)
    for event in (shared(0, 0), shared(1, 0, (0.1,)), shared(2, 0, (0.3,))):
        state, _ = step(state, event)
    for rank, loss in ((2, 0.5), (0, 0.25), (1, 0.75)):
        state, _ = step(state, FromRank(rank, EvalReady("j", 1, 0, loss)))
    assert state.eval_loss == 0.75


def test_replicas_with_other_gradients_go_back_to_the_checkpoint() -> None:
    state = replicated()
    for event in (shared(0, 0, (), (9.0,)), shared(1, 0, (0.1,), (16.0,))):
        state, _ = step(state, event)
    state, todo = step(state, shared(2, 0, (0.3,), (9.0, 16.5)))
    assert state.phase is Phase.PAUSED
    assert "those of w2" in state.reason
    assert not commits(todo)


def test_the_first_replica_alone_stores() -> None:
    state = replicated(checkpoint_every=1, steps=2)
    for event in (shared(0, 0), shared(1, 0, (0.1,)), shared(2, 0, (0.3,))):
        state, todo = step(state, event)
    assert commits(todo)[0].store
    assert state.store_ranks == {0, 1}
    state, todo = step(state, FromRank(1, StateStored("j", 1, 0, {"w1": HASH})))
    assert not todo
    state, todo = step(state, FromRank(0, StateStored("j", 1, 0, {"w0": HASH})))
    assert isinstance(todo[0], Record)
    assert isinstance(todo[0].fact, CheckpointStored)
    assert state.checkpoint.step == 1


def test_of_replicas_that_keep_what_a_rule_left_out_all_store_and_each_begins_with_its_own() -> None:
    state = replicated(checkpoint_every=1, steps=2)
    assert state.plan is not None
    state = replace(state, plan=replace(state.plan, exchange=Exchange("mean", codec="int8_block")))
    for event in (shared(0, 0), shared(1, 0, (0.1,)), shared(2, 0, (0.3,))):
        state, todo = step(state, event)
    assert commits(todo)[0].store
    assert state.store_ranks == {0, 1, 2}
    for rank, tensors in ((0, {"w0": HASH, "w0@0": HASH}), (1, {"w1": "c" * 64, "w1@0": HASH})):
        state, todo = step(state, FromRank(rank, StateStored("j", 1, 0, tensors)))
        assert not todo
    own = {"w0@1": "d" * 64, "w1@1": "e" * 64}
    state, todo = step(state, FromRank(2, StateStored("j", 1, 0, own)))
    assert state.checkpoint.step == 1
    assert state.checkpoint.tensors.keys() == {"w0", "w1", "w0@0", "w1@0", "w0@1", "w1@1"}
    model = {"w0": HASH, "w1": "c" * 64}
    assert state.plan is not None
    assert tensors_of(state.plan, 0, state.checkpoint) == model | {"w0@0": HASH, "w1@0": HASH}
    assert tensors_of(state.plan, 2, state.checkpoint) == model | own
    # A replica that has stored nothing begins with what all keep alike; among exact sums there is nothing.
    third = replace(state.plan, replicas=(*state.plan.replicas, state.plan.replicas[1]))
    assert tensors_of(third, 3, state.checkpoint) == model | {"w0@0": HASH, "w1@0": HASH}
    assert tensors_of(replace(state.plan, exchange=Exchange()), 2, state.checkpoint) == model
    assert state.plan.storers == ("w0", "w1", "w2")


def measured(todo: list[jobs.Todo]) -> tuple[int, ...]:
    (fact,) = [t.fact for t in todo if isinstance(t, Record) and isinstance(t.fact, StepCommitted)]
    return fact.energy_mj


def test_energy_is_recorded_as_reported_and_no_more_of_it_than_a_machine_can_take() -> None:
    state, todo = training(), list[jobs.Todo]()
    for stage, energy_j in enumerate((12.5, 0.0, 1e9)):
        # Two seconds after the start.
        state, todo = step(state, ready(stage, 0, energy_j=energy_j), now_s=3.0)
    assert measured(todo) == (12_500, 0, round(2e3 * MAX_WATTS))
    assert measured(committed(state, 4.0)[1]) == (), "where nobody measures it"
