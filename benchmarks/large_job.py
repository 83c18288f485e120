"""GPT-2 with random weights and its tied head: the job of ``benchmarks.large``.

Dims of `transformers`' own configurations; dropout off, so that one process has the same losses.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from atoll import ByteText, Job, Optimizer, TrainingSpec

SIZE = "small"
SIZES = {"tiny": (64, 3, 4), "small": (768, 12, 12), "medium": (1024, 24, 16)}  # width, layers, heads
LENGTH = 32
MICRO_BATCH = 1
N_MICRO = 4
STEPS = 4
SEED = 0


def job() -> Job:
    """What Atoll trains: bytes of the standard library's sources as tokens, labels the same."""
    torch.manual_seed(SEED)
    width, layers, heads = SIZES[SIZE]
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    empty = torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)
    return Job(
        module=GPT2LMHeadModel(config),
        example_inputs={"input_ids": empty, "labels": empty.clone()},
        data=ByteText(
            length=LENGTH,
            input="input_ids",
            inputs_too={"labels": "input_ids"},
            max_bytes=2_000_000,
            seed=SEED,
        ),
        training=TrainingSpec(
            steps=STEPS, n_micro=N_MICRO, seed=SEED, optimizer=Optimizer(lr=3e-4), eval_batches=0
        ),
        name=f"gpt2-{SIZE}",
    )
