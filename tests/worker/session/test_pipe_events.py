"""A computation's events cross the pipe as they were; what no process of ours sends is refused."""

from __future__ import annotations

import pytest

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from worker.session import events as ev
from worker.session.pipe_events import MAX_REASON_CHARS, event_of, posted

LOADED = control.FromWorker(loaded=control.Loaded(job="j", plan_version=3, took_s=0.5))
READY = control.FromWorker(ready=control.StepReady(job="j", plan_version=3, step=7))
EVAL = control.FromWorker(eval_ready=control.EvalReady(job="j", plan_version=3, step=7, loss=2.0))
STORED = control.FromWorker(stored=control.StateStored(job="j", plan_version=3, step=7))
UPDATE = control.FromWorker(update_ready=control.UpdateReady(job="j", round=7))
EVALUATED = control.FromWorker(client_evaluated=control.ClientEvaluated(job="j", round=7))
PROBED = control.FromWorker(ops_probed=control.OpsProbed(request=9))
EVENTS: list[ev.Event] = [
    ev.StageLoaded("j", 3, LOADED),
    ev.StepDone("j", 3, 7, READY),
    ev.StepApplied("j", 3, 7),
    ev.EvalDone("j", 3, 7, EVAL),
    ev.Stored("j", 3, 7, STORED),
    ev.Joined("j", 3, LOADED),
    ev.UpdateStored("j", 7, UPDATE),
    ev.RoundEvaluated("j", 7, EVALUATED),
    ev.Probed(PROBED),
    ev.StageBroke("j", 3, 7, "out of memory", "w-b"),
    ev.TurnBroke("j", 7, "train", "no such file"),
]


def sent(message: pb.Posted) -> ev.Event:
    return event_of(pb.Posted.FromString(message.SerializeToString()))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_comes_back_with_what_it_carried(event: ev.Event) -> None:
    found = sent(posted(event))
    assert found == event
    assert getattr(found, "message", None) == getattr(event, "message", None)


@pytest.mark.parametrize(
    "kind", ["", "Welcome", "LeaveAsked", "Drained", "Disconnected", "Event", "x" * 9000]
)
def test_an_event_that_is_not_the_computations_is_refused(kind: str) -> None:
    with pytest.raises(BadFrame, match="an event of kind"):
        event_of(pb.Posted(kind=kind, job="j"))


@pytest.mark.parametrize(
    "message",
    [
        posted(ev.StepDone("j", 3, 7, EVAL)),
        pb.Posted(kind="StepDone", job="j"),
        posted(ev.Probed(control.FromWorker(leaving=control.Leaving(reason="bye")))),
        posted(ev.StageLoaded("j", 3, control.FromWorker(introduction=control.Introduction()))),
        pb.Posted(kind="StepApplied", job="j", message=READY),
        pb.Posted(kind="TurnBroke", job="j", message=UPDATE),
    ],
)
def test_an_event_with_another_message_than_its_own_is_refused(message: pb.Posted) -> None:
    with pytest.raises(BadFrame, match="with a message of kind"):
        event_of(message)


@pytest.mark.parametrize("event", [e for e in EVENTS if not isinstance(e, ev.Probed)])
def test_a_message_about_another_job_than_its_event_is_refused(event: ev.Event) -> None:
    message = posted(event)
    if not message.HasField("message"):
        return
    message.job = "k"
    with pytest.raises(BadFrame, match="of job 'j' in an event of job 'k'"):
        event_of(message)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (ev.StepDone("j", 4, 7, READY), "plan version"),
        (ev.StepDone("j", 3, 8, READY), "step"),
        (ev.UpdateStored("j", 8, UPDATE), "round"),
    ],
)
def test_a_message_about_another_step_than_its_event_is_refused(event: ev.Event, field: str) -> None:
    """The coordinator would wait for ever for a step that the session believes reported."""
    with pytest.raises(BadFrame, match=f"a message of {field} '[37]' in an event of {field} [48]"):
        event_of(posted(event))


@pytest.mark.parametrize("job", ["", "j\u202e", "j" * 5000])
def test_a_jobs_name_is_checked(job: str) -> None:
    with pytest.raises(BadFrame, match="job"):
        event_of(pb.Posted(kind="StepApplied", job=job, plan_version=1, step=1))


def test_words_are_cleaned_and_cut() -> None:
    broke = sent(posted(ev.StageBroke("j", 3, 7, "go\u202e\x1b[2J" + "x" * 9000, "w\n" * 200)))
    assert isinstance(broke, ev.StageBroke)
    assert broke.reason.startswith("go  [2Jxx")
    assert len(broke.reason) == MAX_REASON_CHARS
    assert broke.lost_peer.isprintable()
    assert len(broke.lost_peer) == 100


def test_a_process_cannot_say_itself_that_its_stage_is_gone() -> None:
    broke = sent(posted(ev.StageBroke("j", 3, 7, "why", gone=True)))
    assert isinstance(broke, ev.StageBroke)
    assert not broke.gone
