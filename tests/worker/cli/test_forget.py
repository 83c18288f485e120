"""`atoll-worker leave --forget` removes all of a worker, says what, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.errors import UsageError
from hostos.command_line import run
from worker.apps.store import AppStore
from worker.cli import main as cli
from worker.cli.forget import WHAT, forget
from worker.cli.running import LOCK_FILE, only_one
from worker.config import _KEPT, make_config, remember
from worker.data.registry import add_dataset


def worker_folder(folder: Path) -> Path:
    remember(make_config({"host": "lab", "state_dir": folder}, {}))
    (folder.parent / "table.csv").write_text("x\n1\n")
    add_dataset(folder, "mine", folder.parent / "table.csv", ["x:float32=x"])
    AppStore(folder).accept("ab" * 32)
    (folder / "blobs").mkdir()
    (folder / "blobs" / "ab").write_bytes(b"x" * 1000)
    return folder


def test_everything_of_a_worker_goes_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = worker_folder(tmp_path / "state")
    assert run(cli.app, ["leave", "--forget", "--state-dir", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["process"] is None
    removed = {gone["name"]: gone["bytes"] for gone in said["removed"]}
    assert removed.keys() == {"settings.toml", "blobs", "data", "apps", "version"}
    assert removed["blobs"] == 1000
    assert said["kept"] == []
    assert not folder.exists()
    assert (tmp_path / "table.csv").exists()
    assert run(cli.app, ["leave", "--forget", "--state-dir", str(folder)]) == 0
    assert "nothing of a worker is in" in capsys.readouterr().out


def test_other_things_in_the_folder_stay_and_links_lead_nowhere(tmp_path: Path) -> None:
    folder = worker_folder(tmp_path / "state")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("words")
    (folder / "notes.txt").write_text("mine")
    (folder / "federated").symlink_to(tmp_path / "precious")
    removed, rest = forget(folder)
    assert rest == ["notes.txt"]
    assert "federated" in {gone.name for gone in removed}
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "words"


def test_nothing_is_removed_under_a_running_worker(tmp_path: Path) -> None:
    folder = worker_folder(tmp_path / "state")
    with only_one(folder), pytest.raises(UsageError, match="runs from"):
        forget(folder)
    assert (folder / "blobs" / "ab").exists()


def test_whatever_a_worker_keeps_is_forgotten() -> None:
    assert {*_KEPT} - WHAT.keys() == {LOCK_FILE}
