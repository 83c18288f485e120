"""Predicted steps of models with tied heads, beside their bound and the best plan of one piece a device.

    python -m benchmarks.tied_plans [--models llama,small,medium,large] [--seed N] [--json]

A Llama of 38 M parameters on six machines of 400 MiB, GPT-2 of 124, 355 and 774 M on six of 8 GiB, 100 Mbit/s
and 20 ms between any two. Nothing runs but `atoll plan`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from atoll.errors import AtollError
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.large_plan import FLEET, JOB, SIZES

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from atoll import ByteText, Job, Optimizer, TrainingSpec

def job():
    torch.manual_seed({seed})
    config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
                         num_key_value_heads=4, vocab_size=32000, tie_word_embeddings=True, use_cache=False)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    return Job(LlamaForCausalLM(config), {{"input_ids": tokens, "labels": tokens}},
               ByteText(length=64, input="input_ids", inputs_too=("labels",), max_bytes=2_000_000),
               TrainingSpec(steps=5, n_micro=4, optimizer=Optimizer(lr=3e-4), eval_batches=0), "llama")
"""
MODELS = ("llama", "small", "medium", "large")


def planned(model: str, seed: int, partitioner: str) -> dict[str, Any]:
    """Plan ``model`` once; AtollError where the command fails."""
    with TemporaryDirectory() as name:
        job, fleet = Path(name) / "job.py", Path(name) / "fleet.toml"
        if model == "llama":
            job.write_text(LLAMA.format(seed=seed))
        else:
            width, layers, heads = SIZES[model]
            job.write_text(
                JOB.format(seed=seed, width=width, layers=layers, heads=heads, device="cpu", weights=None)
            )
        fleet.write_text(FLEET.format(mib=400 if model == "llama" else 8192))
        command = [sys.executable, "-m", "coordinator.cli", "plan", str(job), "--fleet", str(fleet), "--json"]
        done = subprocess.run(
            [*command, "--partitioner", partitioner], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise AtollError(f"`atoll plan` of {model} ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    made = parser(__doc__ or "")
    made.add_argument("--models", default=",".join(MODELS))
    options = made.parse_args(argv)
    found = {}
    for model in options.models.split(","):
        ring, apart = (planned(model, options.seed, how)["prediction"] for how in ("op_fence", "one_piece"))
        step_s, bound_s = ring["step_s"], ring["lower_bound_s"]
        found[model] = {
            "step_s": step_s,
            "lower_bound_s": bound_s,
            "of_bound": step_s / bound_s,
            "one_piece_s": apart["step_s"],
            "faster": apart["step_s"] / step_s,
        }
        print(
            f"{model:6s} {step_s:.3f} s a step, {step_s / bound_s:.2f} of its lower bound; with one piece a "
            f"device {apart['step_s']:.3f} s, {apart['step_s'] / step_s:.1f} times as long",
            flush=True,
        )
    return conclude({"machine": machine(), "seed": options.seed, **found}, options.json)


if __name__ == "__main__":
    execute(main)
