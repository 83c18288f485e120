"""A small GPT that is narrow in one block, or as it is with RANK 0: the job of ``benchmarks.split_lab``."""

from __future__ import annotations

import torch

from atoll import ByteText, Job, Optimizer, TrainingSpec
from examples.gpt import GPT
from strategies.split_finetune_module import split_finetune

WIDTH = 384
LAYERS = 2
HEADS = 6
LENGTH = 64
MICRO_BATCH = 4
RANK = 4
BLOCK = 1


def job() -> Job:
    """The job that is submitted."""
    torch.manual_seed(0)
    module = GPT(WIDTH, LAYERS, HEADS, LENGTH)
    if RANK:
        split_finetune(module, f"blocks.{BLOCK}", RANK)
    return Job(
        module=module,
        example_inputs={"tokens": torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)},
        data=ByteText(length=LENGTH, input="tokens", max_bytes=500_000),
        training=TrainingSpec(steps=100, n_micro=4, optimizer=Optimizer(lr=1e-3), eval_batches=0),
        name="split-gpt",
    )
