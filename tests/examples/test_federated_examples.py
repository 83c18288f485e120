"""The federated job files: captured, checked, and trained for a round on data registered by its owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.federated import Floors
from coordinator.capture.capture import capture
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare
from experiments.datasets import download
from experiments.datasets import split as splitting
from experiments.datasets.corpora import Document, Mnist
from tests.inprocess.federation import LocalFederation, local_model
from worker.data.registry import add_dataset, open_dataset

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DRAW = np.random.default_rng(0)
DIGITS = Mnist(
    DRAW.integers(0, 256, (200, 28, 28), np.uint8),
    (np.arange(200) % 10).astype(np.uint8),
    DRAW.integers(0, 256, (64, 28, 28), np.uint8),
    (np.arange(64) % 10).astype(np.uint8),
)


def registered(tmp_path: Path, split: splitting.Split, out: Path) -> dict[str, Any]:
    """Each client's arrays, as its own command has stored them."""
    schema = (out / "schema.txt").read_text().splitlines()
    for part in split.clients:
        add_dataset(tmp_path / part.client, split.data, out / part.file, schema)
    return {part.client: open_dataset(tmp_path / part.client, split.data) for part in split.clients}


def one_round(job: Any, clients: dict[str, Any]) -> LocalFederation:
    assert job.federated is not None
    found = capture(job.module, job.example_inputs, job.training, job.metrics)
    model = local_model(found.train, found.evaluation, found.state, job.training)
    # FedImpro sends statistics of classes, which its data owners have to allow.
    allowed = Floors(statistics=5130 if job.federated.strategy == "fedimpro" else 0)
    federation = LocalFederation(model, job.federated, clients, inputs=job.data.inputs, floors=allowed)
    before = dict(federation.weights)
    federation.run_round()
    assert any(not np.array_equal(before[name], array) for name, array in federation.weights.items())
    return federation


@pytest.mark.parametrize("strategy", ["feddyn", "vhl", "fedimpro"])
def test_federated_mnist_is_captured_and_trains_under_its_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(download, "read", lambda name: {})
    monkeypatch.setattr("experiments.datasets.corpora.mnist", lambda files: DIGITS)
    knobs = [f"STRATEGY={strategy}", "MICRO_BATCH=16", "TEST_IMAGES=64"]
    job = load_job(EXAMPLES / "federated_mnist.py", knobs)
    prepared = prepare(job)
    assert prepared.spec.federated is not None
    assert prepared.spec.federated.data == "mnist"
    split = splitting.split_images(DIGITS, "iid", 2, 0, 0, tmp_path / "out")
    federation = one_round(job, registered(tmp_path, split, tmp_path / "out"))
    found = federation.evaluate_clients()
    assert all(0.0 <= each.metrics["accuracy"] <= 1.0 for each in found.values())


def test_federated_mnist_says_what_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="atoll data fetch mnist"):
        load_job(EXAMPLES / "federated_mnist.py")


def test_federated_brown_trains_on_genres(tmp_path: Path) -> None:
    texts = [Document(f"c{i}", genre, genre * 900) for i, genre in enumerate(["news", "lore", "humor"])]
    split = splitting.split_texts(texts, "natural", 0, 0, tmp_path / "out")
    knobs = ["LOCAL_STEPS=2", "MICRO_BATCH=4", "WIDTH=8", "LAYERS=2", "CLIENTS=2"]
    job = load_job(EXAMPLES / "federated_brown.py", knobs)
    assert prepare(job).spec.eval_data is None
    one_round(job, registered(tmp_path, split, tmp_path / "out"))
