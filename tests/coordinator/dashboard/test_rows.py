"""Messages become rows of plain values, whatever strangers put into them."""

from __future__ import annotations

import json
import math

import torch

from atoll import Job, Rows, TrainingSpec
from coordinator.client.overrides import override_job, settings
from coordinator.dashboard.model import content
from coordinator.dashboard.rows import MAX_LINKS, JobSeen, contributions_view, event_row, fleet_view, plan_of
from protos import atoll_control_pb2 as pb
from protos.convert import from_proto
from tests.coordinator.dashboard.pictured import HOSTILE, pictured, worker_id


def test_a_pictured_fleet_is_json_with_the_messages_own_names() -> None:
    world = pictured()
    found = content(fleet_view(world.status))
    json.dumps(found, allow_nan=False)
    rows = found["tables"]["workers"]
    assert len(rows) == len(world.status.workers)
    assert rows[worker_id(0)].keys() >= {
        "name",
        "state",
        "reason",
        "memory_bytes",
        "gflops",
        "site",
        "job",
        "stage",
    }
    assert found["tables"]["jobs"]["gpt2-medium-1"]["loss"] == world.updates["gpt2-medium-1"].loss


def test_figures_that_are_none_are_texts_and_not_broken_json() -> None:
    status = pb.StatusReply(jobs=[pb.JobUpdate(job="j", loss=math.nan, step_s=math.inf)])
    status.workers.add(worker="w", gflops=math.nan)
    text = json.dumps(content(fleet_view(status)), allow_nan=False)
    assert '"loss": "nan"' in text
    assert '"step_s": "inf"' in text


def test_of_many_links_the_slowest_are_shown() -> None:
    status = pb.StatusReply()
    for number in range(MAX_LINKS + 100):
        status.links.add(source=f"a{number}", target="b", bandwidth_bps=1e9 - number)
    rows = fleet_view(status).tables["links"]
    assert len(rows) == MAX_LINKS
    assert "a0>b" not in rows
    assert f"a{MAX_LINKS + 99}>b" in rows


def test_a_wait_and_a_silence_appear_when_they_are_long() -> None:
    beats = [
        pb.WorkerStatus(worker="w", seen_s_ago=s, waits_s=s, waits_what="activations") for s in (0.4, 7.9)
    ]
    short, long = (fleet_view(pb.StatusReply(workers=[beat])).tables["workers"]["w"] for beat in beats)
    assert (short["silent_s"], short["waits_s"], short["waits_what"]) == (0, 0, "")
    assert (long["silent_s"], long["waits_s"], long["waits_what"]) == (7, 7, "activations")


def test_a_job_keeps_plan_and_prices_that_later_updates_leave_out() -> None:
    world, seen = pictured(), JobSeen()
    first = world.updates["gpt2-medium-1"]
    names = fleet_view(world.status).tables["workers"]
    seen.take(first, settings(from_proto(first.training)))
    later = pb.JobUpdate()
    later.CopyFrom(first)
    later.ClearField("plan")
    later.ClearField("loss_now")
    for stage in later.stages:
        stage.ClearField("replace_s")
    later.step = 354
    seen.take(later)
    view = seen.view(names, {}, [])
    assert view.facts["step"] == 354
    assert view.facts["plan"] == plan_of(first.plan)
    assert view.facts["loss_now"] == first.loss_now
    assert view.tables["stages"]["1"]["replace_s"] == 52.0
    assert view.tables["stages"]["2"]["standby"] == worker_id(4)
    assert view.tables["workers"][worker_id(9)]["name"] == "judy", "named among those that are left out"


def test_the_command_that_reproduces_a_job_makes_the_same_training() -> None:
    training = from_proto(pictured().updates["gpt2-medium-1"].training)
    x = torch.zeros(4, 8)
    job = Job(torch.nn.Linear(8, 1), {"input": x}, Rows({"input": x}), TrainingSpec(steps=1, n_micro=1))
    assert override_job(job, settings(training)).training == training


def test_a_plan_of_one_replica_and_one_of_several_have_one_form() -> None:
    world = pictured()
    one, several = (plan_of(world.updates[job].plan) for job in ("gpt2-medium-1", "vision-diloco-2"))
    assert [len(replica["stages"]) for replica in one["replicas"]] == [4]
    assert [len(replica["stages"]) for replica in several["replicas"]] == [2, 2, 2]
    assert several["exchange"]["pair_rates"] == []


def test_contributions_are_summed_by_worker_and_by_day() -> None:
    done = pb.WorkDone(steps=1, computed_ms=1500, sent_bytes=5)
    given = (
        ("2026-11-30", "a", "x"),
        ("2026-11-29", "a", "x"),
        ("2026-11-30", "a", "y"),
        ("2026-11-30", "b", "x"),
    )
    rows = [
        pb.Credit(day=day, worker=worker, name=worker.upper(), owner=owner, useful=done, pending=done)
        for day, worker, owner in given
    ]
    rows[0].discarded.CopyFrom(done)
    rows[0].useful.energy_mj = 3_600_000
    found = content(contributions_view(rows))
    assert found["facts"]["totals"]["steps"] == 8
    assert found["facts"]["since"] == "2026-11-29"
    assert (found["facts"]["measured"], found["facts"]["totals"]["energy_j"]) == (1, 3600.0)
    assert found["tables"]["given"]["b"]["energy_j"] == 0
    assert found["tables"]["given"]["a"] == {
        "name": "A", "steps": 6, "samples": 0, "compute_s": 9.0, "bytes_in": 0, "bytes_out": 30,
        "pending_steps": 3, "discarded_steps": 1, "days": 2, "since": "2026-11-29", "recent": [3.0, 6.0],
        "energy_j": 3600.0,
    }  # fmt: skip
    assert found["tables"]["days"]["2026-11-30"]["workers"] == 2


def test_a_log_line_with_anything_in_it_is_a_row_of_texts() -> None:
    for fields, shown in (
        ('{"a": 1, "b": "x"}', {"a": "1", "b": "x"}),
        ("[1, 2]", {"text": "[1, 2]"}),
        ("{torn", {"text": "{torn"}),
        (json.dumps({HOSTILE: {"deep": [1]}}), {HOSTILE: '{"deep": [1]}'}),
    ):
        row = event_row(pb.LogLine(event="e", job="j", fields_json=fields))
        assert row["fields"] == shown
    assert event_row(pb.LogLine(fields_json='{"worker": "w-1"}'))["worker"] == "w-1"
