"""`atoll-worker limits`, `config`, `pause` and `resume` where no worker runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostos.command_line import run
from worker.cli import main as cli
from worker.config import make_config
from worker.manners.limits import Limits, limits_from
from worker.manners.settings_file import read_settings

if TYPE_CHECKING:
    import pytest


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(cli.app, [*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_limits_are_set_shown_and_reset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--state-dir", str(tmp_path))
    given = ("--cpu", "50", "--memory", "2GiB", "--per-day", "1GB", "--hours", "22-8", "--when-used", "pause")
    found = said(capsys, "limits", *here, *given)
    assert found["now"] is None
    assert found["limits"]["memory_bytes"] == 2 << 30
    assert limits_from(read_settings(tmp_path)) == Limits(
        cpu_percent=50.0, day_bytes=10**9, hours="22-8", when_used="pause"
    )
    assert make_config({"host": "lab", "state_dir": tmp_path}, {}).memory_bytes == 2 << 30
    assert said(capsys, "limits", *here) == found
    said(capsys, "limits", *here, "--reset", "--cpu", "70")
    assert read_settings(tmp_path) == {"cpu_percent": 70.0}


def test_an_impossible_limit_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli.app, ["limits", "--state-dir", str(tmp_path), "--cpu", "50"]) == 0
    for wrong in (("--cpu", "0"), ("--upload-mbit", "0.01"), ("--hours", "soon"), ("--memory", "5")):
        assert run(cli.app, ["limits", "--state-dir", str(tmp_path), *wrong]) == 2
    assert read_settings(tmp_path) == {"cpu_percent": 50.0}
    assert "give a number from 1 to" in capsys.readouterr().err


def test_config_says_where_each_value_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.toml").write_text('cpu_percent = 50\ncpu_precent = 20\nhost = "lab"\n')
    found = said(capsys, "config", "--state-dir", str(tmp_path))
    rows = {row["name"]: (row["value"], row["from"]) for row in found["settings"]}
    assert rows["cpu_percent"] == (50, "settings")
    assert rows["port"] == (7700, "default")
    assert found["unknown"] == ["cpu_precent"]
    assert found["file"] == str(tmp_path / "settings.toml")


def test_a_worker_may_be_paused_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--state-dir", str(tmp_path))
    assert said(capsys, "pause", *here) == {"process": None, "paused": True, "taken_up": False}
    assert limits_from(read_settings(tmp_path)).paused
    assert said(capsys, "resume", *here)["paused"] is False
    assert not limits_from(read_settings(tmp_path)).paused
