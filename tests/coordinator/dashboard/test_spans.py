"""The last step that everybody has sent spans of, in one clock."""

from __future__ import annotations

from pathlib import Path

from coordinator.dashboard.spans import MAX_SPANS, timeline_view
from coordinator.storage.run_log import RECENT_SPANS, RECENT_STEPS, RunLogs
from protos import atoll_control_pb2 as pb
from tests.coordinator.dashboard.pictured import STAGES, pictured, worker_id


def chunk(worker: str, step: int, stage: int = 0, offset_s: float = 0.0, count: int = 1) -> pb.TraceChunk:
    made = pb.TraceChunk(worker=worker, clock_offset_s=offset_s)
    made.spans.stage = stage
    for number in range(count):
        made.spans.spans.add(kind="F", step=step, micro=number, start_s=number, end_s=number + 0.5)
    return made


def test_the_newest_step_that_all_have_sent_is_shown_by_stage() -> None:
    facts = timeline_view([chunk("b", 4, 1), chunk("a", 4), chunk("a", 5)]).facts
    assert facts["step"] == 4
    assert [(rank["worker"], rank["stage"]) for rank in facts["ranks"]] == [("a", 0), ("b", 1)]


def test_spans_stand_in_the_coordinators_time() -> None:
    [rank] = timeline_view([chunk("a", 1, offset_s=100.0)]).facts["ranks"]
    assert rank["spans"] == [["F", 0, 100.0, 100.5, "", 0]]


def test_what_is_no_span_or_too_many_is_left_out() -> None:
    wrong = chunk("a", 1)
    wrong.spans.spans.add(kind="F", step=1, start_s=2.0, end_s=1.0)
    wrong.spans.spans.add(kind="F", step=1, start_s=float("nan"), end_s=float("nan"))
    assert len(timeline_view([wrong]).facts["ranks"][0]["spans"]) == 1
    many = timeline_view([chunk("a", 1, count=3000), chunk("b", 1, count=3000)]).facts["ranks"]
    assert sum(len(rank["spans"]) for rank in many) == MAX_SPANS
    assert timeline_view([]).facts["ranks"] == []


def test_a_pictured_step_has_a_row_for_each_stage() -> None:
    facts = timeline_view(pictured().chunks).facts
    assert facts["step"] == 352
    assert [rank["worker"] for rank in facts["ranks"]] == [worker_id(stage) for stage in range(STAGES)]


def test_the_coordinator_keeps_the_last_steps_spans_and_so_many(tmp_path: Path) -> None:
    run = RunLogs(tmp_path, trace_bytes=0).of("j")
    assert run.recent(3) == []
    for step in range(20):
        run.traced(chunk("a", step))
    assert [kept.spans.spans[0].step for kept in run.recent(100)] == list(range(19 - RECENT_STEPS, 20))
    assert [kept.spans.spans[0].step for kept in run.recent(2)] == [18, 19]
    run.traced(chunk("a", 20, count=RECENT_SPANS + 1))
    assert run.recent(100) == [], "a chunk of more than the bound is not kept"
