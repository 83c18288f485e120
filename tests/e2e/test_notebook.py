"""The script and the notebook of the docs, against a real coordinator and real workers."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from safetensors.torch import load_file

import atoll
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.job_file import load_job
from tests.coordinator.loggers.test_loggers import Kept

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_script_trains_a_job_of_its_own_follows_it_and_exports_it(tmp_path: Path) -> None:
    job = load_job(ROOT / "examples" / "mlp_digits.py", ["steps=12", "eval_every=6"])
    kept = Kept()
    with LoopbackFleet(2) as workers, atoll.connect(state_dir=workers.state) as fleet:
        assert [worker.state for worker in fleet.status().workers] == ["pool", "pool"]
        said: list[str] = []
        run = fleet.train(job, name="digits", loggers=[kept], tell=said.append)
        assert any("checking" in words for words in said)
        seen = list(run.updates())
        assert (seen[-1].state, seen[-1].step) == ("finished", 12)
        frame = run.metrics().to_pandas()
        assert list(frame.index) == list(range(1, 13))
        assert {"loss", "eval_loss", "step_s"} <= set(frame.columns)
        assert frame["loss"].iloc[-1] < frame["loss"].iloc[0]
        logged = [(step, values["loss"]) for step, values, _ in kept.given if "loss" in values]
        assert logged == run.metrics().series("loss")
        assert kept.state == "finished"
        again = fleet.run("digits")
        assert again.job == run.job
        exported = again.export(tmp_path / "folder")
        tensors = load_file(tmp_path / "folder" / "model.safetensors")
        assert exported.tensors == len(tensors)
        job.module.load_state_dict(again.weights())
        assert all((tensors[name] == value).all() for name, value in job.module.state_dict().items())
        assert run.trace(tmp_path / "trace.json").stat().st_size > 1000
        more = fleet.train(job, overrides=["steps=14"], resume=run, tell=said.append)
        assert more.wait().step == 14
        assert more.metrics().series("loss")[0][0] == 13


@pytest.mark.slow
def test_the_notebook_of_the_examples_runs_and_shows_tables_and_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "it is committed without outputs"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with LoopbackFleet(2) as workers:
        monkeypatch.setenv("ATOLL_STATE", str(workers.state))
        client = NotebookClient(
            notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        )
        client.execute()
    shown = [
        output["data"].get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    assert sum("<table" in text for text in shown) >= 5
    assert any("<polyline" in text and "60 of 60" in text for text in shown)
    assert (tmp_path / "digits" / "model.safetensors").exists()
