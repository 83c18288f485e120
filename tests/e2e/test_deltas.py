"""States go to the store as deltas from real workers, and a job resumes from them to the bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.real_workers import LoopbackFleet
from coordinator.cli.main import app
from hostos.command_line import run

STEPS = 8
JOB = """
import torch
from torch import nn
from atoll import Job, Optimizer, Rows, TrainingSpec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.outer = nn.Linear(64, 512), nn.Linear(512, 64)
        self.outer.requires_grad_(False)

    def forward(self, x):
        return (self.outer(torch.tanh(self.inner(x))) - x).square().mean()

def job():
    some = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))
    training = TrainingSpec(
        steps=1, n_micro=2, seed=3, optimizer=Optimizer(lr=1e-5), checkpoint_every=2, int8_moments=INT8
    )
    return Job(Net(), {"x": some[:4]}, Rows({"x": some}), training, "small-steps")
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2) as started:
        yield started


@pytest.mark.parametrize("int8", [False, True])
def test_a_job_stored_by_deltas_resumes_to_the_bits_of_the_whole(
    fleet: LoopbackFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], int8: bool
) -> None:
    (tmp_path / "small.py").write_text(JOB.replace("INT8", str(int8)))
    here = ["--state-dir", str(fleet.state), "--json"]

    def trained(steps: int, *options: str) -> tuple[str, dict[str, torch.Tensor]]:
        command = ["submit", str(tmp_path / "small.py"), "--steps", str(steps), "--partitioner", "even"]
        assert run(app, [*command, *options, *here]) == 0
        job = json.loads(capsys.readouterr().out)["job"]
        assert fleet.client.wait(job).checkpoint_step == steps
        weights = tmp_path / f"{job}.safetensors"
        assert run(app, ["export", job, "-o", str(weights), *here]) == 0
        capsys.readouterr()
        return job, load_file(weights)

    first, _ = trained(STEPS)
    logs = "".join(path.read_text() for path in fleet.state.parent.glob("*.log"))
    sent = [
        (int(m[1]), int(m[2])) for m in re.finditer(r"state\.patched.*?bytes\D+(\d+)\D+?of\D+(\d+)", logs)
    ]
    assert sent, logs[-2000:]
    assert sum(whole for _, whole in sent) > 1.2 * sum(n_bytes for n_bytes, _ in sent)
    assert "blob.not_patched" not in logs
    _, resumed = trained(2 * STEPS, "--resume", first)
    _, whole = trained(2 * STEPS)
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []
