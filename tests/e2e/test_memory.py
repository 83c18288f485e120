"""Real workers under limits that their stages do not keep to: the job goes on with another plan."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atoll import ByteText, Job, Optimizer, TrainingSpec
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.prepare import prepare
from experiments.chaos.fleet import Facts
from experiments.chaos.promises import commits

MIB = 1 << 20
STEPS, LENGTH, VOCABULARY = 8, 32, 16_000


def tied_llama() -> Job:
    """A Llama of 14 M parameters with a tied head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    example = {name: torch.zeros(1, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    return Job(
        module=LlamaForCausalLM(config),
        example_inputs=example,
        data=ByteText(length=LENGTH, input="input_ids", inputs_too=("labels",), max_bytes=100_000),
        training=TrainingSpec(steps=STEPS, n_micro=4, optimizer=Optimizer(lr=3e-4), eval_batches=0),
        name="tied",
    )


class HalfFleet(LoopbackFleet):
    """Workers whose coordinator plans with half of what stages take."""

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        chosen = "tests.e2e.half_planner" if name == "coordinator" else module
        super()._spawn(name, chosen, *arguments)


def own_bytes(options: Sequence[str]) -> int:
    """What a worker takes itself on this machine."""
    with LoopbackFleet(1, options=options) as fleet:
        (worker,) = fleet.client.status().workers
        return worker.device.own_memory_bytes


@pytest.mark.slow
def test_with_half_the_truth_the_job_ends_and_nothing_is_trained_twice() -> None:
    own, prepared = own_bytes(()), prepare(tied_llama())
    limit = ("--memory", f"{(own + 240 * MIB) // MIB}MiB")
    with HalfFleet(4, options=limit) as fleet:
        job = fleet.client.submit(prepared).job
        facts = Facts(fleet.state / "journal.sqlite")
        shown = list(fleet.client.watch(job))
        last, stages = shown[-1], [stage for update in shown for stage in update.stages]
        facts.look()
        log = (fleet.state.parent / "coordinator.log").read_text()
        assert last.state == "finished", f"{last.reason}\n{log[-3000:]}"
        assert any(stage.measured_bytes > stage.planned_bytes > 0 for stage in stages)
        # Whichever stages did not fit: they were killed before a step was committed, or repeated it.
        assert commits(facts.of(job)) == list(range(STEPS))
        assert not any("quarantined" in worker.reason for worker in fleet.client.status().workers)
