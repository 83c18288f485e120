"""Job files that `atoll new` writes: each is read and captured as it is, and nothing is overwritten."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from coordinator.cli.first.new import Template
from coordinator.cli.main import app
from coordinator.client.job_file import load_job
from hostos.command_line import run

MOST_LINES = 120  # a file that is read before it is run


@pytest.mark.parametrize("template", Template)
def test_a_template_is_a_small_job_file_that_bears_the_folders_name(
    template: Template, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trees"
    assert run(app, ["new", str(folder), "--template", template.value]) == 0
    path = folder / "job.py"
    assert f"atoll dev {path}" in capsys.readouterr().out.replace("\n", "")
    assert load_job(path).name == "trees"
    text = path.read_text()
    assert "my-job" not in text
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("template", Template)
def test_every_op_of_a_template_is_supported(template: Template, tmp_path: Path) -> None:
    assert run(app, ["new", str(tmp_path / "job"), "-t", template.value]) == 0
    assert run(app, ["ops", str(tmp_path / "job" / "job.py"), "--json"]) == 0


def test_the_constants_of_a_template_can_be_set(tmp_path: Path) -> None:
    assert run(app, ["new", str(tmp_path / "job")]) == 0
    text = tmp_path / "own.txt"
    text.write_text("To be, or not to be. " * 4000)
    found = load_job(tmp_path / "job" / "job.py", ["LAYERS=1", f"TEXT={text}", "STEPS=7"])
    assert found.training.steps == 7
    assert not any("blocks.1." in name for name, _ in found.module.named_parameters())
    assert found.data.materialise(8)[0].arrays["text"][:5].tobytes() == b"To be"


def test_a_job_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.py").write_text("mine")
    assert run(app, ["new", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "job.py").read_text() == "mine"


@pytest.mark.parametrize("name", ['a"b', "-x", "a b", "x" * 41])
def test_a_name_that_no_job_may_have_is_refused(name: str, tmp_path: Path) -> None:
    assert run(app, ["new", "--", str(tmp_path / name)]) == 2
    assert not (tmp_path / name).exists()


def test_a_script_learns_where_the_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["new", str(tmp_path / "job"), "-t", "vision", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"job_file": str(tmp_path / "job" / "job.py"), "template": "vision"}


def test_a_file_in_the_folders_place_is_named_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").write_text("mine")
    assert run(app, ["new", str(tmp_path / "job")]) == 2
    assert "job is a file; give a folder to create" in capsys.readouterr().err


def test_the_next_commands_can_be_copied_whatever_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(app, ["new", "my things/job"]) == 0
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert shlex.split(first)[:3] == ["atoll", "dev", "my things/job/job.py"]
    assert shlex.split(second)[:3] == ["atoll", "submit", "my things/job/job.py"]


def test_where_weights_go_is_looked_at_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output, code, said in (
        (tmp_path, 2, "is a folder; give a file, such as -o"),
        (tmp_path / "job.py" / "model", 9, "cannot write"),
    ):
        (tmp_path / "job.py").write_text("raise SystemExit('it was read')")
        assert run(app, ["dev", str(tmp_path / "job.py"), "--output", str(output)]) == code
        assert said in capsys.readouterr().err
        assert run(app, ["export", "j-1", "--output", str(output)]) == code
        assert said in capsys.readouterr().err
