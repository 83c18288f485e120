"""The scheduler as a whole: from sessions and a submission to commits, and through losses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from atoll.exchange import Exchange
from atoll.job import Optimizer, OptimizerName
from atoll.plan import (
    LinkPrediction,
    LinkSpec,
    Plan,
    Prediction,
    Replica,
    StagePrediction,
    StageSpec,
    one_replica,
)
from coordinator.config import Liveness, Probing
from coordinator.membership import member
from coordinator.membership.roster import Roster, refusal
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import jobs
from coordinator.messages.facts import CheckpointStored, CheckpointTorn, Fact, WorkRejected, to_record
from coordinator.messages.jobs import RESTART_GRACE_S
from coordinator.pipeline.machine import ROLLED_BACK
from coordinator.pipeline.tuning.profiling import READ_AGAIN_S
from tests.sim.scripted import HASH, Scripted, spec
from tests.sim.worker import introduction


def test_a_job_is_measured_planned_assigned_and_trained() -> None:
    world = Scripted().training()
    assert [w for w, _ in world.messages(do.Assign)] == ["a", "b"]
    world.step()
    assert [(w, m.step) for w, m in world.messages(do.StepCommit)] == [("a", 0), ("b", 0)]
    assert world.state().step == 1


def test_every_pair_is_probed_once_in_each_direction() -> None:
    world = Scripted()
    world.join("a", "b", "c")
    assert len(world.scheduler.roster.links.solo_bps) == 6


def test_the_other_end_of_a_probe_is_told_before_it() -> None:
    world = Scripted()
    world.join("a", "b")
    assert {(w, m.peer) for w, m in world.messages(do.ExpectPeer)} == {("a", "b"), ("b", "a")}


def test_without_workers_a_job_waits_and_says_how_to_help() -> None:
    world = Scripted()
    world.submit()
    assert world.state().phase is jobs.Phase.QUEUED
    assert "atoll-worker join" in world.state().reason


def test_a_fleet_that_does_not_suffice_is_named_and_tried_again_when_it_grows() -> None:
    world = Scripted()
    world.join("a")
    world.submit()
    assert "stage 1 lacks a worker" in world.state().reason
    world.wait(1.0)
    assert world.state().phase is jobs.Phase.QUEUED
    world.join("b")
    assert world.state().phase is jobs.Phase.LOADING


def test_a_second_job_waits_for_the_first_and_follows_it() -> None:
    world = Scripted().training()
    world.submit("job-2")
    assert world.state("job-2").phase is jobs.Phase.QUEUED
    assert world.state("job-2").reason == "waits for its turn: needs 2 workers, 1 idle"
    world.handle(ev.CancelAsked("job-1"))
    assert world.state("job-2").phase is jobs.Phase.LOADING


def test_a_dead_workers_stage_is_taken_over_and_the_others_keep_theirs() -> None:
    world = Scripted().training()
    world.step()
    world.lose("b")
    world.wait(0.5)
    state = world.state()
    assert (state.phase, state.version, state.step) == (jobs.Phase.LOADING, 2, 1)
    assert world.holders() == ["a", "c"]
    why = "b is lost: connection lost and not back within 0.5 s; c takes over rank 1, repeating 1 steps"
    assert state.reason.startswith(why)
    assert world.to("a", do.Release) == []


def test_a_dead_worker_pauses_its_job_where_nobody_can_take_over() -> None:
    world = Scripted().training("a", "b")
    world.step()
    world.lose("b")
    world.wait(0.5)
    why = "b is lost: connection lost and not back within 0.5 s; no idle worker can take over stage 1"
    assert world.to("a", do.Release) == [do.Release("job-1", 1, why)]
    assert world.state().phase is jobs.Phase.PAUSED


def test_a_frozen_worker_is_dead_after_two_seconds_and_its_session_is_closed() -> None:
    world = Scripted().training()
    world.silent = {"b"}
    world.wait(2.5)
    assert world.scheduler.roster.workers["b"].member.phase is member.Phase.DEAD
    assert [i.worker for i in world.all(do.CloseSession)] == ["b"]
    assert world.holders() == ["a", "c"]


def test_our_own_stall_kills_nobody() -> None:
    world = Scripted().training()
    world.wait(0.5)
    world.silent = {"a", "b", "c"}
    world.freeze()
    world.wait(30.0)
    world.thaw()
    world.settle()
    assert world.state().phase is jobs.Phase.TRAINING


def test_a_worker_that_reconnects_at_once_keeps_its_stage_and_hears_the_commit_again() -> None:
    world = Scripted().training()
    world.step()
    world.lose("b")
    world.done.clear()
    world.join("b")
    assert [(w, m.step) for w, m in world.messages(do.StepCommit)] == [("b", 0)]
    assert world.state().phase is jobs.Phase.TRAINING


def test_a_restarted_process_does_not_inherit_its_ghosts_stage() -> None:
    world = Scripted().training()
    world.join("b", incarnation=2)
    assert world.state().version == 2
    assert world.scheduler.roster.workers["b"].member.incarnation == 2


def test_messages_of_an_old_session_or_of_strangers_change_nothing() -> None:
    world = Scripted().training()
    before = world.state()
    world.handle(ev.Arrived("a", 99, ev.StepReady("job-1", 1, 0, (1.0,))))
    world.handle(ev.Arrived("nobody", 1, ev.StepReady("job-1", 1, 0, (1.0,))))
    world.says("c", ev.StepReady("job-1", 1, 0, (1.0,)))
    assert world.state() == before
    assert sum(world.scheduler.effects.dropped.values()) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_s": -1.0}, "-1 s of forward"),
        ({"forward_s": 1e6}, "busy seconds"),
        ({"square_norms": (-1.0,)}, "squared norm"),
        ({"links": (ev.Goodput("b", 10**15, 1e-3, 0.0),)}, "bit/s"),
    ],
)
def test_impossible_figures_set_a_worker_aside_and_the_run_goes_on(
    changes: dict[str, Any], words: str
) -> None:
    world = Scripted().training()
    world.settle(0.1)
    world.ready("a", **changes)
    worker = world.scheduler.roster.workers["a"]
    assert words in worker.quarantined
    assert worker.reason.startswith("quarantined")
    assert world.holders() == ["c", "b"]
    assert world.state().phase is jobs.Phase.LOADING


def test_a_worker_that_lets_go_of_its_stage_is_noticed_by_its_heartbeat() -> None:
    world = Scripted().training()
    version = world.state().version
    for job in ("job-1", "job-1", "another"):
        world.says("a", ev.Heartbeat(world.clock.now_s, job, version, 0, 0, 0))
    assert world.state().version == version + 1
    assert any("let go" in i.fields.get("reason", "") for i in world.all(do.Log))
    # What it held before it was given the next plan's stage says nothing.
    world.says("a", ev.Heartbeat(world.clock.now_s, "", 0, 0, 0, 0))
    assert world.state().version == version + 1


def test_a_report_that_is_repeated_in_a_later_step_is_not_judged_by_that_one() -> None:
    world = Scripted().training()
    world.settle(1.0)
    for worker in world.holders():
        world.ready(worker, forward_s=0.4, backward_s=0.5)
    world.settle(0.1)
    state = world.state()
    world.says("a", ev.StepReady("job-1", state.version, 0, forward_s=0.4, backward_s=0.5))
    assert world.scheduler.roster.workers["a"].quarantined == ""
    assert world.state().step == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cores": -1.0}, "-1.0 CPU cores"),
        ({"cores": float("nan")}, "nan CPU cores"),
        ({"quota_period_s": 2.0}, "a CPU quota of 2.0 s; possible are 0 to 1 s"),
        ({"quota_period_s": float("nan")}, "a CPU quota of nan s"),
        ({"memory_limit_bytes": 1}, "a limit of 1"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    assert refusal(introduction("a")) is None
    assert words in (refusal(replace(introduction("a"), **changes)) or "")


def test_busy_seconds_may_be_more_than_the_step_by_what_a_quota_lends() -> None:
    roster = Roster(Liveness(), Probing())
    roster.open("a", 1, replace(introduction("a"), cores=0.1, quota_period_s=1.0), 0.0)
    roster.open("b", 1, introduction("b"), 0.0)
    short = ev.StepReady("job", 1, 0, forward_s=0.4, backward_s=0.5)
    assert roster.judge("a", short, 0.09) is None
    assert "busy seconds" in (roster.judge("b", short, 0.09) or "")


def test_a_probe_faster_than_any_network_sets_its_worker_aside() -> None:
    world = Scripted(bandwidth_bps=1e15)
    world.join("a", "b")
    assert "bit/s" in world.scheduler.roster.workers["a"].quarantined


def test_a_worker_that_never_answers_a_probe_does_not_hold_up_the_fleet() -> None:
    world = Scripted(silent={"c"})
    world.join("a", "b", "c")
    world.submit()
    world.wait(800.0)
    assert world.holders() == ["a", "b"]


def test_a_leaving_worker_gives_up_its_stage_at_once() -> None:
    world = Scripted().training()
    world.says("a", ev.Leaving("good night"))
    assert world.scheduler.roster.workers["a"].member.phase is member.Phase.LEFT
    assert world.holders() == ["c", "b"]


def test_a_kicked_worker_is_dismissed_and_replaced() -> None:
    world = Scripted().training()
    world.handle(ev.KickAsked("b", "wrong results", True))
    assert world.to("b", do.Dismiss) == [do.Dismiss("wrong results", True)]
    assert world.holders() == ["a", "c"]
    for peer in ("a", "c"):
        assert world.to(peer, do.Revoked) == [do.Revoked("b", "wrong results")]
    assert world.to("b", do.Revoked) == []


def test_peers_hear_of_a_revocation_of_who_is_not_here_and_not_of_a_mere_kick() -> None:
    world = Scripted().training()
    world.handle(ev.KickAsked("w-gone", "forgotten by the owner", True))
    world.handle(ev.KickAsked("b", "for now", False))
    assert [m.worker for m in world.to("a", do.Revoked)] == ["w-gone"]


@pytest.mark.parametrize(
    ("kicked", "for_good", "gone"),
    [
        ("w-m", False, ["w-m", "w-m/1"]),  # a machine takes its devices along
        ("w-m/1", False, ["w-m/1"]),
        ("w-m/1", True, ["w-m", "w-m/1"]),  # one certificate is all its devices'
    ],
)
def test_who_is_kicked_takes_along_whoever_shares_the_certificate(
    kicked: str, for_good: bool, gone: list[str]
) -> None:
    world = Scripted()
    world.join("w-m", "w-m/1", "w-mm", "b")
    world.handle(ev.KickAsked(kicked, "noise", for_good))
    dismissed = [worker for worker in ("w-m", "w-m/1", "w-mm", "b") if world.to(worker, do.Dismiss)]
    assert dismissed == gone
    assert [m.worker for m in world.to("b", do.Revoked)] == (gone if for_good else [])
    assert not any(world.to(worker, do.Revoked) for worker in gone)


def test_who_joins_while_a_plan_is_made_is_planned_with_once_that_has_failed() -> None:
    world = Scripted(stages=2, fewest=2)
    world.join("a")
    world.slowness = 1.0  # a plan takes its time
    world.submit()
    world.join("b")
    assert [len(asked.fleet.devices) for asked in world.all(do.MakePlan)] == [1]
    world.wait(30.0)
    assert sorted(world.holders()) == ["a", "b"]


def test_a_worker_whose_bytes_arrive_is_not_lost_though_its_heartbeats_are_late() -> None:
    world = Scripted().training()
    world.silent = {"a"}
    for _ in range(16):
        world.handle(ev.Uploading("a"))
        world.wait(0.25)
    assert world.state().phase is jobs.Phase.TRAINING
    world.wait(2.25)  # nothing comes any more
    assert "silent for 2" in world.scheduler.roster.workers["a"].member.reason
    assert world.state().version == 2
    world.handle(ev.Uploading("a"))  # what was still under way does not bring it back
    world.handle(ev.Uploading("nobody"))
    assert world.scheduler.roster.workers["a"].member.phase is member.Phase.DEAD


def test_a_lost_peer_is_not_judged_before_its_fate_is_known() -> None:
    world = Scripted().training()
    for version, holders in ((1, ["a", "b"]), (2, ["a", "c"])):  # the second time it gives up its place
        world.says("a", ev.StageFailed("job-1", version, 0, "link broke", lost_peer="b"))
        assert world.state().version == version
        world.wait(2.75)
        assert (world.state().version, world.holders()) == (version + 1, holders)
        world.load()
        assert world.state().phase is jobs.Phase.TRAINING
    world.says("a", ev.StageFailed("job-1", 3, 0, "link broke", lost_peer="c"))
    world.lose("c")
    world.wait(0.75)
    assert (world.state().version, world.holders()) == (4, ["a", "b"])


def test_a_full_disk_pauses_jobs_with_the_reason_and_ends_by_itself() -> None:
    world = Scripted().training()
    world.handle(ev.StorageFailed("the disk under /state is full"))
    assert world.state().phase is jobs.Phase.PAUSED
    assert "is full" in world.state().reason
    world.handle(ev.StorageRecovered())
    assert world.state().phase is jobs.Phase.LOADING


@dataclass
class Unanswered(Scripted):
    """Its store of blobs gives nothing while it is ``away``."""

    away: bool = field(default=False, kw_only=True)

    def carry_out(self, instruction: do.Instruction) -> None:
        if self.away and isinstance(instruction, do.ReadJob):
            self.post(ev.JobUnreadable(instruction.job, "the bucket does not answer", hopeless=False))
        else:
            super().carry_out(instruction)


def test_a_job_that_the_store_does_not_give_now_waits_and_is_read_again() -> None:
    world = Unanswered().training("a", "b", checkpoint_every=1)
    world.step()
    store(world, 0)
    world.away = True
    world.restart()
    world.wait(RESTART_GRACE_S + 1.0)  # nobody is back
    world.join("c", "d")
    for _ in range(2):
        world.wait(READ_AGAIN_S + 1.0)
        assert world.state().phase is jobs.Phase.PAUSED
        assert "the bucket does not answer" in world.state().reason
    assert len(world.all(do.ReadJob)) == 3
    assert not any(isinstance(fact, CheckpointTorn) for fact in world.facts)
    world.away = False
    world.wait(READ_AGAIN_S + 1.0)
    state = world.state()
    assert (state.phase, state.step, world.holders()) == (jobs.Phase.LOADING, 1, ["c", "d"])


def rolled_back(world: Scripted) -> list[tuple[int, float]]:
    """Return the rows of that name: the step that the job went back to, and how many were committed."""
    return [(row.step, row.value) for row in world.all(do.Measured) if row.name == ROLLED_BACK]


@pytest.mark.parametrize("fact", [None, WorkRejected("job-1", 1, "b", "it computed step 1 wrong")])
def test_steps_that_are_done_again_after_a_restart_are_rolled_back_in_the_metrics(fact: Fact | None) -> None:
    """Whether the journal has the plan of then, whose workers are awaited first, or has taken it back."""
    world = Scripted().training("a", "b", checkpoint_every=1)
    world.step()
    store(world, 0)
    world.step()
    if fact is not None:
        world.folder.records.append(to_record(fact, world.clock.now_s))
    world.restart()
    world.wait(RESTART_GRACE_S + 1.0)  # nobody is back
    world.join("c", "d")
    assert (world.state().phase, world.state().step) == (jobs.Phase.LOADING, 1)
    assert rolled_back(world) == [(1, 2.0)]


def test_steps_since_the_checkpoint_before_a_torn_one_are_rolled_back_in_the_metrics() -> None:
    world = Scripted().training("a", "b", checkpoint_every=1)
    for step in range(2):
        world.step()
        store(world, step)
    world.lose("b")
    world.wait(1.0)
    world.handle(ev.TornFound("job-1", 2, "a blob of it is gone"))
    assert world.state().reason == "a blob of it is gone; continues from step 1"
    world.join("c")
    assert (world.state().phase, world.state().step) == (jobs.Phase.LOADING, 1)
    assert rolled_back(world) == [(1, 2.0)]


def test_a_job_that_can_never_be_read_fails_and_what_is_said_of_one_that_ended_is_dropped() -> None:
    world = Unanswered().training("a", "b")
    world.away = True
    world.restart()
    world.wait(RESTART_GRACE_S + 1.0)
    world.join("c", "d")
    world.handle(ev.JobUnreadable("job-1", "its graph is gone", hopeless=True))
    assert (world.state().phase, world.state().reason) == (jobs.Phase.FAILED, "its graph is gone")
    world.handle(ev.JobUnreadable("job-1", "the bucket does not answer", hopeless=False))
    assert world.state().reason == "its graph is gone"


def store(world: Scripted, step: int) -> None:
    for at, worker in enumerate(world.holders()):
        blob = f"{step}{at}" * 32
        world.says(worker, ev.StateStored("job-1", world.state().version, step, {f"w{at}": blob}))


def test_a_replica_that_is_not_asked_to_store_replaces_nothing() -> None:
    def twice(plan: Plan, asked: do.MakePlan) -> Plan:
        alone = (replace(stage, start=0, stop=2) for stage in plan.stages)
        replicas = tuple(Replica((at, at + 1), (stage,)) for at, stage in enumerate(alone))
        return replace(plan, replicas=replicas, blocks=2, exchange=Exchange())

    world = Scripted(altered=twice).training("a", "b", checkpoint_every=1)
    for worker in world.holders():
        world.ready(worker, losses=(1.0,))
    stored = {"a": dict.fromkeys(("w0", "w1"), "aa" * 32), "b": dict.fromkeys(("w0", "w1"), "bb" * 32)}
    for worker in ("b", "a"):
        world.says(worker, ev.StateStored("job-1", 1, 0, stored[worker]))
    assert world.state().checkpoint.step == 1
    assert world.state().checkpoint.tensors == stored["a"]


def test_the_ledger_is_the_fold_of_the_journal() -> None:
    world = Scripted().training("a", "b", "c", checkpoint_every=1)
    for at in range(2):
        world.step()
        store(world, at)
    replayed = world.folder.fold()
    assert replayed == world.scheduler.ledger
    assert replayed.jobs["job-1"].last_checkpoint.step == 2


def test_after_a_restart_a_job_waits_for_its_workers_and_goes_on_from_its_checkpoint() -> None:
    world = Scripted().training("a", "b", checkpoint_every=1)
    world.step()
    store(world, 0)
    world.step()
    world.restart()
    assert world.state().phase is jobs.Phase.TRAINING
    assert "waits for its workers" in world.state().reason
    world.join("c", "b")
    world.wait(0.5)
    assert world.state().phase is jobs.Phase.TRAINING
    world.join("a")
    world.wait(0.5)
    assert "came back without its stage" in "".join(str(i.fields) for i in world.all(do.Log))
    state = world.state()
    assert (state.phase, state.version, state.step) == (jobs.Phase.LOADING, 2, 1)


def test_a_worker_that_still_holds_a_stage_is_released_before_it_is_measured() -> None:
    world = Scripted().training()
    world.step()
    world.restart()
    world.join("a", "b")
    assert type(world.to("b", object)[0]) is do.Release


def test_after_a_restart_missing_workers_are_not_waited_for_forever() -> None:
    world = Scripted().training()
    world.restart()
    world.join("b", "c")
    world.wait(16.0)
    assert world.holders() == ["b", "c"]


def test_resuming_takes_the_last_checkpoint_and_more_steps() -> None:
    world = Scripted().training("a", "b", steps=1)
    world.step()
    store(world, 0)
    assert world.state().phase is jobs.Phase.FINISHED
    more = replace(spec(steps=3), resume_of="job-1")
    assert world.scheduler.refusal(more) is None
    assert "raise --steps" in (world.scheduler.refusal(replace(spec(steps=1), resume_of="job-1")) or "")
    assert "no job" in (world.scheduler.refusal(replace(more, resume_of="job-9")) or "")
    world.submit("job-2", more)
    assert world.state("job-2").step == 1
    assign = world.messages(do.Assign)[-1][1]
    assert (assign.first_step, assign.tensors["w1"]) == (1, "01" * 32)


@pytest.mark.parametrize(("how", "own"), [("diloco", False), ("streaming_diloco", False), ("swarm", True)])
def test_changes_of_one_model_begin_with_one_where_the_job_before_has_gossiped(how: str, own: bool) -> None:
    world = Scripted()
    world.submit(what=spec(exchange="saps"))
    tensors = {"w0": "01" * 32, "w1": "02" * 32, "w0@1": "03" * 32, "w1@1": "04" * 32}
    world.scheduler.ledger.apply(CheckpointStored("job-1", 1, tensors))
    world.submit("job-2", replace(spec(exchange=how), resume_of="job-1"))
    begun = world.scheduler.ledger.jobs["job-2"].start
    assert begun.step == 1
    assert begun.tensors == (tensors if own else {"w0": "01" * 32, "w1": "02" * 32})
    world.submit("job-3", replace(spec(exchange="diloco"), resume_of="job-2"))
    assert ("w0@1" in world.scheduler.ledger.jobs["job-3"].start.tensors) is False


def test_a_job_does_not_go_on_with_another_optimizer_or_other_tensors() -> None:
    world = Scripted()
    world.submit(what=spec(steps=1))
    more = replace(spec(steps=3), resume_of="job-1")
    other = replace(more, training=replace(more.training, optimizer=Optimizer(OptimizerName.SGD)))
    expected = "job-1 holds the state of adamw, this one sgd; take the same optimizer"
    assert world.scheduler.refusal(other) == expected
    rate = replace(more, training=replace(more.training, optimizer=Optimizer(lr=1.0, weight_decay=0.1)))
    assert world.scheduler.refusal(rate) is None
    tensors = replace(more, tensors={"w0": HASH, "w2": HASH})
    assert "2 tensors differ, first w1" in (world.scheduler.refusal(tensors) or "")


def test_a_question_about_a_plan_starts_nothing() -> None:
    world = Scripted()
    world.join("a", "b")
    world.handle(ev.PlanAsked("inquiry-1", spec(), {"sig1": 10**6, "sig2": 10**6}))
    asked = world.all(do.MakePlan)
    assert [(i.job, len(i.fleet.devices)) for i in asked] == [("inquiry-1", 2)]
    assert asked[0].fleet.devices[0].timings == {"sig1": (1e-3, 2e-3), "sig2": (1e-3, 2e-3)}
    assert world.messages(do.Assign) == []


class Islands(Scripted):
    """Inside 200 Mbit/s, across 8 Mbit/s, which two flows at once halve."""

    def probed(self, worker: str, probe: do.ProbeLink) -> None:
        flows = self.scheduler.roster.links.flows
        open_flows = [f for f in self.messages(do.ProbeLink) if f[1].request in flows]
        if len(open_flows) < len(flows):
            return
        across = [f for f in open_flows if f[0][0] != f[1].link.peer[0]]
        for flow in open_flows:
            rate, rtt_s = (8e6 / len(across), 0.08) if flow in across else (200e6, 0.01)
            self.streams[flow[0]].send(1, ev.LinkProbed(flow[1].request, flow[1].link.peer, rtt_s, rate))


def test_two_islands_behind_one_slow_line_show_their_shared_uplink() -> None:
    world = Islands()
    world.join("x1", "y1", "x2", "y2")
    roster = world.scheduler.roster
    uplinks = roster.links.uplinks(dict.fromkeys(roster.workers, ""))
    assert sorted(u.members for u in uplinks) == [("x1", "x2"), ("y1", "y2")]
    assert all(u.up_bps == pytest.approx(8e6) for u in uplinks)


def test_what_steps_take_refines_a_worker_s_scale_and_settles() -> None:
    """Every step takes twice what the plan said: the scale becomes 2 and stays there."""

    def altered(plan: Plan, request: do.MakePlan) -> Plan:
        stages = tuple(
            StagePrediction(device.worker, 1.0 * device.scale, 0.5, 1, 2) for device in request.fleet.devices
        )
        prediction = Prediction(2.0, 1.0, "stage 0", "it computes", stages)
        return replace(plan, prediction=prediction)

    world = Scripted(altered=altered).training("a", "b", steps=40)
    for _ in range(30):
        world.wait(3.0)
        for worker in world.holders():
            world.ready(worker, forward_s=0.6, backward_s=1.3, optimizer_s=0.1)
    roster = world.scheduler.roster
    assert roster.workers["a"].computing.value == pytest.approx(2.0)
    assert roster.fleet(["a"], "fp32").devices[0].scale == pytest.approx(2.0)


def test_a_stage_is_told_only_of_stages_that_it_exchanges_tensors_with() -> None:
    """Two homes that accept no connections may hold stages of one job that are no neighbours."""

    def altered(plan: Plan, request: do.MakePlan) -> Plan:
        stages = tuple(StageSpec(i, i + 1, 0, 0, d.worker, 1) for i, d in enumerate(request.fleet.devices))
        links = tuple(LinkSpec(*pair) for pair in ((0, 1), (1, 0), (1, 2), (2, 1)))
        return replace(plan, replicas=one_replica(2, stages, links))

    world = Scripted(altered=altered)
    world.join("a", "b", "c")
    world.submit()
    told = {w: [peer.link.peer for peer in m.peers] for w, m in world.messages(do.Assign)}
    assert told == {"a": ["b"], "b": ["a", "c"], "c": ["b"]}


def test_a_stage_of_next_to_nothing_does_not_tell_its_worker_s_speed() -> None:
    """Its few views take twelve times what was predicted: all overhead."""

    def altered(plan: Plan, request: do.MakePlan) -> Plan:
        stages = (StagePrediction("a", 0.01, 0.1, 1, 2), StagePrediction("b", 1.0, 0.9, 1, 2))
        prediction = Prediction(2.0, 1.0, "stage 1", "it computes", stages)
        return replace(plan, prediction=prediction)

    world = Scripted(altered=altered).training("a", "b", steps=10)
    for _ in range(5):
        world.wait(3.0)
        world.ready("a", forward_s=0.06, backward_s=0.06)
        world.ready("b", forward_s=0.5, backward_s=1.0)
    workers = world.scheduler.roster.workers
    assert (workers["a"].computing.value, workers["b"].computing.value) == (1.0, pytest.approx(1.5))


def test_what_the_ends_take_to_handle_messages_is_no_drag_of_their_link() -> None:
    """Messages are under way 1.47 s instead of 1.0 s; 0.4 s are the ends: a drag of 1.47 / 1.4."""

    def altered(plan: Plan, request: do.MakePlan) -> Plan:
        stages = tuple(StagePrediction(w, 0.5, 0.5, 1, 2, handling_s=h) for w, h in (("a", 0.6), ("b", 0.2)))
        links = (
            LinkPrediction("a", "b", 2_000_000, 1.0, under_way_s=1.0),
            LinkPrediction("b", "a", 2_000_000, 1.0, under_way_s=1.0),
        )
        prediction = Prediction(2.0, 1.0, "link a>b", "it is slow", stages, links)
        return replace(plan, prediction=prediction)

    world = Scripted(altered=altered).training("a", "b", steps=10)
    for _ in range(5):
        world.wait(3.0)
        world.ready("b", forward_s=0.1, backward_s=0.4)
        carried = ev.Goodput("b", 2_000_000, 1.47, 0.02, dense_bytes=2_000_000)
        world.ready("a", forward_s=0.1, backward_s=0.4, handling_s=0.6, links=(carried,))
    assert world.scheduler.roster.links.table.drags()["a", "b"] == pytest.approx(1.47 / 1.4)


def test_shrunk_messages_do_not_make_a_fast_line_look_slow() -> None:
    roster = Roster(Liveness(), Probing())
    for worker in ("a", "b"):
        roster.open(worker, 1, introduction(worker), 0.0)
    roster.links.table.probed("a", "b", 200e6, 0.002)
    shrunk = ev.Goodput("b", 100_000, 1.0, 0.002, dense_bytes=2_000_000)
    assert roster.judge("a", ev.StepReady("job", 1, 0, links=(shrunk,)), None) is None
    assert roster.links.table.get("a", "b").bandwidth_bps == pytest.approx(200e6)
    dense = ev.Goodput("b", 2_000_000, 1.0, 0.002, dense_bytes=2_000_000)
    assert roster.judge("a", ev.StepReady("job", 1, 1, links=(dense,)), None) is None
    assert roster.links.table.get("a", "b").bandwidth_bps < 190e6


def test_what_messages_take_around_the_actions_is_learnt_for_the_next_plan() -> None:
    roster = Roster(Liveness(), Probing())
    roster.open("a", 1, introduction("a"), 0.0)
    (fresh,) = roster.fleet_for("job", ["a"], "fp32").devices
    for measured_s in (0.2, 0.4):
        roster.handled("job", "a", 0.4, measured_s)
    (device,) = roster.fleet_for("job", ["a"], "fp32").devices
    assert (fresh.handling_scale, device.handling_scale) == (1.0, pytest.approx(0.75))
    roster.handled("job", "a", 0.3, 0.3)  # as predicted: nothing to learn
    assert roster.workers["a"].handling.value == pytest.approx(0.75)
    roster.handled("another", "a", 0.8, 9.0)
    assert roster.workers["a"].handling.value == pytest.approx(0.75)
    roster.handled("job", "a", 0.3, 99.0)  # a machine that others use
    assert roster.workers["a"].handling.value == 2.0
    impossible = ev.StepReady("job", 1, 0, handling_s=float("nan"))
    assert "handling" in (roster.judge("a", impossible, None) or "")
