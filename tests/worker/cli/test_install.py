"""The worker as a user's service: files that the service managers take, and nothing without a join."""

from __future__ import annotations

import json
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hostos.command_line import run
from worker.cli import install
from worker.cli import main as cli
from worker.config import make_config, remember

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd is Linux's")


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of a worker that has joined, and a home folder."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    folder = tmp_path / "a state" / "100% mine"
    remember(make_config({"host": "lab", "state_dir": folder}, {}))
    (folder / "identity").mkdir()
    return folder


@linux
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(joined: Path, tmp_path: Path) -> None:
    service = install.systemd_unit(joined, tmp_path)
    unit = tmp_path / service.path.name
    unit.write_text(service.text)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(runtime)},
    )
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr


@linux
def test_the_units_command_line_is_the_workers(joined: Path, tmp_path: Path) -> None:
    text = install.systemd_unit(joined, tmp_path).text
    [line] = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    assert line.endswith(f'-P -m worker.cli join --state-dir "{str(joined).replace("%", "%%")}"')
    assert "RestartPreventExitStatus=2 6 7" in text


def test_the_agent_is_a_property_list_with_the_same_command_line(joined: Path, tmp_path: Path) -> None:
    service = install.launchd_agent(joined, tmp_path, 501)
    agent = plistlib.loads(service.text.encode())
    assert agent["ProgramArguments"][-5:] == ["-m", "worker.cli", "join", "--state-dir", str(joined)]
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert service.path == tmp_path / "Library" / "LaunchAgents" / "org.atoll.worker.plist"
    assert service.begin == (("launchctl", "bootstrap", "gui/501", str(service.path)),)


@linux
def test_a_dry_run_prints_and_changes_nothing(joined: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli.app, ["install", "--dry-run", "--state-dir", str(joined)]) == 0
    shown = capsys.readouterr().out
    assert "ExecStart=" in shown
    assert "run systemctl --user enable --now atoll-worker.service" in shown
    assert list(Path.home().iterdir()) == []


@linux
def test_it_is_written_started_and_removed(
    joined: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[str] = []
    monkeypatch.setattr(install, "_failure", lambda command: called.append(command[2]) or "")
    here = ["--state-dir", str(joined), "--json"]
    assert run(cli.app, ["install", *here]) == 0
    path = Path(json.loads(capsys.readouterr().out)["path"])
    assert path.read_text().startswith("[Unit]")
    assert run(cli.app, ["install", "--remove", *here]) == 0
    assert not path.exists()
    assert called == ["daemon-reload", "enable", "disable"]


@linux
def test_a_service_manager_that_does_not_answer_is_reported(
    joined: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "_failure", lambda command: f"{command[0]} failed: no bus")
    assert run(cli.app, ["install", "--state-dir", str(joined)]) == 1
    assert "systemctl failed: no bus; run it yourself" in capsys.readouterr().err


def test_who_has_not_joined_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli.app, ["install", "--dry-run", "--state-dir", str(tmp_path)]) == 2
    assert "no coordinator given and none remembered" in capsys.readouterr().err
