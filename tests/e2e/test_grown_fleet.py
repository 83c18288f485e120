"""A worker that joins real daemons while a job trains: the job is trained on both, to the bits of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.waits import came_about
from coordinator.cli.local_fleet import COORDINATOR, LocalFleet
from coordinator.client.job_file import load_job
from coordinator.client.prepare import prepare
from coordinator.messages.facts import PlanAdopted
from experiments.chaos.fleet import Facts
from experiments.chaos.promises import commits

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
STEPS = 150
SETTINGS = (
    "WIDTH=128", "LAYERS=2", "MICRO_BATCH=64", "N_MICRO=4", f"STEPS={STEPS}", "blocks=2", "eval_batches=0",
)  # fmt: skip


@pytest.mark.slow
def test_a_job_of_one_machine_goes_on_with_two(tmp_path: Path) -> None:
    """As two stages or as two replicas, whichever these machines are faster with; no step is repeated."""
    with LocalFleet(1, ["--threads", "1", "--sandbox", "off"]) as fleet:
        facts = Facts(fleet.folder / COORDINATOR / "journal.sqlite")

        def trained(job: str) -> int:
            facts.look()
            return len(commits(facts.of(job)))

        grows = fleet.client.submit(prepare(load_job(GPT, (*SETTINGS, "replicas=auto")))).job
        assert came_about(lambda: trained(grows) >= 8, ())
        fleet.join("host1")
        fleet.client.wait(grows)
        assert trained(grows) == STEPS
        assert commits(facts.of(grows)) == list(range(STEPS))
        plans = [fact.plan for fact in facts.of(grows) if isinstance(fact, PlanAdopted)]
        assert [len(plan.places) for plan in plans] == [1, 2], fleet.log(COORDINATOR)

        alone = fleet.client.submit(prepare(load_job(GPT, (*SETTINGS, "replicas=1")), standbys=0)).job
        fleet.client.wait(alone)
        for job in (grows, alone):
            fleet.client.export(job, tmp_path / job)
        found, expected = (load_file(tmp_path / job) for job in (grows, alone))
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
