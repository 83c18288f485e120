"""Options that a job file is read with: none of them does nothing without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import UsageError
from coordinator.cli.options import JobOptions

JOB = """
import torch
from atoll import Job, Rows, TrainingSpec

class Net(torch.nn.Module):
    def forward(self, x):
        return x.square().mean()

def job():
    training = TrainingSpec(steps=10, n_micro=4, local_steps=7)
    return Job(Net(), {"x": torch.zeros(2, 3)}, Rows({"x": torch.zeros(8, 3)}), training)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(JOB)
    return tmp_path / "net.py"


@pytest.mark.parametrize("exchange", [None, "exact", "auto"])
def test_local_steps_without_a_rule_that_has_them_are_refused(path: Path, exchange: str | None) -> None:
    with pytest.raises(UsageError, match=r"--local-steps 20 with --exchange .* give a rule"):
        JobOptions(exchange=exchange, local_steps=20).load(path)
    assert JobOptions(exchange=exchange).load(path).training.local_steps == 7, "a job file's are for its rule"


def test_local_steps_of_a_rule(path: Path) -> None:
    wanted = JobOptions(exchange="diloco", local_steps=20).load(path).training.local_exchange
    assert wanted is not None
    assert wanted.every == 20


@pytest.mark.parametrize(
    ("replicas", "exchange", "sets", "blocks"),
    [
        (None, None, [], 1),
        ("2", None, [], 2),
        ("auto", None, [], 4),
        ("auto", None, ["n_micro=32"], 8),
        ("auto", None, ["blocks=2"], 2),
        (None, "auto", [], 4),
        ("2", "auto", [], 2),
        ("auto", "diloco", [], 1),
    ],
)
def test_replicas_have_a_block_each(
    path: Path, replicas: str | None, exchange: str | None, sets: list[str], blocks: int
) -> None:
    job = JobOptions(replicas=replicas, exchange=exchange, sets=sets).load(path)
    assert job.training.blocks == blocks
