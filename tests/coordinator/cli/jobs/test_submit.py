"""`atoll submit` for a time instead of a number of steps, and for a fleet that is still coming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from coordinator.cli.jobs.submit import wait_for_workers
from coordinator.cli.main import app
from coordinator.client.client import Client
from hostos.command_line import run
from protos import atoll_control_pb2 as pb
from protos.convert import to_proto
from tests.coordinator.cli.test_main import JOB, _plan
from tests.coordinator.client.fake_owner import FakeOwnerServer, Script

FEDERATED = """
import torch
from atoll import Federated, Job, Registered, TrainingSpec

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x).mean()

def job():
    data = Registered("digits", inputs={"x": "x"})
    return Job(Net(), {"x": torch.zeros(4, 8)}, data, TrainingSpec(2, 1), federated=Federated())
"""


@pytest.fixture
def script() -> Script:
    fleet = [pb.WorkerStatus(worker=f"w-{at}", name=f"name{at}", state="pool") for at in (1, 2)]
    return Script(
        status=pb.StatusReply(version="0.1.0", workers=fleet),
        plan=pb.PlanReply(plan=to_proto(_plan()), fleet=fleet),
    )


@pytest.fixture
def server(script: Script) -> Iterator[FakeOwnerServer]:
    with FakeOwnerServer(script) as server:
        yield server


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(JOB)
    return str(tmp_path / "net.py")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--for", "1m"], 30),  # two seconds a step are predicted
        (["--for", "1m", "--steps", "12"], 30),
        (["--for", "1m", "--steps", "50"], 50),
        (["--for", "1s"], 1),
    ],
)
def test_a_job_for_a_time_has_the_steps_that_are_predicted_to_fit_but_no_fewer_than_asked_for(
    options: list[str], steps: int, script: Script, server: FakeOwnerServer, job_file: str
) -> None:
    assert run(app, ["submit", job_file, "--json", *options, *server.options]) == 0
    [request] = script.submissions.values()
    assert request.spec.training.steps == steps


def test_the_plan_that_the_steps_were_counted_by_is_shown(
    server: FakeOwnerServer, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["submit", job_file, "--for", "1m", *server.options]) == 0
    shown = capsys.readouterr().out
    assert "op_fence plan: 2 stages" in shown
    assert "30 steps, 1m00s as predicted" in shown


def test_a_plan_without_a_prediction_has_no_steps_to_count(
    script: Script, server: FakeOwnerServer, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.plan.plan.ClearField("prediction")
    assert run(app, ["submit", job_file, "--for", "1m", *server.options]) == 2
    assert "give --steps instead" in capsys.readouterr().err
    assert script.submissions == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--for", "1m", "--resume", "j-1"], "--resume starts at a later one"),
        (["--for", "soon"], "for example 24h"),
    ],
)
def test_a_time_that_cannot_be_meant_is_refused(
    options: list[str],
    words: str,
    script: Script,
    server: FakeOwnerServer,
    job_file: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(app, ["submit", job_file, *options, *server.options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert script.submissions == {}


@pytest.mark.parametrize(("given", "most"), [([], None), (["auto"], None), (["0"], 0), (["2"], 2)])
def test_standbys_are_the_coordinators_choice_or_at_most_so_many(
    given: list[str], most: int | None, script: Script, server: FakeOwnerServer, job_file: str
) -> None:
    options = ["--standbys", *given] if given else []
    assert run(app, ["submit", job_file, "--json", *options, *server.options]) == 0
    [request] = script.submissions.values()
    found = request.spec.standbys if request.spec.HasField("standbys") else None
    assert found == most
    assert run(app, ["submit", job_file, "--standbys", "-1", *server.options]) == 2


def test_rounds_are_not_counted_by_a_time(
    script: Script, server: FakeOwnerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "federated.py").write_text(FEDERATED)
    assert run(app, ["submit", str(tmp_path / "federated.py"), "--for", "1m", *server.options]) == 2
    assert "is federated" in capsys.readouterr().err
    assert script.submissions == {}


def test_a_fleet_is_waited_for_and_each_change_is_told_once(script: Script, server: FakeOwnerServer) -> None:
    told: list[str] = []
    pauses = []
    script.status.workers[1].state = "assigned"  # works for another job

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            script.status.workers[1].state = "pool"

    with Client(server.endpoint) as client:
        wait_for_workers(client, 2, told.append, pause)
        wait_for_workers(client, 0, told.append, pause)
    assert told == ["waiting for workers: 1 of 2 are idle"]
    assert len(pauses) == 3


def test_nothing_is_submitted_before_the_fleet_is_known_to_be_there(
    script: Script, server: FakeOwnerServer, job_file: str
) -> None:
    script.refuse["Status"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room for an answer")
    assert run(app, ["submit", job_file, *server.options]) == 9
    assert run(app, ["submit", job_file, "--workers", "2", *server.options]) == 9
    assert len(script.submissions) == 0


def test_who_stops_watching_learns_that_the_job_goes_on(
    script: Script,
    server: FakeOwnerServer,
    job_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(client: Client, job: str) -> Iterator[pb.JobUpdate]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "watch", interrupt)
    assert run(app, ["submit", job_file, "--watch", *server.options]) == 130
    assert len(script.submissions) == 1
    said = capsys.readouterr().err
    assert "goes on by itself: `atoll watch" in said
    assert "`atoll cancel" in said


def test_who_interrupts_a_submission_learns_that_there_is_none(
    script: Script,
    server: FakeOwnerServer,
    job_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "upload", interrupt)
    assert run(app, ["submit", job_file, *server.options]) == 130
    assert "nothing was submitted" in capsys.readouterr().err
    assert not script.submissions
