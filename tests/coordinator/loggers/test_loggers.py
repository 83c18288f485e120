"""Loggers get each figure once, in their library's own form; others' plug-ins are found by entry point."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from atoll.errors import UsageError
from coordinator.loggers.plugin import Loggers, RunFacts, known_loggers, open_logger
from coordinator.notebook.progress import Point

BLOCK, WHOLE, LAST = 32768, 1, 4  # of LevelDB's log format: bytes, and kinds of pieces of a record
POINTS = [Point(1, "loss", 2.5, 100.0), Point(1, "step_s", 0.25, 100.0), Point(2, "loss", 2.25, 101.5)]


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFacts:
    monkeypatch.chdir(tmp_path)
    return RunFacts("digits-3", "digits", tmp_path / "logs")


def logged(name: str, facts: RunFacts) -> None:
    to = Loggers([open_logger(name, facts)])
    to.add(POINTS[:2])
    to.add(POINTS[2:])
    to.close("finished")


@dataclass
class Kept:
    """A logger that keeps what it is given."""

    run: RunFacts | None = None
    given: list[tuple[int, dict[str, float], float]] = field(default_factory=list)
    state: str = ""

    def add(self, step: int, values: dict[str, float], time_s: float) -> None:
        self.given.append((step, dict(values), time_s))

    def close(self, state: str) -> None:
        self.state = state


def test_figures_of_a_step_come_together_and_a_step_that_is_done_again_comes_once() -> None:
    kept = Kept()
    to = Loggers([kept])
    to.add(POINTS)
    to.add([Point(2, "loss", 9.0, 110.0), Point(3, "loss", 2.0, 111.0)])
    to.close("cancelled")
    assert kept.given == [
        (1, {"loss": 2.5, "step_s": 0.25}, 100.0), (2, {"loss": 2.25}, 101.5), (3, {"loss": 2.0}, 111.0),
    ]  # fmt: skip
    assert kept.state == "cancelled"


def test_a_logger_that_fails_at_its_end_keeps_no_other_from_its_own() -> None:
    kept = Kept()
    broken: Any = SimpleNamespace(close=lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Loggers([broken, kept]).close("finished")
    assert kept.state == "finished"


def test_a_plug_in_of_an_installed_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: RunFacts
) -> None:
    folder = tmp_path / "site" / "others-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    here = "tests.coordinator.loggers.test_loggers"
    (folder / "entry_points.txt").write_text(f"[atoll.loggers]\nkept = {here}:Kept\n")
    monkeypatch.syspath_prepend(folder.parent)
    assert "kept" in known_loggers()
    found = open_logger("kept", facts)
    assert getattr(found, "run", None) is facts


def test_an_unknown_name_is_refused_with_those_that_there_are(facts: RunFacts) -> None:
    with pytest.raises(UsageError, match="mlflow, tensorboard, trackio, wandb"):
        open_logger("wandbb", facts)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_without_its_library_a_logger_says_what_to_install(
    name: str, facts: RunFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"coordinator.loggers.{name}", raising=False)
    for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"pip install 'atoll\[{name}\]'"):
        open_logger(name, facts)


def records(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, whose first 7 bytes are wandb's own."""
    at, found = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no head fits there: the rest of the block is empty
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        found += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            yield found
            found = b""


def test_wandb_writes_them_to_its_file_of_an_offline_run(
    facts: RunFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "islands")
    logged("wandb", facts)
    [path] = facts.folder.rglob("run-digits-3.wandb")
    rows, runs = [], []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({".".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
        elif record.WhichOneof("record_type") == "run":
            runs.append((record.run.project, record.run.display_name, record.run.run_id))
    assert runs[0] == ("islands", "digits", "digits-3")
    assert [(row["_step"], row["loss"]) for row in rows] == [("1", "2.5"), ("2", "2.25")]
    assert rows[0]["step_s"] == "0.25"


def test_mlflow_writes_them_to_its_store(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{facts.folder}")
    logged("mlflow", facts)
    client = MlflowClient(f"file://{facts.folder}")
    experiment = client.get_experiment_by_name("atoll")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["atoll.job"]) == (
        "digits", "FINISHED", "digits-3",
    )  # fmt: skip
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [(1, 2.5, 100_000), (2, 2.25, 101_500)]


def test_trackio_is_called_as_its_public_api_has_it(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded stand-in: trackio's own dependencies exclude those of transformers 5.

    Recorded from trackio 0.43.0: ``init(project, name=..., config=..., resume=..., embed=...) -> Run``,
    ``Run.log(metrics, step=...)``, ``Run.finish()``.
    """
    calls: list[tuple[Any, ...]] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            calls.append(("log", metrics, step))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(
        project: str,
        name: str | None = None,
        *,
        config: Any = None,
        resume: str = "never",
        embed: bool = True,
    ) -> Run:
        calls.append(("init", project, name, config, resume, embed))
        return Run()

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "coordinator.loggers.trackio", raising=False)
    logged("trackio", facts)
    monkeypatch.delitem(sys.modules, "coordinator.loggers.trackio")
    assert calls == [
        ("init", "atoll", "digits-3", {"job": "digits"}, "allow", False),
        ("log", {"loss": 2.5, "step_s": 0.25}, 1),
        ("log", {"loss": 2.25}, 2),
        ("finish",),
    ]


def test_every_logger_of_ours_is_documented_and_has_its_extra() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "notebook.md").read_text()
    for name in known_loggers():
        if importlib.util.find_spec(f"coordinator.loggers.{name}"):
            assert f"`{name}`" in page
            assert f"atoll[{name}]" in page
