"""`atoll journal`: what a folder's journal holds, and how to go on from one that is damaged."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cli.main import app
from coordinator.messages.facts import JobSubmitted, StepCommitted, to_record
from coordinator.services.recovery import recover
from coordinator.storage.journal import Journal
from hostos.command_line import run
from tests.sim.scripted import spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder whose journal holds five records, the fourth of them damaged."""
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.claim(0.0)
        journal.append([to_record(JobSubmitted("j-1", "", spec(), 0, {}, 0.5), 0.0)])
        journal.append([to_record(StepCommitted("j-1", 1, step, 0.5, 0.0), 0.0) for step in range(3)])
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("UPDATE events SET payload = substr(payload, 1, 30) WHERE number = 4")
    connection.close()
    return tmp_path


def test_check_names_what_is_damaged_and_cut_goes_on_before_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--state-dir", str(folder)]
    assert run(app, ["journal", "check", *here]) == 9
    told = capsys.readouterr().out
    assert "5 records, numbers 1 to 5: 1 CoordinatorStarted, 1 JobSubmitted, 3 StepCommitted" in told
    assert "record 4 (StepCommitted) is damaged: its checksum does not fit" in told
    assert "a coordinator cannot start: record 4" in told
    assert run(app, ["journal", "cut", "4", *here]) == 0
    saved = folder / "journal-cut-4.jsonl"
    assert "3 records are dropped" in capsys.readouterr().out  # with the term of the cut itself
    assert [json.loads(line)[0] for line in saved.read_text().splitlines()] == [4, 5, 6]
    assert run(app, ["journal", "check", *here, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["jobs"], report["damaged_records"], report["fold"]) == (3, 1, 0, "")
    with closing(Journal(folder / "journal.sqlite")) as journal:
        assert recover(journal, 2).ledger.jobs["j-1"].steps == 1
        assert journal.claim(0.0) == 3  # above the term that was cut


def test_a_check_beside_a_coordinator_works_and_a_cut_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--database", f"sqlite:///{folder / 'journal.sqlite'}", "--state-dir", str(folder)]
    with closing(Journal(folder / "journal.sqlite")) as journal:
        journal.claim(0.0)
        assert run(app, ["journal", "check", *here, "--json"]) == 9
        assert json.loads(capsys.readouterr().out)["records"] == 6
        assert run(app, ["journal", "cut", "4", *here]) == 2
        assert "another coordinator" in capsys.readouterr().err


def test_a_folder_without_a_journal_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["journal", "check", "--state-dir", str(tmp_path)]) == 2
    assert f"there is no journal in {tmp_path}" in capsys.readouterr().err.replace("\n", "")
