"""A byte-level language model of texts that differ by nature: each client writes in its own genre.

    atoll data fetch brown
    atoll data split brown --out clients                 # one file a genre
    atoll-worker data add brown clients/client-news.txt --schema-file clients/schema.txt --accept any
    atoll submit examples/federated_brown.py --watch

The data set "brown" has one field, tokens:int64[128], windows of bytes; any text registered so will do. The
model's owner holds no text: clients evaluate on the share of their own data that is kept for it.
Dims: B batch, T length, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Federated, Job, Optimizer, Registered, Schedule, ScheduleKind, TrainingSpec

# ---------------------------------------------------------------- knobs

STRATEGY = "fedavgm"
ROUNDS = 30
CLIENTS = 5  # a round; 0: all that hold the data
LOCAL_STEPS = 60  # at most: genres differ much in length
MICRO_BATCH = 16
LENGTH = 128  # bytes, as registered
WIDTH = 96
LAYERS = 5
LEARNING_RATE = 2e-3
UPLINK = "off"  # or lossless, int8_block, topk:32, bcrs, bcrs:32
SEED = 0

VOCABULARY = 256
REACH = 3  # bytes seen by one convolution; dilation doubles from layer to layer


class Layer(nn.Module):
    """A causal, dilated convolution with a gate, added to its input."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.before = (REACH - 1) * dilation
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, 2 * width, REACH, dilation=dilation)

    def forward(self, x_BTD: Tensor) -> Tensor:
        past_BDT = F.pad(self.norm(x_BTD).transpose(1, 2), (self.before, 0))
        value, gate = self.mix(past_BDT).chunk(2, dim=1)
        out_BTD: Tensor = x_BTD + (value * torch.sigmoid(gate)).transpose(1, 2)
        return out_BTD


class Letters(nn.Module):
    """Tokens [B, T] -> mean cross-entropy of each next byte in nats; in evaluation the accuracy too."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, 2**at) for at in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor | dict[str, Tensor]:
        x_BTD = self.bytes(tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits = self.head(self.norm(x_BTD))[:, :-1].reshape(-1, VOCABULARY)
        expected = tokens[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits, expected)
        if self.training:
            return loss
        return {"loss": loss, "accuracy": (logits.argmax(1) == expected).float().mean()}


def job() -> Job:
    """What Atoll trains, where the texts are."""
    torch.manual_seed(SEED)
    return Job(
        module=Letters(WIDTH, LAYERS),
        example_inputs={"tokens": torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH))},
        data=Registered("brown", {"tokens": "tokens"}),
        training=TrainingSpec(
            steps=ROUNDS,
            n_micro=1,
            seed=SEED,
            optimizer=Optimizer(lr=LEARNING_RATE, weight_decay=0.01, clip_norm=1.0),
            schedule=Schedule(ScheduleKind.COSINE, warmup_steps=2),
        ),
        federated=Federated(
            STRATEGY,
            {"beta": 0.7, "server_lr": 0.5} if STRATEGY == "fedavgm" else {},
            local_steps=LOCAL_STEPS,
            clients=CLIENTS,
            uplink=UPLINK,
            evaluate_every=5,
        ),
        metrics=("accuracy",),
        name=f"brown-{STRATEGY}",
    )
