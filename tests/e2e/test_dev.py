"""`atoll new` and `atoll dev` as a user runs them: each template trains, and no process is left."""

from __future__ import annotations

import json
import re
import signal
import sys
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest

from atoll.errors import JobFailed
from coordinator.cli.first import dev
from coordinator.cli.first.new import Template, write
from coordinator.cli.main import app
from hostos.command_line import run
from tests.e2e.test_demo import _left, _options
from tests.interrupts import own_session
from tests.parameters import sampled
from tests.patience import eventually

DEV = (sys.executable, "-m", "coordinator.cli", "dev")


@pytest.mark.slow  # each template is captured by tests/coordinator/cli/first; test_demo.py trains
@pytest.mark.parametrize("template", sampled(1, [Template.FEDERATED, Template.LANGUAGE, Template.VISION]))
def test_a_template_trains_on_workers_of_this_machine(template: Template, tmp_path: Path) -> None:
    job, kept, weights = write(tmp_path / "my-job", template), tmp_path / "kept", tmp_path / "w.safetensors"
    command = [*DEV, str(job), "--steps", "4", "--keep", str(kept), "-o", str(weights), "--json"]
    with own_session(command, **_options(tmp_path)) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert (kept / "page.log").exists()
    last = json.loads(out.splitlines()[-1])
    assert (last["state"], last["step"], last["name"]) == ("finished", 4, "my-job")
    assert last["loss"] > 0
    assert weights.stat().st_size > 1000
    assert {"coordinator.log", "host0.log", "host1.log"} <= {path.name for path in kept.iterdir()}
    assert _left(kept) == []


@pytest.mark.slow  # without a fleet: tests/coordinator/cli/first/test_ending.py
@pytest.mark.parametrize(
    ("number", "code"),
    sampled(1, [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]),
)
def test_a_fleet_ends_with_its_command_however_that_ends(number: int, code: int, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [*DEV, str(write(tmp_path / "job", Template.VISION)), "--keep", str(kept)]
    with own_session(command, **_options(tmp_path)) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "submitted" in line:
                break
        page = re.search(r"^page: (http://127.0.0.1:\d+/\S*)", "".join(lines), re.MULTILINE)
        assert page
        with pytest.raises(urllib.error.HTTPError, match="401"):  # it is there, and asks for the key
            urllib.request.urlopen(page[1])  # noqa: S310
        assert len(_left(kept)) >= 5
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == code
        eventually(lambda: [words for words in _left(kept) if " dev " not in words] == [])
    assert "Traceback" not in err
    assert ("nothing is left running" in err) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("options", "text", "words"),
    [
        ([], ", stand_in=stand_in", r"stand_in=\.\.\."),
        (["--workers", "1"], "", "give --workers 2"),
    ],
)
def test_a_federated_job_that_cannot_be_tried_here_is_refused_before_anything_starts(
    options: list[str], text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path / "job", Template.FEDERATED)
    job.write_text(job.read_text().replace(text, "") if text else job.read_text())
    assert run(app, ["dev", str(job), *options]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_job_that_fails_names_how_to_keep_its_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs end with the command; the message of a failed job names them."""

    def failed(*_: object) -> None:
        raise JobFailed("job-1 failed at step 0: no reason given; see `atoll logs job-1`")

    monkeypatch.setattr(dev, "_fleet", lambda *_: nullcontext())
    monkeypatch.setattr(dev, "_tell_where", lambda *_: None)
    monkeypatch.setattr(dev, "_train", failed)
    job = str(write(tmp_path / "job", Template.VISION))
    for options, hint in (([], True), (["--keep", str(tmp_path / "kept")], False)):
        assert run(app, ["dev", job, "--no-page", *options]) == JobFailed.exit_code
        error = capsys.readouterr().err
        assert ("`--keep DIR` keeps them" in error) == hint
        assert "job-1 failed" in error
