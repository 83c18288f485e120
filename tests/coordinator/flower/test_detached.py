"""Records and output of detached runs: what a reader finds, whatever became of the process."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import UsageError
from coordinator.cli.flower.runs import outcome
from coordinator.flower import detached
from coordinator.flower.detached import Detached, Keeper, Output, RunFolder, Stage
from hostos.files.folder_lock import FolderLock
from tests.patience import HUNG_S, eventually

RECORD = Detached("1f3a", "app", "1.0", "0" * 64, "/app", "", time.time(), nodes=4)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return made(tmp_path, RECORD)


def made(state_dir: Path, record: Detached) -> RunFolder:
    found = RunFolder(state_dir / detached.FOLDER / record.run)
    found.path.mkdir(parents=True)
    found.write(record)
    (found.path / detached.OUTPUT).write_bytes(b"")
    return found


def test_events_move_the_record_and_rounds_are_not_written_each(folder: RunFolder) -> None:
    keeper = Keeper(folder)
    keeper.heard({"event": "waiting", "reason": "1 of 4 nodes are ready"})
    assert (folder.read().stage, folder.read().reason) == (Stage.WAITING, "1 of 4 nodes are ready")
    keeper.heard({"event": "nodes", "nodes": [{}, {}, {}, {}]})
    keeper.heard({"event": "started"})
    assert (folder.read().stage, folder.read().nodes) == (Stage.RUNNING, 4)
    written = (folder.path / detached.RECORD).stat().st_ino
    for number in range(1, 4):
        keeper.heard({"event": "round", "round": number, "rounds": 3})
    # Rounds of a few milliseconds are counted, but not each of them is a file.
    assert (folder.path / detached.RECORD).stat().st_ino == written
    keeper.heard({"event": "waiting", "reason": "an app in its loop"})
    keeper.ended(Stage.DONE, 0)
    found = folder.read()
    assert (found.stage, found.round, found.rounds, found.code, found.reason) == (Stage.DONE, 3, 3, 0, "")


def test_a_run_whose_process_is_gone_is_lost_unless_it_had_ended(folder: RunFolder) -> None:
    lock = FolderLock(folder.path / detached.LOCK, str)
    folder.write(replace(RECORD, stage=Stage.RUNNING))
    assert folder.read().stage is Stage.RUNNING
    lock.release()
    assert folder.read().stage is Stage.LOST
    folder.write(replace(RECORD, stage=Stage.STOPPED))
    assert folder.read().stage is Stage.STOPPED


def test_a_run_that_has_only_just_been_started_is_not_lost(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "STARTS_WITHIN_S", 1e6)  # no machine is too slow
    assert folder.read().stage is Stage.STARTING
    folder.write(replace(RECORD, started_s=time.time() - 2 * detached.STARTS_WITHIN_S))
    assert folder.read().stage is Stage.LOST
    assert not folder.stop()


def test_two_processes_do_not_run_the_same_run(folder: RunFolder) -> None:
    Keeper(folder)
    with pytest.raises(UsageError, match="runs it already"):
        Keeper(folder)


def test_runs_are_found_by_their_first_digits(tmp_path: Path) -> None:
    for number, run in enumerate(("1f3a", "1f4b", "2c")):
        made(tmp_path, replace(RECORD, run=run, started_s=100.0 + number, stage=Stage.DONE))
    found = {prefix: detached.find(tmp_path, prefix) for prefix in ("", "1f3", "2", "1f3a", "9")}
    names = {prefix: folder.path.name if folder else None for prefix, folder in found.items()}
    assert names == {"": "2c", "1f3": "1f3a", "2": "2c", "1f3a": "1f3a", "9": None}
    with pytest.raises(UsageError, match="2 runs begin with 1f"):
        detached.find(tmp_path, "1f")
    for wrong in ("../x", "run.json", "1F"):
        with pytest.raises(UsageError, match="is not a run"):
            detached.find(tmp_path, wrong)
    assert detached.find(tmp_path / "nowhere", "") is None


def test_a_damaged_record_hides_no_other_run(tmp_path: Path) -> None:
    made(tmp_path, replace(RECORD, stage=Stage.DONE))
    for text in ("", "[]", '{"stage": "odd"}', '{"run": "2c"}'):
        path = tmp_path / detached.FOLDER / f"{len(text)}"
        path.mkdir()
        (path / detached.RECORD).write_text(text)
    assert [record.run for record in detached.runs(tmp_path)] == ["1f3a"]


def test_only_so_many_ended_runs_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "MAX_ENDED", 2)
    for number in range(4):
        made(tmp_path, replace(RECORD, run=f"{number}", started_s=float(number), stage=Stage.DONE))
    detached._forget_oldest(tmp_path)
    assert [record.run for record in detached.runs(tmp_path)] == ["3"]


def test_output_is_bounded_and_its_reader_follows_through_the_change_of_files(folder: RunFolder) -> None:
    lock = FolderLock(folder.path / detached.LOCK, str)
    folder.write(replace(RECORD, stage=Stage.RUNNING))
    reading, writing = os.pipe()
    output = Output(folder.path, max_bytes=100)
    writer = threading.Thread(target=output.take, args=(reading,))
    writer.start()
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.extend(folder.output(follow=True)))
    reader.start()
    lines = [f"line {number:02d}\n".encode() for number in range(30)]
    for at, line in enumerate(lines):
        os.write(writing, line)
        eventually(lambda at=at: lines[at] in b"".join(read))
    os.close(writing)
    writer.join(HUNG_S)
    folder.write(replace(RECORD, stage=Stage.DONE))
    lock.release()
    reader.join(HUNG_S)
    assert b"".join(read) == b"".join(lines)
    kept = b"".join(folder.output())
    assert len(kept) <= 200
    assert kept.endswith(lines[-1])


def test_how_a_run_ended_is_its_errors_exit_code() -> None:
    assert outcome(None) == (Stage.DONE, 0, "")
    assert outcome(UsageError("odd")) == (Stage.FAILED, 2, "odd")
    assert outcome(SystemExit(143))[:2] == (Stage.STOPPED, 130)
    assert outcome(ZeroDivisionError("x")) == (Stage.FAILED, 1, "ZeroDivisionError: x")
