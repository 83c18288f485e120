"""The best checkpoint comes home with the bits that a job of as many steps ends with."""

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
from protos import atoll_control_pb2 as pb

STEPS = 24
JOB = """
import torch
from torch import nn
from atoll import Job, Optimizer, Rows, TrainingSpec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.outer(torch.tanh(self.inner(x))), y)

def job():
    random = torch.Generator().manual_seed(7)
    some = {"x": torch.randn(32, 8, generator=random), "y": torch.randint(4, (32,), generator=random)}
    rows, held_out = ({name: rows[at] for name, rows in some.items()} for at in (slice(24), slice(24, 32)))
    training = TrainingSpec(
        steps=1, n_micro=2, seed=3, optimizer=Optimizer(lr=3e-2), blocks=2, eval_batches=2, eval_every=2,
        checkpoint_every=2,
    )
    examples = {name: values[:4] for name, values in rows.items()}
    return Job(Net(), examples, Rows(rows, held_out), training, "best")
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2) as started:
        yield started


@pytest.mark.parametrize(
    "how", [("--partitioner", "even"), ("--replicas", "2"), ("--exchange", "diloco", "--local-steps", "2")]
)
def test_the_best_checkpoint_is_what_a_job_of_its_steps_ends_with(
    fleet: LoopbackFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: tuple[str, ...]
) -> None:
    (tmp_path / "best.py").write_text(JOB)
    here = ["--state-dir", str(fleet.state), "--json"]

    def called(*words: str) -> dict[str, object]:
        assert run(app, [*words, *here]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    def exported(job: str, *options: str) -> dict[str, torch.Tensor]:
        path = tmp_path / f"{job}.safetensors"
        called("export", job, "-o", str(path), *options)
        return load_file(path)

    def trained(steps: int) -> str:
        job = str(called("submit", str(tmp_path / "best.py"), "--steps", str(steps), *how)["job"])
        assert fleet.client.wait(job).step == steps
        return job

    job = trained(STEPS)
    update = fleet.client.wait(job)
    assert 0 < update.best_checkpoint < STEPS - 4  # of those that are older than the newest two
    best, last = exported(job, "--step", "best"), exported(job)
    assert [name for name in best if not torch.equal(best[name], last[name])]
    alone = exported(trained(update.best_checkpoint))
    assert best.keys() == alone.keys()
    assert [name for name in best if not torch.equal(best[name], alone[name])] == []
    at = exported(job, "--step", str(update.best_checkpoint))
    assert all(torch.equal(at[name], best[name]) for name in best)


def test_a_job_that_gets_no_better_ends_early_and_its_workers_train_the_next(
    fleet: LoopbackFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "best.py").write_text(JOB)
    here = ["--state-dir", str(fleet.state), "--json"]

    def trained(steps: int, *options: str) -> pb.JobUpdate:
        command = ["submit", str(tmp_path / "best.py"), "--steps", str(steps), "--partitioner", "even"]
        assert run(app, [*command, *options, *here]) == 0
        return fleet.client.wait(json.loads(capsys.readouterr().out)["job"])

    update = trained(2000, "--patience", "2")
    assert update.state == "finished", update.reason
    assert update.best_step < update.step < 2000
    assert "evaluations without a held-out loss below" in update.reason
    assert 0 < update.best_checkpoint <= update.checkpoint_step <= update.step
    again = trained(4)
    assert (again.state, again.step) == ("finished", 4)
