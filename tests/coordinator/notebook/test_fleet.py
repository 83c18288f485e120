"""A fleet and its runs as objects: what the coordinator answers, in words, tables and HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest

import atoll
from atoll.errors import ConnectionFailed, JobFailed, StorageError, UsageError
from coordinator.client.client import Client
from coordinator.notebook import html
from coordinator.notebook.fleet import Fleet
from coordinator.notebook.metrics import Metrics
from coordinator.notebook.run import Run
from protos import atoll_control_pb2 as pb
from tests.coordinator.client.fake_owner import FakeOwnerServer, Script

HOSTILE = "<script>alert(1)</script>"
LINES = [
    "step,name,value,time_s", "1,loss,2.5,100.000", "1,step_s,0.25,100.000", "2,loss,9.5,101.000",
    "1,rolled_back,1.0,102.000", "2,loss,2.25,103.000", "2,eval_loss,nan,103.000",
]  # fmt: skip


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[FakeOwnerServer]:
    with FakeOwnerServer(script) as server:
        yield server


@pytest.fixture
def fleet(server: FakeOwnerServer) -> Iterator[Fleet]:
    with Fleet(Client(server.endpoint)) as fleet:
        yield fleet


def update(step: int, state: str = "training", loss: float | None = None, **more: object) -> pb.JobUpdate:
    points = [] if loss is None else [pb.MetricPoint(step=step, name="loss", value=loss, time_s=step)]
    facts = {"job": "digits-1", "name": "digits", "steps": 4, **more}
    return pb.JobUpdate(step=step, state=state, loss=loss, metrics=points, **facts)  # type: ignore[arg-type]


def test_progress_is_yielded_as_it_comes_and_wait_returns_the_last(script: Script, fleet: Fleet) -> None:
    script.updates = [update(0, "planning"), update(2, loss=2.5), update(4, "finished", loss=2.0)]
    script.status.jobs.append(script.updates[-1])
    run = fleet.run("digits")
    assert [(p.step, p.state, p.loss, p.ended) for p in run.updates()] == [
        (0, "planning", None, False), (2, "training", 2.5, False), (4, "finished", 2.0, True),
    ]  # fmt: skip
    assert run.wait().state == "finished"
    assert "loss 2.0000" in str(run.status())


def test_progress_is_lines_where_there_is_neither_a_terminal_nor_jupyter(
    script: Script, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    script.updates = [update(2, loss=2.5), update(2, loss=2.5), update(4, "finished", loss=2.0)]
    script.status.jobs.append(script.updates[-1])
    assert fleet.run("digits-1").progress().step == 4
    assert capsys.readouterr().out.splitlines() == [
        "digits-1 training, step 2 of 4, loss 2.5000", "digits-1 finished, step 4 of 4, loss 2.0000",
    ]  # fmt: skip


def test_a_run_that_fails_raises_and_says_what_is_kept(script: Script, fleet: Fleet) -> None:
    script.updates = [update(3, "failed", reason="no worker is left", checkpoint_step=2)]
    script.status.jobs.append(script.updates[-1])
    run = fleet.run("digits")
    with pytest.raises(JobFailed, match=r"no worker is left; its checkpoint of step 2 is kept"):
        run.wait()
    with pytest.raises(JobFailed):
        run.progress()


def test_an_interrupt_says_how_to_come_back(
    script: Script, fleet: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script.updates = [update(2, loss=2.5)]
    script.status.jobs.append(script.updates[-1])

    def interrupted(self: Run, loggers: object = ()) -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Run, "updates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fleet.run("digits").progress()
    assert "atoll.connect().run('digits-1') finds it again" in capsys.readouterr().out


def test_of_two_runs_with_one_name_the_newest_is_found_and_an_unknown_one_is_refused(
    script: Script, fleet: Fleet
) -> None:
    script.status.jobs.extend([update(4, "finished"), update(1, job="digits-2")])
    assert fleet.run("digits").job == "digits-2"
    assert fleet.run("digits-1").job == "digits-1"
    assert [run.job for run in fleet.runs()] == ["digits-1", "digits-2"]
    with pytest.raises(UsageError, match="the newest are digits-1, digits-2"):
        fleet.run("letters")


def test_cancel_leaves_the_checkpoint(script: Script, fleet: Fleet) -> None:
    script.status.jobs.append(update(1))
    found = fleet.run("digits").cancel()
    assert (found.state, found.checkpoint_step, script.cancelled) == ("cancelled", 5, ["digits-1"])


def test_what_others_wrote_is_shown_as_text(script: Script, fleet: Fleet) -> None:
    script.status.workers.add(worker="w-1", name=HOSTILE, state="pool", reason=HOSTILE)
    script.status.jobs.append(update(1, name=HOSTILE, reason=HOSTILE, loss=1.0))
    run = fleet.run("digits-1")
    metrics = Metrics.of("digits-1", ["step,name,value,time_s", f"1,{HOSTILE},1.0,1.0"])
    shown = [fleet._repr_html_(), run._repr_html_(), run.status()._repr_html_(), metrics._repr_html_()]
    for text in shown:
        assert "<script" not in text
        assert "&lt;script&gt;" in text


def test_a_coordinator_that_is_away_is_shown_and_does_not_break_the_display(
    server: FakeOwnerServer, script: Script
) -> None:
    script.status.jobs.append(update(1))
    with Fleet(Client(server.endpoint, timeout_s=1.0)) as fleet:
        run = fleet.run("digits")
        server.__exit__(None, None, None)
        assert "not reached" in fleet._repr_html_()
        assert "not known" in run._repr_html_()


def test_a_curve_of_many_values_stays_small_and_one_of_odd_values_is_none() -> None:
    assert html.curve([]) == html.curve([float("nan"), 1.0]) == ""
    assert len(re.findall(r"\d,", html.curve([float(n % 7) for n in range(100_000)]))) <= html.MAX_POINTS + 1


def test_metrics_become_a_frame_by_step_without_what_was_rolled_back() -> None:
    found = Metrics.of("digits-1", LINES)
    frame = found.to_pandas()
    assert found.series("loss") == [(1, 2.5), (2, 2.25)]
    assert list(frame.columns) == ["loss", "step_s", "eval_loss"]
    assert frame.index.name == "step"
    assert frame.loc[2, "loss"] == 2.25
    assert pandas.isna(frame.loc[2, "step_s"])
    every = found.to_pandas(every_row=True)
    assert len(every) == len(found) == 5
    assert every["rolled_back"].sum() == 1


def test_metrics_that_are_not_there_or_damaged_are_refused() -> None:
    with pytest.raises(UsageError, match="it has none yet"):
        Metrics.of("j", LINES[:1]).series("loss")
    with pytest.raises(StorageError, match="damaged"):
        Metrics.of("j", [LINES[0], "1,loss,two,3.0"])
    assert "<table>" in Metrics.of("j", LINES[:1])._repr_html_()


def test_connect_takes_what_is_not_given_from_the_environment(
    server: FakeOwnerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_COORDINATOR", server.endpoint.address)
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path))
    with atoll.connect(insecure=True) as fleet:
        assert fleet.status().version == "0.1.0"
        assert repr(fleet) == f"<Fleet {server.endpoint.address}>"
    with pytest.raises(UsageError, match="give --token"):
        atoll.connect()
    with pytest.raises(ConnectionFailed):
        atoll.connect("127.0.0.1:1", insecure=True)
