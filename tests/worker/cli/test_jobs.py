"""`atoll-worker jobs` says what an owner can do while no job asks, and waits for one that is on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostos.command_line import run
from worker.cli import jobs
from worker.cli import main as cli
from worker.cli.running import only_one
from worker.data.consent import ConsentStore
from worker.data.policy import Terms
from worker.data.registry import add_dataset

TERMS = Terms("digits-7", "digits", "research", "ab" * 32, "ef" * 32, 2, 40)


def said(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert run(cli.app, ["jobs", *words, "--state-dir", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def state(tmp_path: Path) -> Path:
    table = tmp_path / "t.csv"
    table.write_text("x,y\n1,0\n2,1\n3,0\n4,1\n")
    add_dataset(tmp_path / "state", "digits", table, ["x:float32=x", "y:int64=y"])
    return tmp_path / "state"


def test_without_a_job_the_next_step_is_said(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "`atoll-worker data add NAME PATH`" in said(capsys, tmp_path / "another")
    assert "no worker runs" in said(capsys, state)
    with only_one(state):
        assert "`atoll-worker jobs --wait`" in said(capsys, state)


def test_a_job_that_has_not_asked_yet_is_waited_for(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []

    def sleep(seconds: float) -> None:
        looked.append(seconds)
        if len(looked) == 3:
            ConsentStore(state).asked(TERMS, (("data set", "digits"),), 10.0)

    monkeypatch.setattr(jobs.time, "sleep", sleep)
    assert said(capsys, state, "--wait").startswith("job digits-7: waits for you")
    assert len(looked) == 3
