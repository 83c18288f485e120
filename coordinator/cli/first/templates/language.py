"""A language model that predicts the next byte of a text.

    atoll dev job.py                       # train it on this machine
    atoll submit job.py --watch            # train it on a fleet
    atoll submit job.py --set LAYERS=4     # with another value of a constant below

Plain PyTorch: the model returns its loss and knows nothing of Atoll.
Dims: B batch, T length, D width, H heads, V vocabulary.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import ByteText, Job, Optimizer, Schedule, ScheduleKind, TrainingSpec

TEXT = ""  # a text file of yours; "": the source code of Python's standard library
WIDTH, LAYERS, HEADS = 128, 2, 4
LENGTH = 64  # bytes of a sample
MICRO_BATCH, N_MICRO = 8, 4  # samples of a micro-batch, micro-batches of a step
STEPS = 200
LEARNING_RATE = 2e-3


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTD: Tensor) -> Tensor:
        split = (part.unflatten(2, (HEADS, -1)) for part in self.qkv(self.norm_1(x_BTD)).chunk(3, 2))
        q, k, v = (part.transpose(1, 2) for part in split)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = self.mlp(self.norm_2(x_BTD))
        return x_BTD + hidden


class LanguageModel(nn.Module):
    """Returns the mean cross-entropy of each byte given those before it, in nats."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BTD = self.bytes(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        logits_BTV = self.head(self.norm(self.blocks(x_BTD)))
        return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def job() -> Job:
    """Return the job that Atoll trains."""
    torch.manual_seed(0)
    return Job(
        module=LanguageModel(),
        example_inputs={"tokens": torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)},
        data=ByteText(length=LENGTH, text=Path(TEXT).read_bytes() if TEXT else None, max_bytes=4_000_000),
        training=TrainingSpec(
            steps=STEPS,
            n_micro=N_MICRO,
            optimizer=Optimizer(lr=LEARNING_RATE, weight_decay=0.01, clip_norm=1.0),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=20),
            eval_every=50,
            eval_batches=16,
        ),
        name="my-job",
    )
