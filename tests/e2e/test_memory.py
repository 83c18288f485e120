"""Real workers under limits that their stages do not keep to: the job goes on with another plan."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atoll import ByteText, Job, Optimizer, TrainingSpec
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.prepare import Prepared, prepare
from experiments.chaos.fleet import Facts
from experiments.chaos.promises import commits
from worker.hosting.contained.control_group import memory_groups

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


def unlimited(prepared: Prepared) -> tuple[int, int]:
    """What a worker takes itself, and the most bytes that a stage of the job's plan for two workers holds."""
    with HalfFleet(2) as fleet:
        own = max(worker.device.own_memory_bytes for worker in fleet.client.status().workers)
        shown = list(fleet.client.watch(fleet.client.submit(prepared).job))
        assert shown[-1].state == "finished", shown[-1].reason
        return own, max(stage.measured_bytes for update in shown for stage in update.stages)


@pytest.mark.slow
def test_with_half_the_truth_a_stage_is_killed_the_job_ends_and_nothing_is_trained_twice() -> None:
    if why_not := memory_groups():
        pytest.skip(why_not)
    own, most = unlimited(prepare(tied_llama(), partitioner="even"))
    prepared = prepare(tied_llama(), partitioner="one_piece")
    # The half-told planner finds that cut or one like it: it counts half of a figure of which a stage holds
    # three quarters at least.
    limit = ("--memory", f"{(own + 3 * most // 4) // MIB}MiB")
    with HalfFleet(2, options=limit) as fleet:
        job = fleet.client.submit(prepared).job
        facts = Facts(fleet.state / "journal.sqlite")
        grown = False
        for last in fleet.client.watch(job):
            if last.HasField("plan") and not grown:
                grown = True
                fleet.join(2)
                fleet.join(3)
        facts.look()
        log = (fleet.state.parent / "coordinator.log").read_text()
        assert last.state == "finished", f"{last.reason}\n{log[-3000:]}"
        assert "killed for memory" in log
        # A stage is killed before a step is committed, or the step that was in flight is repeated.
        assert commits(facts.of(job)) == list(range(STEPS))
        assert not any("quarantined" in worker.reason for worker in fleet.client.status().workers)
