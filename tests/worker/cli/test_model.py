"""The commands by which a worker's owner keeps weights on the machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from hostos.command_line import run
from worker.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_weights_are_added_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, state = tmp_path / "tiny-base", ["--state-dir", str(tmp_path / "state")]
    source.mkdir()
    safetensors.torch.save_file({"a": torch.ones(1000), "b": torch.zeros(3)}, source / "m.safetensors")

    assert run(app, ["model", "list", *state]) == 0
    assert "no weights are kept here" in capsys.readouterr().out
    assert run(app, ["model", "add", str(source), *state]) == 0
    told = capsys.readouterr()
    assert "tiny-base: 2 tensors, 4.1 KiB" in told.out
    assert "No worker runs now" in told.err
    assert run(app, ["model", "add", str(source / "m.safetensors"), "--name", "again", "--json", *state]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 2
    assert run(app, ["model", "list", "--json", *state]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["again", "tiny-base"]
    assert run(app, ["model", "remove", "tiny-base", *state]) == 0
    assert "0 bytes were freed" in capsys.readouterr().out, "the other has the same tensors"
    assert run(app, ["model", "remove", "again", "--json", *state]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] > 4000
    assert run(app, ["model", "remove", "again", *state]) == 2
    assert "no weights 'again' were added; there are: none" in capsys.readouterr().err
