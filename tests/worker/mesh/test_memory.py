"""Memory of each process of a site against its plan's figure, on a model large enough to show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from atoll.job import EXACTLY, Optimizer, TrainingSpec
from atoll.mesh.layout import Inside
from atoll.stage_memory import BESIDE_BYTES, HEAP_SHARE
from coordinator.planning.inside.costs import inside_costs
from tests.models import Example, of_module
from tests.worker.mesh.site import assigned_to, case_of, site
from tests.worker.stage.steps.crew import Crew
from worker.cancel import Cancel

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
TRAINING = TrainingSpec(steps=3, n_micro=4, seed=5, optimizer=Optimizer(lr=1e-3), eval_batches=1)


def gpt2(words: int = 8192, length: int = 64, rows: int = 4, width: int = 384, layers: int = 4) -> Example:
    """GPT-2 with 10 million parameters where nothing else is asked for, its head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip

    def batch(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, words, (rows, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return of_module("gpt2", GPT2LMHeadModel(config), batch)


def peak_bytes(process: int) -> int:
    """The most that a process has held."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError(process)


@pytest.mark.skipif(not psutil.LINUX, reason="reads /proc")
@pytest.mark.parametrize("kind", [Inside.SHARDS, Inside.TENSOR, Inside.SEQUENCE])
def test_a_process_takes_at_most_a_seventh_more_than_its_plan_says(tmp_path: Path, kind: Inside) -> None:
    taken, planned, model = measured(gpt2(), kind, 2, TRAINING, tmp_path)
    assert taken <= 1.15 * planned
    assert taken >= 0.3 * model  # it is no figure that anything would keep


@pytest.mark.skipif(not psutil.LINUX, reason="reads /proc")
@pytest.mark.parametrize("kind", [Inside.SEQUENCE, Inside.RING])
def test_a_process_takes_no_more_than_its_plan_says_where_rows_are_long(tmp_path: Path, kind: Inside) -> None:
    one = replace(TRAINING, n_micro=1)
    taken, planned, model = measured(gpt2(64, 8192, 1, 64, 2), kind, 4, one, tmp_path)
    assert taken <= 1.15 * planned
    assert taken >= 0.3 * model


def measured(
    example: Example, kind: Inside, size: int, training: TrainingSpec, folder: Path
) -> tuple[float, float, float]:
    """Bytes that the last process of a site takes in two steps and a snapshot, that its plan says, and of
    these the model's."""
    made = case_of(example)
    inside = inside_costs(made.dag, training, EXACTLY, kind, size)
    model = inside.memory.bytes(0, len(made.dag.ops), training.n_micro)
    planned = model * (1 + HEAP_SHARE) + BESIDE_BYTES
    with site(size, folder) as where:
        follower = where.leader._followers[-1]
        rest = psutil.Process(follower.process.pid).memory_info().rss
        (assignment,) = assigned_to(made, kind, training=training)
        stage = where.stage(made, assignment)
        crew = Crew(made, [assignment], stages={0: lambda _: stage})
        for step in range(2):
            crew.all("run_step", step, Cancel())
            crew.all("apply", step, 1.0)
        crew.snapshot()
        taken = peak_bytes(follower.process.pid) - rest
    print(f"{kind}: {taken / 2**20:.0f} MiB taken, {planned / 2**20:.0f} planned: {taken / planned:.2f}")
    return taken, planned, model
