"""A job that goes on from another's checkpoint ends where one job of all its steps would have ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.real_workers import LoopbackFleet
from coordinator.cli.main import app
from hostos.command_line import run

STEPS = 6
JOB = """
import torch
from atoll import Job, Optimizer, Rows, TrainingSpec
from tests.models import branches

def job():
    example = branches(dropout=0.1)
    batches = [example.make_batch(seed) for seed in range(5)]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    training = TrainingSpec(steps=1, n_micro=2, seed=3, optimizer=Optimizer(lr=3e-3, weight_decay=0.01))
    return Job(example.module, example.example_inputs, Rows(rows), training, "halves")
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2) as started:
        yield started


def test_two_halves_end_in_the_bits_of_the_whole(
    fleet: LoopbackFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "halves.py").write_text(JOB)
    here = ["--state-dir", str(fleet.state), "--json"]

    def trained(steps: int, *options: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Submit to two stages, wait, export."""
        command = ["submit", str(tmp_path / "halves.py"), "--steps", str(steps), "--partitioner", "even"]
        assert run(app, [*command, *options, *here]) == 0
        job = json.loads(capsys.readouterr().out)["job"]
        update = fleet.client.wait(job)
        assert (update.step, update.checkpoint_step, len(update.stages)) == (steps, steps, 2)
        weights = tmp_path / f"{job}.safetensors"
        assert run(app, ["export", job, "-o", str(weights), *here]) == 0
        capsys.readouterr()
        return job, load_file(weights)

    first, half = trained(STEPS)
    _, resumed = trained(2 * STEPS, "--resume", first)
    _, whole = trained(2 * STEPS)
    assert resumed.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []
    moved = [name for name in whole if not torch.equal(half[name], whole[name])]
    assert "stem.weight" in moved
