"""A GPT whose head is its embedding, as of most language models: the table is most of the model.

    python -m benchmarks.pipeline_vs_torch --scenario homes --job benchmarks/tied_gpt_job.py ...

Sequences are short, as what a table costs is its bytes a step, whatever is read of it. Bytes use the first
256 of the vocabulary's rows; a tokenizer would use all of them, for the same seconds and bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import ByteText, Job, Optimizer, TrainingSpec
from examples.gpt import Block

VOCABULARY = 5120
WIDTH = 256
LAYERS = 4
HEADS = 4
LENGTH = 32
MICRO_BATCH = 1
TIED = True


class GPT(nn.Module):
    """Returns the mean cross-entropy in nats a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.table.weight, std=0.02)
        if TIED:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x_BTD = self.table(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def job() -> Job:
    """The job that is submitted."""
    torch.manual_seed(0)
    return Job(
        module=GPT(),
        example_inputs={"tokens": torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)},
        data=ByteText(length=LENGTH, input="tokens", max_bytes=500_000),
        training=TrainingSpec(steps=100, n_micro=4, optimizer=Optimizer(lr=1e-3), eval_batches=0),
        name="tied-gpt",
    )
