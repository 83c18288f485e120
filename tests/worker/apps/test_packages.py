"""An app that brings packages: its worker's owner reads which, allows them, and finds them nowhere else."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import HUNG_S

pytest.importorskip("flwr")
pytest.importorskip("pip")

from hostos.command_line import run
from hostos.packages.wheels import table_of
from protos import atoll_apps_pb2 as pb
from tests.hostos.packages.made_wheels import make_wheel
from tests.worker.apps.test_host import Hosted, started
from worker.apps import run as app_run
from worker.cli import main as cli

__all__ = ["started"]


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    make_wheel(tmp_path / "wheels", "tinymath", {"tinymath.py": "def twice(x):\n    return 2 * x\n"})
    return tmp_path / "wheels"


@pytest.fixture
def ended() -> Iterator[list[Hosted]]:
    made: list[Hosted] = []
    yield made
    for hosted in made:
        hosted.run.end("the test is over")
        hosted.run.join(HUNG_S)


def refusal(hosted: Hosted, words: str) -> pb.AppRefused:
    return hosted.until(lambda m: words in m.refused.reason).refused


def test_a_worker_that_did_not_opt_in_names_the_packages_and_how_its_owner_can_allow_them(
    tmp_path: Path, wheels: Path, started: queue.SimpleQueue[pb.ChildSetup], ended: list[Hosted]
) -> None:
    hosted = Hosted(tmp_path, more=table_of(wheels))
    ended.append(hosted)
    assert "app (and the 1 packages that it brings)" in refusal(hosted, "not accepted").reason
    hosted.store.accept(hosted.bundle.hash)
    hosted.run.consent_changed()
    refused = refusal(hosted, "tinymath 1.0")
    assert refused.kind == pb.APP_REFUSAL_OTHER
    assert "`atoll-worker join --allow-apps --app-packages DIR`" in refused.reason
    assert started.empty()
    assert not (hosted.store.root / "packages").exists()


def test_its_owner_reads_what_will_be_installed_and_only_the_apps_process_gets_it(
    tmp_path: Path,
    wheels: Path,
    started: queue.SimpleQueue[pb.ChildSetup],
    ended: list[Hosted],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosted = Hosted(tmp_path, more=table_of(wheels), packages=str(wheels))
    ended.append(hosted)
    refusal(hosted, "not accepted")
    assert not (hosted.store.root / "packages").exists()  # nothing is fetched before consent
    here = ["--state-dir", str(hosted.store.root.parent)]
    for words in ("show", "accept"):
        assert run(cli.app, ["apps", words, hosted.bundle.hash[:12], *here]) == 0
        shown = capsys.readouterr().out
        assert "it installs packages of its own" in shown
        assert "tinymath 1.0  sha256 " in shown
    hosted.run.consent_changed()
    setup = started.get(timeout=HUNG_S)
    site = Path(setup.packages_dir)
    assert (site / "tinymath.py").exists()
    assert site.is_relative_to(hosted.store.root / "packages")
    assert setup.packages_dir not in sys.path
    (site / "tinymath.py").chmod(0o600)
    (site / "tinymath.py").write_text("stolen = True\n")
    hosted.run._standing = pb.FromNode(ready=pb.AppReady(run=5))
    hosted.run.task(pb.AppTask(run=5, message="m", left_s=30.0))
    reply = hosted.until(lambda m: m.HasField("reply")).reply
    assert reply.error == app_run.APP_CRASHED
    assert "'tinymath.py' was changed" in reply.reason


def test_what_is_missing_in_its_owners_source_is_refused_without_its_folders_and_addresses(
    tmp_path: Path, wheels: Path, started: queue.SimpleQueue[pb.ChildSetup], ended: list[Hosted]
) -> None:
    (tmp_path / "empty").mkdir()
    hosted = Hosted(tmp_path, more=table_of(wheels), packages=str(tmp_path / "empty"))
    ended.append(hosted)
    refusal(hosted, "not accepted")
    hosted.store.accept(hosted.bundle.hash)
    hosted.run.consent_changed()
    refused = refusal(hosted, "no wheel with an accepted hash")
    assert "tinymath 1.0" in refused.reason
    assert str(tmp_path) not in refused.reason
    assert started.empty()
