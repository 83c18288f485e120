"""Other codecs at a step border: said two steps ahead, once, durably, and through every interruption."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from atoll.errors import StorageError
from atoll.job import TrainingSpec
from atoll.plan import LinkSpec, Mask
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages import jobs
from coordinator.messages.events import EvalReady, StageFailed, StateStored
from coordinator.messages.facts import (
    LinksChanged,
    PlanAdopted,
    RatioCapped,
    StepCommitted,
    from_record,
    to_record,
)
from coordinator.messages.facts import Record as JournalRecord
from coordinator.messages.instructions import Relink, StepCommit
from coordinator.messages.jobs import (
    Dropped,
    FromRank,
    JobState,
    LinksDue,
    Phase,
    Point,
    Record,
    Relinked,
    ToRanks,
)
from coordinator.pipeline.driver import PipelineDriver
from coordinator.pipeline.tuning import relink
from coordinator.services.owners.views import job_update
from coordinator.services.workers.wire import to_worker
from coordinator.storage.graph_store import GraphStore
from tests.coordinator.pipeline.test_machine import STAGES, commits, plan, ready, step, training
from tests.sim.scripted import Scripted, spec

COARSE = (LinkSpec(0, 1, "topk", 16.0, reason="thin"), LinkSpec(1, 0, "topk", 16.0, Mask.SAME))
FINE = (LinkSpec(0, 1, "fp16"), LinkSpec(1, 0, "bf16"))


def round_of(state: JobState, version: int = 0) -> tuple[JobState, list[jobs.Todo]]:
    """Every stage reports the step in flight, under the version that it runs with."""
    todo: list[jobs.Todo] = []
    at = state.step
    for stage in range(STAGES):
        state, todo = step(state, ready(stage, at, version=version or state.version))
    return state, todo


def wishing(links: tuple[LinkSpec, ...] = COARSE, **changes: Any) -> JobState:
    state = training(**{"steps": 9, "compress": "auto", **changes})
    state, _ = round_of(state)
    state, todo = step(state, Relinked(links, "measured 5 Mbit/s, chosen for 50"))
    assert todo == []
    return state


def said(links: tuple[LinkSpec, ...] = COARSE, **changes: Any) -> tuple[JobState, list[jobs.Todo]]:
    """A commit has carried the change."""
    return round_of(wishing(links, **changes))


def test_the_next_commit_says_it_two_steps_ahead_after_it_is_on_the_disk() -> None:
    state, todo = said()
    (commit,) = commits(todo)
    assert commit.relink == Relink(2, 3, COARSE)
    assert (commit.step, commit.version) == (1, 1)
    facts = [t.fact for t in todo if isinstance(t, Record)]
    assert LinksChanged("j", 2, 3, COARSE, "measured 5 Mbit/s, chosen for 50") in facts
    at = [type(t) for t in todo]
    assert at.index(ToRanks) > max(i for i, kind in enumerate(at) if kind is Record)
    assert [t.relink for t in todo if isinstance(t, LinksDue)] == [commit.relink]
    assert state.version == 1


def test_the_version_changes_when_its_first_step_begins_and_not_before() -> None:
    state, _ = said()
    state, todo = round_of(state)  # step 2, still the old version
    assert commits(todo)[0].version == 1
    assert commits(todo)[0].relink is None
    assert (state.step, state.version, state.run.relink) == (3, 2, None)
    assert state.plan is not None
    assert (state.plan.version, state.plan.links) == (2, COARSE)
    state, todo = round_of(state)
    assert commits(todo)[0].version == 2


def test_a_report_of_a_step_counts_only_under_that_step_s_version() -> None:
    state, _ = said()
    early, todo = step(state, ready(0, 2, version=2))
    assert early == state
    assert isinstance(todo[0], Dropped)
    state, _ = round_of(state)
    late, todo = step(state, ready(0, 3, version=1))
    assert late == state
    assert isinstance(todo[0], Dropped)


def test_what_follows_the_last_old_step_is_heard_after_the_change() -> None:
    state, _ = said(checkpoint_every=3, eval_every=3, eval_batches=1)
    state, todo = round_of(state)
    assert state.version == 2
    assert commits(todo)[0].store
    for stage in range(STAGES):
        state, todo = step(state, FromRank(stage, StateStored("j", 1, 2, {f"w{stage}": "ab" * 32})))
    assert state.checkpoint.step == 3
    state, todo = step(state, FromRank(2, EvalReady("j", 1, 2, 1.5)))
    assert state.eval_loss == 1.5
    broken, _ = step(state, FromRank(0, StageFailed("j", 1, 2, "could not apply")))
    assert broken.phase is Phase.PAUSED


def test_who_did_not_hear_the_commit_hears_the_change_with_it_again() -> None:
    state, first = said()
    _, todo = step(state, ready(1, 1))
    again = [t.message for t in todo if isinstance(t, ToRanks)]
    assert again == commits(first)


def test_only_one_change_is_under_way_and_the_newest_wish_counts() -> None:
    state, _ = said()
    state, _ = step(state, Relinked(FINE, "first thought"))
    state, _ = step(state, Relinked(COARSE[:1], "second thought"))
    state, todo = round_of(state)
    assert commits(todo)[0].relink is None
    state, todo = round_of(state)
    assert commits(todo)[0].relink == Relink(3, 5, COARSE[:1])
    state, _ = round_of(state)
    assert state.run.lineage == ((1, 0), (2, 3), (3, 5))


def test_a_change_that_no_step_would_see_is_not_said() -> None:
    state = training(steps=3, compress="auto")
    state, _ = round_of(state)
    state, _ = step(state, Relinked(COARSE, "too late"))
    for _ in range(2):
        state, todo = round_of(state)
        assert commits(todo)[0].relink is None
    assert state.version == 1


def test_a_lost_stage_ends_the_change_and_uses_its_version_up() -> None:
    state, _ = said()
    state, _ = step(state, jobs.anew(state, "w1 is lost"))
    assert (state.run.relink, state.run.wanted, state.version) == (None, None, 2)
    for event in (jobs.Picked("go"), jobs.Profiled(), jobs.Planned(plan(3))):
        state, _ = step(state, event)
    assert (state.version, state.run.lineage) == (3, ((3, 0),))
    late, todo = step(state, ready(0, 2, version=1))
    assert late == state
    assert isinstance(todo[0], Dropped)


def test_a_wish_is_forgotten_with_its_plan() -> None:
    state, _ = step(wishing(), jobs.anew(wishing(), "w1 is lost"))
    assert (state.run.wanted, state.version) == (None, 1)


@pytest.mark.parametrize("pending", [False, True])
def test_cancelling_and_a_step_that_is_not_finite_drop_a_change_of_the_links(pending: bool) -> None:
    state = said()[0] if pending else wishing()
    over, _ = step(state, jobs.Cancelled("by the owner"))
    assert (over.phase, over.run.wanted, over.run.relink) == (Phase.CANCELLED, None, None)
    for rank in range(state.n_ranks):
        state, todo = step(state, ready(rank, state.step, losses=(math.nan,), finite=False))
    (redo,) = [item for item in todo if isinstance(item, jobs.Redo)]
    state, todo = step(state, jobs.anew(state, redo.reason))
    assert (state.phase, state.run.wanted, state.run.relink) == (Phase.PAUSED, None, None)
    assert any(isinstance(t, jobs.Placed) for t in todo)


def test_a_restarted_coordinator_goes_on_above_every_version_that_was_said() -> None:
    fact = LinksChanged("j", 2, 3, COARSE, "slower")
    record = to_record(fact, 1.0)
    line = JournalRecord(record.kind, record.at_s, json.loads(json.dumps(record.payload)))
    assert from_record(line) == fact
    world = Scripted().training(steps=5)
    world.step()
    world.folder.write(LinksChanged("job-1", 2, 3, COARSE, "slower"), 1.0)
    ledger = world.folder.fold()
    assert ledger.jobs["job-1"].version == 2
    assert ledger.jobs["job-1"].plan is not None
    assert ledger.jobs["job-1"].plan.links != COARSE  # they begin with step 3
    for at in (1, 2):
        ledger.apply(StepCommitted("job-1", 1, at, 1.0, 0.0, 1.0))
    assert ledger.jobs["job-1"].plan.links == COARSE
    assert ledger.jobs["job-1"].lineage == ((1, 0), (2, 3))
    world.restart()
    world.join("a", "b")
    world.wait(20.0)
    assert world.state().version == 3


def test_damaged_links_in_the_journal_are_named() -> None:
    record = to_record(LinksChanged("j", 2, 3, COARSE, "slower"), 1.0)
    with pytest.raises(StorageError, match="damaged LinksChanged"):
        from_record(JournalRecord(record.kind, 1.0, {**record.payload, "links": [{"source": 1}]}))


def test_the_message_to_workers_carries_the_change() -> None:
    commit = StepCommit("j", 1, 4, 0.5, False, True, False, Relink(2, 6, COARSE), evaluate_coded=True)
    graphs: GraphStore = None  # type: ignore[assignment]  # only assignments read it
    message = to_worker(commit, graphs).commit
    assert (message.relink.plan_version, message.relink.first_step) == (2, 6)
    assert [(x.codec, x.ratio, x.mask) for x in message.relink.links] == [
        ("topk", 16.0, ""),
        ("topk", 16.0, "same"),
    ]
    assert message.evaluate_coded
    assert not to_worker(replace(commit, relink=None), graphs).commit.HasField("relink")


def test_both_losses_are_asked_for_where_values_lose_precision_and_only_there() -> None:
    asked = []
    for links in (FINE, (LinkSpec(0, 1, "lossless"),), FINE[1:], ()):
        state = training(eval_every=1, eval_batches=1)
        assert state.plan is not None
        state = replace(state, plan=state.plan.relinked(state.version, links))
        state, todo = round_of(state)
        asked.append(commits(todo)[0].evaluate_coded)
    assert asked == [True, False, False, False]
    state, todo = step(state, FromRank(2, EvalReady("j", 1, 0, 1.5, coded_loss=1.25)))
    points = {t.name: t.value for t in todo if isinstance(t, Point)}
    assert points["eval_loss"] == 1.5
    assert points["eval_loss_coded"] == 1.25
    assert (state.eval_loss, state.coded_loss) == (1.5, 1.25)


@pytest.mark.parametrize(
    ("compress", "adapts"),
    [
        ("off", False),
        ("lossless", True),
        ("auto", True),
        ("auto:64", True),
        ("adatopk", True),
        ("topk:32", False),
    ],
)
def test_only_what_depends_on_the_links_follows_them(compress: str, adapts: bool) -> None:
    assert relink.adapts(TrainingSpec(steps=1, n_micro=1, compress=compress)) is adapts


def test_a_ratio_that_moves_little_is_no_change() -> None:
    near = (replace(COARSE[0], ratio=17.0), COARSE[1])
    assert relink.changes(COARSE, near) == {}
    far = (replace(COARSE[0], ratio=18.0), COARSE[1])
    assert set(relink.changes(COARSE, far)) == {(0, 1)}
    assert relink.changes((), FINE) == {(0, 1): (LinkSpec(0, 1), FINE[0]), (1, 0): (LinkSpec(1, 0), FINE[1])}
    why = {(0, 1): "measured 5 Mbit/s"}
    told = relink.explained(COARSE, (replace(FINE[0], reason="fits"), COARSE[1]), why)
    assert told[0].reason == "measured 5 Mbit/s; fits"
    assert told[1] is COARSE[1]


# ---------------------------------------------------------------- the scheduler


@dataclass
class Adapting(Scripted):
    """Two stages that report what their links carried; the planner's answer is given by the test."""

    links: tuple[LinkSpec, ...] = FINE
    mbit: float = 50.0
    dense_bytes: int = 1_000_000  # of the 500,000 that each link carries in a step
    planned_with: str = ""  # --compress of the newest plan
    bandwidth_bps: float = field(default=50e6, kw_only=True)

    def plan(self, asked: do.MakePlan) -> ev.Event:
        self.planned_with = asked.spec.training.compress
        made = super().plan(asked)
        assert isinstance(made, ev.PlanMade)
        return replace(made, plan=made.plan.relinked(made.plan.version, self.links))

    def carry_out(self, instruction: do.Instruction) -> None:
        if not isinstance(instruction, do.ChooseLinks):
            super().carry_out(instruction)

    def started(self, **changes: Any) -> Adapting:
        return self.training("a", "b", **{"steps": 100, "compress": "auto", **changes})

    def steps(self, count: int) -> Adapting:
        for _ in range(count):
            self.wait(1.0)
            for worker in ("a", "b"):
                peer = "b" if worker == "a" else "a"
                carried = ev.Goodput(peer, 500_000, 4.0 / self.mbit, 0.01, self.dense_bytes)
                self.ready(worker, links=(carried,))
        self.handle(ev.Tick())  # whatever comes next: only then it is learned from the last step
        return self

    def asked(self) -> list[do.ChooseLinks]:
        return self.all(do.ChooseLinks)

    def answer(self, links: tuple[LinkSpec, ...]) -> None:
        request = self.asked()[-1]
        self.handle(ev.LinksChosen(request.job, request.attempt, links))

    def relinks(self) -> list[Relink]:
        found = {m.relink for _, m in self.messages(do.StepCommit) if m.relink is not None}
        return sorted(found, key=lambda one: one.version)

    def logged(self, event: str) -> list[do.Log]:
        return [i for i in self.all(do.Log) if i.event == event]


def test_a_link_that_slows_down_gets_other_codecs_and_the_log_says_why() -> None:
    world = Adapting().started().steps(20)
    assert world.asked() == []
    world.mbit = 5.0
    world.steps(3)
    (request,) = world.asked()
    fleet = request.fleet
    assert fleet.bandwidth_bps[fleet.index["a"], fleet.index["b"]] == pytest.approx(5e6)
    world.answer(COARSE)
    world.steps(4)
    assert [r.links[0].codec for r in world.relinks()] == ["topk"]
    assert world.state().version == 2
    assert len(world.logged("link.changed")) == 2
    fields = world.logged("link.changed")[0].fields
    assert (fields["before"], fields["after"]) == ("fp16", "topk:16")
    assert "measured 5 Mbit/s, chosen for 50 Mbit/s" in fields["reason"]
    shown = job_update(world.scheduler, "job-1", world.clock.now_s)
    link = shown.links[0]
    assert (link.codec, link.ratio, link.dense_bytes_per_step) == ("topk", 16.0, 1_000_000)
    assert link.measured_bps == pytest.approx(5e6)
    assert "measured 5 Mbit/s" in link.reason


def test_a_choice_that_changes_nothing_costs_no_version() -> None:
    world = Adapting().started().steps(10)
    world.mbit = 5.0
    world.steps(3)
    world.answer(FINE)
    world.steps(5)
    assert world.relinks() == []
    assert world.state().version == 1


def test_a_choice_for_a_plan_that_is_gone_is_not_taken() -> None:
    world = Adapting().started().steps(10)
    world.mbit = 5.0
    world.steps(3)
    world.join("c")
    world.lose("b")
    world.wait(5.0)
    assert world.holders() == ["a", "c"]
    world.load()
    world.answer(COARSE)
    assert world.state().run.wanted is None


def test_a_planner_that_fails_leaves_the_links_as_they_are() -> None:
    world = Adapting().started().steps(10)
    world.mbit = 5.0
    world.steps(3)
    request = world.asked()[-1]
    world.handle(ev.LinksFailed(request.job, request.attempt, "no luck"))
    world.steps(3)
    assert world.relinks() == []
    assert world.state().phase is Phase.TRAINING


@pytest.mark.parametrize("compress", ["off", "topk:16"])
def test_links_stay_where_the_owner_said_what_they_shall_do(compress: str) -> None:
    world = Adapting().started(compress=compress).steps(10)
    world.mbit = 1.0
    world.steps(10)
    assert world.asked() == []


def test_plans_to_come_start_from_what_training_measured() -> None:
    world = Adapting().started().steps(10)
    world.mbit = 5.0
    world.steps(8)
    table = world.scheduler.roster.links.table
    assert table.estimates["a", "b"].bandwidth_bps == pytest.approx(5e6, rel=0.05)


def pipeline(world: Scripted) -> PipelineDriver:
    driver = world.scheduler.driver_of("job-1")
    assert isinstance(driver, PipelineDriver)
    return driver


def guarded(
    links: tuple[LinkSpec, ...] = COARSE,
    compress: str = "auto:32",
    dense_bytes: int = 1_000_000,
    steps: int = 100,
) -> Adapting:
    """A job whose guard has found a gap of 5 %."""
    world = Adapting(links=links, dense_bytes=dense_bytes)
    job = spec(steps=steps, compress=compress, eval_every=5, eval_batches=1)
    world.join("a", "b")
    world.submit(what=replace(job, eval_data=job.data, eval_dag_hash="cd" * 32))
    world.load()
    world.steps(5)
    assert all(m.evaluate_coded for _, m in world.messages(do.StepCommit)[-2:])
    world.says("b", EvalReady("job-1", 1, 4, 4.2, 4.0))
    return world


def test_the_guard_asks_for_milder_codecs_when_the_gap_is_large() -> None:
    world = guarded()
    (request,) = world.asked()
    assert request.training.compress == "auto:11.2"
    assert "a gap of 5.0%" in world.logged("links.judged")[0].fields["reason"]


def test_the_guards_cap_outlives_a_lost_stage_and_a_restart_of_the_coordinator() -> None:
    world = guarded()
    assert world.planned_with == "auto:32"
    assert [fact for fact in world.facts if isinstance(fact, RatioCapped)] == [RatioCapped("job-1", 5, 11.2)]
    world.restart()
    world.planned_with = ""
    world.join("a", "b")
    world.wait(0.5)
    assert world.planned_with == "auto:11.2"
    assert pipeline(world).adapting.of["job-1"].cap == pytest.approx(11.2)
    world.load()
    world.mbit = 5.0
    world.steps(20)
    assert world.asked()[0].training.compress == "auto:11.2"


@pytest.mark.parametrize(
    ("codec", "milder"), [("fp16", "lossless"), ("bf16", "lossless"), ("int8_block", "auto:1.95")]
)
def test_the_guard_acts_on_codecs_of_a_fixed_rate_too(codec: str, milder: str) -> None:
    links = (LinkSpec(0, 1, codec), LinkSpec(1, 0, codec))
    world = guarded(links, dense_bytes=1_969_000 if codec == "int8_block" else 1_000_000)
    (request,) = world.asked()
    assert request.training.compress == milder
    assert "a gap of 5.0%" in world.logged("links.judged")[0].fields["reason"]


def test_the_largest_ratio_is_what_was_asked_for_or_what_the_bytes_show() -> None:
    def of(codec: str, ratio: float, n_bytes: int, dense_bytes: int) -> float:
        state = training(compress="auto")
        assert state.plan is not None
        links = (LinkSpec(0, 1, codec, ratio), LinkSpec(1, 2, "lossless"))
        carried = (ev.Goodput("w1", n_bytes, 1.0, 0.01, dense_bytes),)
        reports = {0: ev.StepReady("j", 1, 0, links=carried)}
        return relink.largest_ratio(
            replace(
                state, plan=state.plan.relinked(state.version, links), run=replace(state.run, reports=reports)
            )
        )

    assert of("topk", 16.0, 100, 1200) == 16.0
    assert of("int8_block", 1.0, 100, 250) == 2.5  # some tensors travel as they are
    assert of("fp16", 1.0, 0, 0) == pytest.approx(2.0, rel=1e-3)  # nothing was reported
    assert of("fp16", 1.0, 1, 10**9) == pytest.approx(2.0, rel=1e-3)  # no worker can say more
    assert of("lossless", 1.0, 100, 120) == 1.0


def test_a_codec_by_name_stays_and_what_it_costs_is_said_once_until_it_falls() -> None:
    world = guarded(compress="topk:16")
    (line,) = world.logged("links.judged")
    assert line.level == "warning"
    assert line.fields["step"] == 5
    assert "a gap of 5.0%, over 2%; topk:16 is what the job asks for and stays" in line.fields["reason"]
    assert "--resume job-1" in line.fields["reason"]
    assert "--compress auto or a milder codec than topk:16" in line.fields["reason"]
    assert world.state().reason == (
        "training with plan 1; held-out loss without codecs 5.0% above that through them"
    )
    said = []
    for loss in (4.3, 4.0, 4.2):
        world.steps(5)
        world.says("b", EvalReady("job-1", 1, world.state().step - 1, loss, 4.0))
        said.append(len(world.logged("links.judged")))
    assert said == [1, 1, 2]
    assert world.asked() == []
    assert world.relinks() == []
    assert not [fact for fact in world.facts if isinstance(fact, RatioCapped)]


@pytest.mark.parametrize("compress", ["topk:16", "auto:32"])
def test_after_the_last_step_the_guard_can_only_say_what_it_sees(compress: str) -> None:
    world = guarded(compress=compress, steps=5)
    (line,) = world.logged("links.judged")
    assert line.level == "warning"
    assert "a gap of 5.0%, over 2%; the last step is over" in line.fields["reason"]
    assert world.asked() == []
    assert not [fact for fact in world.facts if isinstance(fact, RatioCapped)]


def test_facts_of_a_relinked_job_fold_to_its_steps() -> None:
    world = Adapting().started().steps(10)
    world.mbit = 5.0
    world.steps(3)
    world.answer(COARSE)
    world.steps(6)
    kinds = [type(fact) for fact in world.facts]
    assert kinds.count(LinksChanged) == 1
    assert kinds.count(PlanAdopted) == 1
    last = [fact for fact in world.facts if isinstance(fact, StepCommitted)][-1]
    assert (last.version, last.step) == (2, world.state().step - 1)
